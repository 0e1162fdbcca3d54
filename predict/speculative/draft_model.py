"""Drafts of a smaller model with the same vocabulary.

Its cache has blocks with the same numbers as the target's, and a request's block table holds for
both caches. So requests start, grow, are preempted and end without notice to the draft model, and a
prompt with blocks in the prefix cache often has them in both caches.
A tuned prefix is the target's alone: the draft's cache begins with the request's own tokens, in the
blocks behind the prefix's (see predict.adapters.prefixes). Behind the target's blocks the draft's
cache has one more for each request of a batch, for drafts that run past the blocks that the request
owns.

Each draft is drawn as the target will draw its token: with the request's parameters and the random
number of that place in the output. Verification keeps what the target draws and so does not depend
on drafts; but two models that agree on a distribution then agree on the token too, greedy or not.

On a GPU the host does not wait for drafts: they are placeholders for tokens on the device, and
`observe` receives their values. A Follower's steps begin behind a verification before its result
is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from predict.adapters.prefixes import draft_table
from predict.engine.batch import span_inputs
from predict.engine.choices import Row
from predict.engine.drafts import (
    FAILED,
    DraftNetwork,
    Drafts,
    DraftSpan,
    ProposeBehind,
    SpeculativeConfig,
    Verified,
    accepted_tokens,
)
from predict.engine.request_state import Request
from predict.engine.sampler import UnadjustedSampler
from predict.engine.step import Followed


@dataclass
class _State:
    """A request's tokens in the draft's cache: its first `num_known` tokens, then `drafts`."""

    block_ids: list[int]
    num_known: int
    num_written: int  # drafts of the last proposal that fit into the request's own blocks
    drafts: list[int] = field(default_factory=list)  # the verified ones of these
    num_behind: int = 0  # drafts proposed behind the verification of these


class DraftModelProposer:
    """See Proposer. All requests advance together: a step of the draft model for each draft."""

    looks_up = False
    propose_behind: ProposeBehind | None

    def __init__(self, network: DraftNetwork):
        self.network = network
        sampler = network.sampler
        if network.runner.num_ahead:
            sampler = UnadjustedSampler(sampler.seed, sampler.eos_token_ids)
        self._sampler = sampler
        self._states: dict[int, _State] = {}
        # By block, what it holds: the digest of a full block's prefix, or (request, index).
        self._holds: list[bytes | tuple[int, int] | None] = [None] * network.num_blocks
        self.propose_behind = None if network.follower is None else self._propose_behind

    @property
    def num_recorded(self) -> int:
        return self.network.runner.num_recorded

    def propose(
        self, requests: Sequence[Request], limits: Sequence[int]
    ) -> Sequence[Sequence[int]]:
        try:
            return self._proposed(requests, limits)
        except Exception:
            # Blocks that were marked as written may not be.
            for request in requests:
                self._states.pop(request.request_id, None)
                for block in request.block_ids:
                    self._holds[block] = None
            raise

    def _proposed(
        self, requests: Sequence[Request], limits: Sequence[int]
    ) -> Sequence[Sequence[int]]:
        starts = [self._num_cached(request) for request in requests]
        self._catch_up(requests, starts)
        tables = [
            [*_table(request), self.network.num_blocks + index]
            for index, request in enumerate(requests)
        ]
        spans = [
            DraftSpan(request.token_ids[start:], start, table, 1)
            for request, start, table in zip(requests, starts, tables, strict=True)
        ]
        active = list(range(len(requests)))
        drafts: list[list[int]] = [[] for _ in requests]
        while active:
            new = self._launch(requests, active, spans, drafts)
            rows, active, spans = active, [], []
            for row, (index, token) in enumerate(zip(rows, new, strict=True)):
                if token == FAILED:
                    continue
                drafts[index].append(token)
                if len(drafts[index]) < limits[index]:
                    active.append(index)
                    place = requests[index].num_tokens + len(drafts[index]) - 1
                    newest = token if token >= 0 else -1 - row
                    spans.append(DraftSpan((newest,), place, tables[index], 1))
        block_size = self.network.block_size
        for request, own, start in zip(requests, drafts, starts, strict=True):
            self._mark(request, start, request.num_tokens + len(own) - 1)
            # The last token's block may be the step's to come.
            room = len(_table(request)) * block_size
            num_written = max(min(len(own) - 1, room - request.num_tokens), 0)
            self._states[request.request_id] = _State(
                request.block_ids, min(request.num_tokens, room), num_written
            )
        return drafts

    def observe(self, request: Request, drafts: Sequence[int], chosen: Sequence[int]) -> None:
        state = self._states.get(request.request_id)
        if state is None:
            return  # a proposal behind these drafts failed
        if not state.num_behind:
            state.drafts = list(drafts[: state.num_written])
            return
        # The cache has the new tokens too, and drafts behind them, within the blocks that the
        # request had and keeps.
        num_tokens = request.num_tokens + len(accepted_tokens(drafts, chosen))
        block_size = self.network.block_size
        room = len(_table(request)) * block_size
        kept = min(room, -(-num_tokens // block_size) * block_size)
        state.num_known, state.drafts = min(num_tokens, room), []
        state.num_written = max(min(state.num_behind - 1, kept - num_tokens), 0)
        state.num_behind = 0

    def _propose_behind(self, verified: Sequence[Verified], limits: Sequence[int]) -> Drafts:
        """See Proposer. Spans, rows and tables assume that all drafts are accepted.

        The first step has two tokens of each request: where all drafts are accepted, the last one
        is not in the cache yet.
        """
        follower, num_blocks = self.network.follower, self.network.num_blocks
        assert follower is not None
        able = [
            (each, limit)
            for each, limit in zip(verified, limits, strict=True)
            if self._can_follow(each, limit)
        ]
        tables = [
            [*_table(each.request), num_blocks + index] for index, (each, _) in enumerate(able)
        ]
        drafts: list[list[int]] = [[] for _ in able]
        spans = [
            DraftSpan((each.request.token_ids[-1], 0), _end(each) - 1, table, 1)
            for (each, _), table in zip(able, tables, strict=True)
        ]
        active = list(range(len(able)))
        num_chosen = 2
        while active:
            rows = [
                Row(able[i][0].request, (FAILED,) * (len(able[i][0].drafts) + 1 + len(drafts[i])))
                for i in active
            ]
            tokens = follower.launch_behind(
                span_inputs(spans, self.network.block_size),
                self._sampler.choices(rows),
                [Followed(able[i][0].row, able[i][0].drafts) for i in active],
                num_chosen,
            )
            new, before, active, spans = cast(list[int], tokens.take()), active, [], []
            for row, (i, token) in enumerate(zip(before, new, strict=True)):
                drafts[i].append(token)
                if len(drafts[i]) < able[i][1]:
                    active.append(i)
                    place = _end(able[i][0]) + len(drafts[i])
                    spans.append(DraftSpan((-1 - row,), place, tables[i], 1))
            num_chosen = 0
        for (each, _), own in zip(able, drafts, strict=True):
            request = each.request
            self._mark(request, request.num_tokens - 1, _end(each) + len(own))
            self._states[request.request_id].num_behind = len(own)
        return {each.request.request_id: own for (each, _), own in zip(able, drafts, strict=True)}

    def _can_follow(self, verified: Verified, limit: int) -> bool:
        """Whether the cache has all earlier tokens, and room for `limit` drafts."""
        request, num_drafts = verified.request, len(verified.drafts)
        state = self._states.get(request.request_id)
        room = (len(_table(request)) + 1) * self.network.block_size
        return (
            state is not None
            and state.block_ids is request.block_ids
            and state.num_behind == 0
            and state.num_known == request.num_tokens
            and state.num_written >= num_drafts - 1
            and _end(verified) + limit <= room
        )

    def settle(self) -> None:
        """Changes nothing: no work is put off."""

    def forget(self, request_id: int) -> None:
        self._states.pop(request_id, None)

    def _launch(
        self,
        requests: Sequence[Request],
        active: Sequence[int],
        spans: Sequence[DraftSpan],
        drafts: Sequence[Sequence[int]],
    ) -> list[int]:
        rows = [Row(requests[index], tuple(drafts[index])) for index in active]
        inputs = span_inputs(spans, self.network.block_size)
        tokens = self.network.runner.launch(inputs, self._sampler.choices(rows))
        return cast(list[int], tokens.take())  # a draft model has no beams

    def _catch_up(self, requests: Sequence[Request], starts: list[int]) -> None:
        """Runs tokens that the draft has not computed, except a few last ones; moves `starts`."""
        while True:
            left = self.network.token_budget
            spans: list[DraftSpan] = []
            for index, request in enumerate(requests):
                missing = request.num_tokens - 1 - starts[index]
                count = min(missing, left) if missing > MOST_WITH_LOGITS else 0
                if count > 0:
                    end = starts[index] + count
                    tokens = request.token_ids[starts[index] : end]
                    spans.append(DraftSpan(tokens, starts[index], _table(request), 0))
                    self._mark(request, starts[index], end)
                    starts[index] = end
                    left -= count
            if not spans:
                return
            inputs = span_inputs(spans, self.network.block_size)
            self.network.runner.launch(inputs, self._sampler.choices(()))

    def _num_cached(self, request: Request) -> int:
        """Leading tokens of the request, never the last, that lie in its blocks."""
        state = self._states.get(request.request_id)
        block_size = self.network.block_size
        known = 0
        if state is not None:
            known = state.num_known + _num_alike(state.drafts, request.token_ids[state.num_known :])
            if state.block_ids is request.block_ids:
                return min(known, request.num_tokens - 1)
        count = 0
        digests = _digests(request)
        for index, block in enumerate(_table(request)):
            held = self._holds[block]
            if index < len(digests) and held == digests[index]:
                count += block_size
            elif known > count and held == (request.request_id, index):
                count = min(known, count + block_size)
            else:
                break
            if count % block_size:
                break
        return min(count, request.num_tokens - 1)

    def _mark(self, request: Request, start: int, end: int) -> None:
        """Records the content of blocks once tokens `start` to `end` are written."""
        block_size, digests, table = self.network.block_size, _digests(request), _table(request)
        last = min(-(-end // block_size), len(table))
        # A block that the last step filled had no digest then; behind a prefix, the one before it.
        for index in range(max(start // block_size - 2, 0), last):
            full = (index + 1) * block_size <= end and index < len(digests)
            block = table[index]
            self._holds[block] = digests[index] if full else (request.request_id, index)


# Tokens that a request may be behind in the step that yields its first draft.
MOST_WITH_LOGITS = 15


def _table(request: Request) -> list[int]:
    """The blocks of the draft's cache that hold a request's tokens."""
    return draft_table(request.block_ids, request.prefix)


def _digests(request: Request) -> list[bytes]:
    """Digests of the target's blocks with these numbers; equal ones have equal tokens here too.

    A block behind a partial one fills later in the target's cache than in the draft's.
    """
    digests = request.block_digests
    return digests if request.prefix.partial is None else digests[1:]


def _end(verified: Verified) -> int:
    """The position behind a request's drafts."""
    return verified.request.num_tokens + len(verified.drafts)


def _num_alike(left: Sequence[int], right: Sequence[int]) -> int:
    """Leading entries that agree."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))


def make(config: SpeculativeConfig) -> DraftModelProposer:
    """The proposer of a config."""
    if config.draft is None:
        raise ValueError("draft_model needs the draft's network")
    return DraftModelProposer(config.draft)
