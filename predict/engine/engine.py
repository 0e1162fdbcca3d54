"""The engine's loop: schedule, run, take tokens, write back; on a GPU one step ahead of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from predict.engine.batch import build_inputs
from predict.engine.beams import Candidates
from predict.engine.logprobs import num_wanted
from predict.engine.runner import NO_TARGETS, Logprobs, PromptTargets, Runner, Tokens
from predict.engine.sampler import Row, Sampler
from predict.engine.scheduler import ScheduledBatch, Scheduler
from predict.request import Request, RequestStatus
from predict.speculative import (
    FAILED,
    Drafts,
    ProposeBehind,
    Proposer,
    Verified,
    accepted_tokens,
)
from predict.speculative.policy import DraftPolicy

NO_LOGITS = (
    "request {} has no finite largest logit to draw from; the weights or the dtype do not suit the "
    "model"
)


class Step(NamedTuple):
    """A step that runs: its batch, the rows that get a token, and the tokens to wait for."""

    batch: ScheduledBatch
    rows: list[Row]
    tokens: Tokens
    decides: bool  # see ScheduledBatch.decides: nothing runs ahead of it
    waited: bool  # for the tokens before it, which it could have run ahead of


@dataclass
class DraftStats:
    """Counts of speculation, over spans that had drafts."""

    num_spans: int = 0
    num_drafts: int = 0
    num_accepted: int = 0


class Engine:
    """Runs requests to their end. The scheduler decides, the runner executes, the sampler chooses.

    Where the runner allows it (`num_ahead`), the next step is scheduled and queued before the last
    one's tokens are known: they go from step to step on the device, and the host's work runs in
    the shadow of the device's. A request that turns out to have ended then has one row too many in
    the step behind, whose token is dropped. Drafts need known tokens: while they are likely to
    pay (see DraftPolicy), nothing runs ahead. Beams fork by the result of a step: nothing runs
    ahead of one that has beams. The step behind such a one is queued as soon as that one's tokens
    are written back, before they are handed on.

    A request whose logits nothing can be drawn from ends as "error", alone. Not thread-safe. A
    failing step leaves the requests in the scheduler; abort them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Sampler,
        eos_token_ids: Collection[int],
        proposer: Proposer | None = None,
        policy: DraftPolicy | None = None,
    ):
        """proposer, policy: both, for speculation."""
        self.scheduler = scheduler
        self.runner = runner
        self.sampler = sampler
        self.eos_token_ids = frozenset(eos_token_ids)
        self.proposer = proposer
        self.policy = policy
        self.draft_stats = DraftStats()
        self._steps: deque[Step] = deque()  # running, oldest first
        self._behind: Drafts = {}  # of requests whose last drafts a step that runs verifies
        self._waits = False  # the next step, for tokens of those that run
        self._last_end = 0.0  # of a step, perf_counter seconds
        self._num_recorded_then = 0  # at that end

    @property
    def num_recorded(self) -> int:
        """Graphs so far, of the proposer's model too (see Runner)."""
        of_proposer = 0 if self.proposer is None else self.proposer.num_recorded
        return self.runner.num_recorded + of_proposer

    def add(self, request: Request) -> None:
        """Queues a request; raises ValueError when it can never run (see Scheduler.add)."""
        self.scheduler.add(request)

    def abort(self, request_id: int) -> Request | None:
        """Ends a request as "abort" and frees its blocks; None if it is unknown or ended."""
        self._forget(request_id)
        return self.scheduler.abort(request_id)

    def step(self) -> tuple[ScheduledBatch | None, list[Request]]:
        """Ends one step; its batch (None when nothing is left) and who finished in it."""
        while len(self._steps) <= self.runner.num_ahead and self._launch():
            pass
        if not self._steps:
            return None, []
        step = self._steps.popleft()
        batch, tokens = step.batch, step.tokens
        token_ids = tokens.take()
        last_end, self._last_end = self._last_end, time.perf_counter()
        num_accepted = self.draft_stats.num_accepted
        sampled = self._verify(batch, tokens, token_ids)
        failed = self._abort_failed(batch, sampled)
        num_known = [span.request.num_known_tokens for span in batch.spans]
        finished = failed + self.scheduler.update(batch, sampled, self.eos_token_ids)
        for request in finished:
            self._forget(request.request_id)
        if self.proposer is not None:
            num_accepted = self.draft_stats.num_accepted - num_accepted
            self._learn(step, num_accepted, self._last_end - last_end)
        if self.runner.num_ahead and not self._steps:
            self._launch()  # first, as the device has nothing to do
        if self.proposer is not None:
            self.proposer.settle()
        self._record_logprobs(batch, num_known, tokens.logprobs())
        return batch, finished

    def _learn(self, step: Step, num_accepted: int, seconds: float) -> None:
        """Tells the policy what a step took and its drafts brought; looks for the next ones."""
        assert self.proposer is not None
        assert self.policy is not None
        batch = step.batch
        num_recorded = self.num_recorded
        recorded = num_recorded > self._num_recorded_then
        self._num_recorded_then = num_recorded
        timed = seconds if batch.num_tokens == len(step.rows) and not recorded else None
        lengths: list[int] = []
        if step.decides:
            lengths = [len(span.draft_token_ids) for span in batch.spans if span.draft_token_ids]
        self.policy.stepped(batch.num_samples, lengths, num_accepted, step.waited, timed)
        if not self.proposer.looks_up:
            return
        wanting = [
            span.request
            for span in batch.spans
            if span.request.status is RequestStatus.RUNNING and self.policy.follow(span.request)
        ]
        if not wanting:
            return
        guesses = self.proposer.propose(wanting, [self.policy.max_length] * len(wanting))
        for request, guess in zip(wanting, guesses, strict=True):
            self.policy.guessed(request, guess)

    def _abort_failed(
        self, batch: ScheduledBatch, sampled: Sequence[int | Sequence[int] | Candidates]
    ) -> list[Request]:
        """Ends requests that nothing could be drawn for; returns them."""
        failed: list[Request] = []
        spans = (span for span in batch.spans if span.samples)
        for span, entry in zip(spans, sampled, strict=True):
            if isinstance(entry, int):
                fails = entry < 0
            elif isinstance(entry, Candidates):
                fails = not entry.token_ids
            else:
                fails = FAILED in entry
            if fails and self.scheduler.abort(span.request.owner.request_id, "error"):
                owner = span.request.owner
                owner.error = NO_LOGITS.format(owner.request_id)
                failed.append(owner)
        return failed

    def _record_logprobs(
        self, batch: ScheduledBatch, num_known: Sequence[int], logprobs: Logprobs
    ) -> None:
        """num_known: tokens of each span's request before the step."""
        row = prompt_row = 0
        for span, before in zip(batch.spans, num_known, strict=True):
            request, record = span.request, span.request.logprobs
            if record is not None and logprobs.tokens is not None:
                new = request.token_ids[before : request.num_known_tokens]
                record.add(logprobs.tokens, row, new)
            if record is not None and span.num_prompt_logits and logprobs.prompt is not None:
                targets = span.prompt_targets
                record.add_prompt(logprobs.prompt, prompt_row, span.start + 1, targets)
            row += span.num_logits
            prompt_row += span.num_prompt_logits

    def _launch(self) -> bool:
        """Queues one more step; False when there is none to run now."""
        if self._steps and self._steps[-1].decides:
            self._waits = True
            return False
        drafts: Drafts = {}
        if self.proposer is not None and self.policy is not None:
            limits = self.policy.limits(self.scheduler.decoding, on_way=bool(self._steps))
            if limits and self._steps:
                self._waits = True
                return False
            drafts = self._propose(limits)
            self._behind = {}
        batch = self.scheduler.schedule(drafts)
        if batch is None:
            return False
        inputs = build_inputs(batch, self.scheduler.config.block_size)
        rows = [
            Row(span.request, span.draft_token_ids[:index])
            for span in batch.spans
            for index in range(span.num_logits)
        ]
        if batch.block_copies:
            self.runner.copy_blocks(batch.block_copies)
        targets = [token for span in batch.spans for token in span.prompt_targets]
        prompt = NO_TARGETS
        if targets:
            num_top = num_wanted([span.request for span in batch.spans], of_prompts=True)
            prompt = PromptTargets(targets, num_top or 0)
        tokens = self.runner.launch(inputs, rows, self.sampler, prompt)
        decides = batch.decides
        if self.runner.num_ahead and not decides:
            self.scheduler.advance(batch)
        self._steps.append(Step(batch, rows, tokens, decides, self._waits))
        self._waits = False
        if drafts and self.proposer is not None and self.proposer.propose_behind is not None:
            self._behind = self._propose_behind(batch, self.proposer.propose_behind)
        return True

    def _propose_behind(self, batch: ScheduledBatch, propose: ProposeBehind) -> Drafts:
        """Drafts for the step after a batch that was just queued and has some."""
        assert self.policy is not None
        limits = self.policy.limits(self.scheduler.decoding, on_way=True)
        verified: list[Verified] = []
        lengths: list[int] = []
        row = 0
        for span in batch.spans:
            request, drafts = span.request, span.draft_token_ids
            # As for other drafts, if those of the batch are all right.
            room = request.max_num_tokens - request.num_tokens - len(drafts) - 2
            length = min(limits.get(request, 0), room)
            if drafts and length > 0:
                verified.append(Verified(request, row, drafts))
                lengths.append(length)
            row += span.num_logits
        return propose(verified, lengths) if verified else {}

    def _propose(self, limits: Mapping[Request, int]) -> Drafts:
        """Drafts by request id, at most as many as the limits."""
        assert self.proposer is not None
        assert self.policy is not None
        if not limits:
            return {}
        if self.proposer.looks_up:
            return {r.request_id: self.policy.guess(r, limit) for r, limit in limits.items()}
        behind = {
            request.request_id: self._behind[request.request_id][:limit]
            for request, limit in limits.items()
            if request.request_id in self._behind
        }
        if behind:
            return behind
        proposals = self.proposer.propose(list(limits), list(limits.values()))
        return {r.request_id: each for r, each in zip(limits, proposals, strict=True)}

    def _verify(
        self, batch: ScheduledBatch, tokens: Tokens, token_ids: Sequence[int | Candidates]
    ) -> list[int | Sequence[int] | Candidates]:
        """Per sampling span its token, or with drafts those that stand."""
        if self.proposer is None:
            return list(token_ids)
        sampled: list[int | Sequence[int] | Candidates] = []
        start = 0
        for span in batch.spans:
            if not span.samples:
                continue
            chosen = token_ids[start : start + span.num_logits]
            start += span.num_logits
            if not span.draft_token_ids:
                sampled.append(chosen[0])
            elif span.request.status is RequestStatus.FINISHED:
                sampled.append(())  # aborted while the step ran
            else:
                drafts = span.draft_token_ids
                if not self.proposer.looks_up:
                    drafts = tokens.known(drafts)
                    if FAILED in drafts:
                        del drafts[drafts.index(FAILED) :]
                # A request with drafts has no beams.
                sampled.append(self._accept(span.request, drafts, cast(Sequence[int], chosen)))
        return sampled

    def _accept(
        self, request: Request, drafts: Sequence[int], chosen: Sequence[int]
    ) -> Sequence[int]:
        assert self.proposer is not None
        assert self.policy is not None
        accepted = accepted_tokens(drafts, chosen)
        self.proposer.observe(request, drafts, chosen)
        self.policy.record(request, len(drafts), len(accepted) - 1)
        self.draft_stats.num_spans += 1
        self.draft_stats.num_drafts += len(drafts)
        self.draft_stats.num_accepted += len(accepted) - 1
        return accepted

    def _forget(self, request_id: int) -> None:
        self._behind.pop(request_id, None)
        self.sampler.forget(request_id)
        if self.proposer is not None and self.policy is not None:
            self.proposer.forget(request_id)
            self.policy.forget(request_id)
