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
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from predict.engine.batch import span_inputs
from predict.engine.choices import Row
from predict.engine.drafts import FAILED, DraftSpan, StateDrafting, StateProposer, Tapped
from predict.engine.request_state import Request, RequestStatus
from predict.engine.sampler import UnadjustedSampler
from predict.engine.scheduled import ScheduledSpan

if TYPE_CHECKING:
    from paddle import Tensor


@dataclass
class _State:
    """A request's rows in the drafter's cache."""

    block_ids: Sequence[int]
    num_rows: int  # leading ones, of true states
    output: Tensor  # [1, H] the layers', of the last of these


class _Piece(NamedTuple):
    """Rows of one request that run together."""

    request: Request
    span: DraftSpan
    row: int  # of the first among the model's step


class ChainProposer(StateProposer):
    """See Proposer. All requests advance together, a row of each for each draft."""

    lookahead = 1

    def __init__(self, drafting: StateDrafting):
        self.drafting, self.network = drafting, drafting.network
        self.taps = drafting.network.taps
        self._sampler = UnadjustedSampler(drafting.sampler.seed, drafting.sampler.eos_token_ids)
        self._states: dict[int, _State] = {}
        # By block, the digest of the full block whose rows it has.
        self._holds: list[bytes | None] = [None] * drafting.num_blocks

    def follow(self, tapped: Sequence[Tapped], hidden: Mapping[str, Tensor]) -> None:
        import paddle

        pieces = [piece for each in tapped if (piece := self._piece(*each)) is not None]
        if not pieces:
            return
        rows = [row for _, span, first in pieces for row in range(first, first + span.num_tokens)]
        inputs = span_inputs([piece.span for piece in pieces], self.drafting.block_size)
        with paddle.no_grad():
            output = self.network.run(inputs, self.network.states(hidden, rows))
        end = 0
        for request, span, _ in pieces:
            end += span.num_tokens
            num_rows = span.start + span.num_tokens
            state = _State(span.block_ids, num_rows, output[end - 1 : end])
            self._states[request.request_id] = state
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
        return _Piece(request, DraftSpan(tokens, start, scheduled.block_ids, 0), row)

    def is_ready(self, request: Request) -> bool:
        state = self._states.get(request.request_id)
        return (
            state is not None
            and state.block_ids is request.block_ids
            and state.num_rows == request.num_tokens - 1
        )

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[list[int]]:
        import paddle

        num_blocks, block_size = self.drafting.num_blocks, self.drafting.block_size
        drafts: list[list[int]] = [[] for _ in requests]
        active = list(range(len(requests)))
        output = paddle.concat([self._states[each.request_id].output for each in requests])
        with paddle.no_grad():
            while active:
                rows = [Row(requests[index], tuple(drafts[index])) for index in active]
                new = self.drafting.chosen(self.network.logits(output), self._sampler, rows)
                spans: list[DraftSpan] = []
                going_on: list[int] = []
                kept: list[int] = []
                for row, (index, token) in enumerate(zip(active, new, strict=True)):
                    if token == FAILED:
                        continue
                    request, own = requests[index], drafts[index]
                    own.append(token)
                    if len(own) < limits[index]:
                        # Behind the request's own blocks one more, for rows that nobody keeps.
                        table = [*request.block_ids, num_blocks + index]
                        place = request.num_tokens - 2 + len(own)
                        spans.append(DraftSpan((token,), place, table, 0))
                        going_on.append(index)
                        kept.append(row)
                active = going_on
                if active:
                    states = self.network.fed(output)
                    if len(kept) < states.shape[0]:
                        states = paddle.index_select(states, paddle.to_tensor(kept))
                    output = self.network.run(span_inputs(spans, block_size), states)
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
