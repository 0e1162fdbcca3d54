"""Drafts of a smaller model with the same vocabulary.

Its cache lies in blocks of the same numbers as the target's: what a request's block table says of
one cache holds for the other, so requests come, grow, are preempted and end without a word to the
draft model, and a prompt whose blocks were found in the prefix cache is often there for both.
Behind the target's blocks the draft's cache has one more for each request of a batch, for drafts
that run past the blocks that the request owns.

Each draft is drawn as the target will draw its token: with the request's parameters and the random
number of that place in the output. Verification keeps what the target draws and so does not depend
on drafts; but two models that agree on a distribution then agree on the token too, greedy or not.

On a GPU nobody waits for the drafts: they are placeholders for what the device will know, and
`observe` says what they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from predict.engine.batch import span_inputs
from predict.engine.sampler import Row, Sampler
from predict.request import Request
from predict.speculative import FAILED, DraftNetwork, SpeculativeConfig


class UnadjustedSampler(Sampler):
    """Leaves logits as they are.

    For devices, where penalties read tokens that only the target's steps write.
    """

    def adjustments(self, rows: Sequence[Row]) -> None:
        """See Sampler."""


class DraftSpan(NamedTuple):
    """See predict.engine.batch.Span."""

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    num_logits: int
    num_prompt_logits: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the span."""
        return len(self.token_ids)


@dataclass
class _State:
    """What the draft's cache has of a request: its first `num_known` tokens, then `drafts`."""

    block_ids: list[int]
    num_known: int
    num_written: int  # drafts of the last proposal, as far as the request's own blocks went
    drafts: list[int] = field(default_factory=list)  # those of them that were verified


class DraftModelProposer:
    """See Proposer. All requests advance together: a step of the draft model for each draft."""

    looks_up = False

    def __init__(self, network: DraftNetwork):
        self.network = network
        sampler = network.sampler
        if network.runner.num_ahead:
            sampler = UnadjustedSampler(sampler.backend, sampler.seed, sampler.eos_token_ids)
        self._sampler = sampler
        self._states: dict[int, _State] = {}
        # By block, what it holds: the digest of a full block's prefix, or (request, index).
        self._holds: list[bytes | tuple[int, int] | None] = [None] * network.num_blocks

    def propose(
        self, requests: Sequence[Request], limits: Sequence[int]
    ) -> Sequence[Sequence[int]]:
        """See Proposer."""
        starts = [self._num_cached(request) for request in requests]
        self._catch_up(requests, starts)
        tables = [
            [*request.block_ids, self.network.num_blocks + index]
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
            room = len(request.block_ids) * block_size
            num_written = max(min(len(own) - 1, room - request.num_tokens), 0)
            self._states[request.request_id] = _State(
                request.block_ids, min(request.num_tokens, room), num_written
            )
        return drafts

    def observe(self, request: Request, drafts: Sequence[int], chosen: Sequence[int]) -> None:
        """See Proposer."""
        state = self._states[request.request_id]
        state.drafts = list(drafts[: state.num_written])

    def forget(self, request_id: int) -> None:
        """See Proposer."""
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
        tokens = self.network.runner.launch(inputs, rows, self._sampler)
        return cast(list[int], tokens.take())  # a draft model has no beams

    def _catch_up(self, requests: Sequence[Request], starts: list[int]) -> None:
        """Runs what the draft has not seen, but for the last step's tokens; moves `starts`."""
        while True:
            left = self.network.token_budget
            spans: list[DraftSpan] = []
            for index, request in enumerate(requests):
                missing = request.num_tokens - 1 - starts[index]
                count = min(missing, left) if missing > MOST_WITH_LOGITS else 0
                if count > 0:
                    end = starts[index] + count
                    tokens = request.token_ids[starts[index] : end]
                    spans.append(DraftSpan(tokens, starts[index], request.block_ids, 0))
                    self._mark(request, starts[index], end)
                    starts[index] = end
                    left -= count
            if not spans:
                return
            inputs = span_inputs(spans, self.network.block_size)
            self.network.runner.launch(inputs, (), self._sampler)

    def _num_cached(self, request: Request) -> int:
        """Leading tokens of the request, never the last, that lie in its blocks."""
        state = self._states.get(request.request_id)
        block_size, block_ids = self.network.block_size, request.block_ids
        known = 0
        if state is not None:
            known = state.num_known + _num_alike(state.drafts, request.token_ids[state.num_known :])
            if state.block_ids is block_ids:
                return min(known, request.num_tokens - 1)
        count = 0
        digests = request.block_digests
        for index, block in enumerate(block_ids):
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
        """Notes whose tokens the blocks hold once those from `start` to `end` are written."""
        block_size, digests = self.network.block_size, request.block_digests
        # A block that the last step filled had no digest then.
        last = min(-(-end // block_size), len(request.block_ids))
        for index in range(max(start // block_size - 1, 0), last):
            full = (index + 1) * block_size <= end and index < len(digests)
            block = request.block_ids[index]
            self._holds[block] = digests[index] if full else (request.request_id, index)


# Tokens that a request may be behind in the step that yields its first draft.
MOST_WITH_LOGITS = 15


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
