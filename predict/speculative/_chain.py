"""Drafts one after another from a drafter with a cache of its own: EAGLE's heads, MTP layers.

Row i of the drafter takes the model's state of place i and the token of place i + 1, and its output
gives the token of place i + 2. A step's states become rows once its tokens are known, so that rows
behind guessed states are written again, from true ones. Its cache has blocks with the same numbers
as the model's. The last row of a full block depends on the token behind it, which the digests of
blocks include (`lookahead`): a block of the prefix cache has the rows that a request needs, or does
not match; one that was computed while nobody asked for states is computed again (`suits`).
A request whose rows are not all there goes on without drafts: one with a tuned prefix, and one that
ran while nobody asked for states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from predict.engine.choices import Row
from predict.engine.drafts import FAILED, DraftSpan, StateDrafting, StateProposer, Tapped
from predict.engine.request_state import Request, RequestStatus
from predict.engine.scheduled import ScheduledSpan
from predict.nn.drafters import FED

if TYPE_CHECKING:
    from paddle import Tensor


class _State(NamedTuple):
    """A request's rows in the drafter's cache."""

    block_ids: Sequence[int]
    num_rows: int  # leading ones, of true states


class _Piece(NamedTuple):
    """Rows of one request that run together."""

    request: Request
    span: DraftSpan
    row: int  # of the first among the model's step


class _First(NamedTuple):
    """The first draft behind a request's tokens."""

    token: int  # or a placeholder
    row: int  # of the state for the next one


class ChainProposer(StateProposer):
    """See Proposer. All requests advance together, a row of each for each draft."""

    lookahead = 1

    def __init__(self, drafting: StateDrafting):
        super().__init__(drafting)
        self._states: dict[int, _State] = {}
        self._first: dict[int, _First] = {}  # of the last step's requests
        self._fed: Mapping[str, Tensor] = {}  # states behind the rows that gave these
        # By block, the digest of the full block whose rows it has.
        self._holds: list[bytes | None] = [None] * drafting.num_blocks

    def follow(self, tapped: Sequence[Tapped], hidden: Mapping[str, Tensor]) -> None:
        self._first = {}
        pieces = [piece for each in tapped if (piece := self._piece(*each)) is not None]
        if not pieces:
            return
        state_rows = [
            row for _, span, first in pieces for row in range(first, first + span.num_tokens)
        ]
        going_on = [request for request, span, _ in pieces if span.num_logits]
        spans, rows = [piece.span for piece in pieces], [Row(request) for request in going_on]
        tokens = self.drafting.launch(spans, hidden, self.taps, state_rows, rows)
        self._fed = tokens.hidden
        new = cast(list[int], tokens.take())
        for row, (request, token) in enumerate(zip(going_on, new, strict=True)):
            self._first[request.request_id] = _First(token, row)
        for request, span, _ in pieces:
            num_rows = span.start + span.num_tokens
            self._states[request.request_id] = _State(span.block_ids, num_rows)
            self._mark(request.block_digests, span)

    def _piece(self, scheduled: ScheduledSpan, row: int) -> _Piece | None:
        """The rows of a span whose tokens are known; None for a request without drafts.

        Of a request that has just ended, those that fill a block, which others may find.
        """
        request, start, block_size = scheduled.request, scheduled.start, self.drafting.block_size
        end = min(start + scheduled.num_tokens, request.num_known_tokens - 1)
        has_ended = request.finish_reason in ("stop", "length")
        if end <= start or not (request.status is RequestStatus.RUNNING or has_ended):
            return None
        if has_ended and start // block_size == end // block_size:
            return None
        if request.prefix.num_tokens or not self._reaches(scheduled):
            self._states.pop(request.request_id, None)
            return None
        tokens = request.token_ids[start + 1 : end + 1]
        goes_on = not has_ended and end == request.num_known_tokens - 1
        return _Piece(request, DraftSpan(tokens, start, scheduled.block_ids, int(goes_on)), row)

    def is_ready(self, request: Request) -> bool:
        state = self._states.get(request.request_id)
        return (
            state is not None
            and request.request_id in self._first
            and state.block_ids is request.block_ids
            and state.num_rows == request.num_tokens - 1
        )

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[list[int]]:
        num_blocks, fed = self.drafting.num_blocks, self._fed
        firsts = [self._first.pop(each.request_id) for each in requests]
        drafts = [[] if each.token == FAILED else [each.token] for each in firsts]
        # Which have more drafts, and the rows of their last ones in the step that gave these.
        active = [(index, each.row) for index, each in enumerate(firsts)]
        while active := [each for each in active if 0 < len(drafts[each[0]]) < limits[each[0]]]:
            spans: list[DraftSpan] = []
            for index, row in active:
                request, own = requests[index], drafts[index]
                # Behind the request's own blocks one more, for rows that nobody keeps.
                table = [*request.block_ids, num_blocks + index]
                token = own[-1] if own[-1] >= 0 else -1 - row
                place = request.num_tokens - 2 + len(own)
                spans.append(DraftSpan((token,), place, table, 1))
            rows = [Row(requests[index], tuple(drafts[index])) for index, _ in active]
            tokens = self.drafting.launch(spans, fed, (FED,), [row for _, row in active], rows)
            fed, going_on = tokens.hidden, list[tuple[int, int]]()
            new = cast(list[int], tokens.take())
            for row, ((index, _), draft) in enumerate(zip(active, new, strict=True)):
                if draft != FAILED:
                    drafts[index].append(draft)
                    going_on.append((index, row))
            active = going_on
        return drafts

    def suits(self, block_id: int, digest: bytes) -> bool:
        return self._holds[block_id] == digest

    def forget(self, request_id: int) -> None:
        self._states.pop(request_id, None)

    def _reaches(self, span: ScheduledSpan) -> bool:
        """Whether the cache has the rows of all places before a span."""
        request, start, block_ids = span.request, span.start, span.block_ids
        state = self._states.get(request.request_id)
        if state is not None and state.block_ids is block_ids:
            return state.num_rows >= start
        num_full, rest = divmod(start, self.drafting.block_size)
        held = [self._holds[block] for block in block_ids[:num_full]]
        return not rest and held == request.block_digests[:num_full]

    def _mark(self, digests: Sequence[bytes], span: DraftSpan) -> None:
        """Records the content of the blocks of a span's rows, which are written."""
        block_size, end = self.drafting.block_size, span.start + span.num_tokens
        for index in range(span.start // block_size, -(-end // block_size)):
            is_full = (index + 1) * block_size <= end and index < len(digests)
            self._holds[span.block_ids[index]] = digests[index] if is_full else None
