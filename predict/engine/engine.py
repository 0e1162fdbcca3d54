"""The engine's loop: schedule, run, take tokens, write back; on a GPU one step ahead of them."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar, cast

from predict.engine.batch import adapted, placed, span_inputs
from predict.engine.beams import Candidates
from predict.engine.blame import Blame
from predict.engine.choices import Row
from predict.engine.draft_policy import DraftPolicy
from predict.engine.drafts import (
    FAILED,
    MAX_DRAFT_TOKENS,
    Drafts,
    ProposeBehind,
    Proposer,
    Verified,
    accepted_tokens,
    followable,
    forced_drafts,
)
from predict.engine.failures import apart, device_failure
from predict.engine.request_state import Request, RequestStatus, num_wanted
from predict.engine.sampler import Sampler
from predict.engine.scheduled import ScheduledBatch, ScheduledSpan
from predict.engine.scheduler import Scheduler
from predict.engine.step import (
    NO_TARGETS,
    KnownTokens,
    Logprobs,
    PromptTargets,
    Runner,
    StepTokens,
)
from predict.nn.inputs import Field, StepInputs, empty_example, fields_with
from predict.request import SamplingParams

T = TypeVar("T")
# Rows that take little longer on a CPU than one: up to there the weights' bytes decide, and beyond
# it the products, where a drafted row costs as much as the step that it saves its request.
FEW_ROWS = 16
PROBE_ID = -(2**62)  # of the request of `probe`; beams' ids are above


class StepPart(NamedTuple):
    """Spans that run together, and their tokens to wait for."""

    spans: Sequence[ScheduledSpan]
    tokens: StepTokens


class Step(NamedTuple):
    """A running step: its batch, and the parts that it was started in, most often one."""

    batch: ScheduledBatch
    parts: Sequence[StepPart]
    decides: bool  # see ScheduledBatch.decides: nothing runs ahead of it
    waited: bool  # for the previous step's tokens, though it could have run ahead
    # After `_run_apart`, per sampling span; FAILED where a span did not run.
    token_ids: Sequence[int | Candidates] | None = None


class Engine:
    """Runs requests to their end. The scheduler decides, the runner executes what the sampler asks.

    Where the runner allows it (`num_ahead`), the next step is scheduled and queued before the last
    one's tokens are known: they go from step to step on the device, and the host's work runs in
    the shadow of the device's. A request that turns out to have ended then has one row too many in
    the step behind, whose token is dropped. Drafts need known tokens: while they are likely to
    pay (see DraftPolicy), nothing runs ahead. Beams fork by the result of a step: nothing runs
    ahead of one that has beams. The step behind such a one is queued as soon as that one's tokens
    are written back, before they are handed on.

    With guides a step's network runs ahead, and its tokens are chosen once those before are written
    back. Where nothing runs ahead, what a guide forces is drafted: such drafts are always right.
    What fails ends alone, see Blame; EngineError ends all requests. Not thread-safe. A step that
    raises leaves the requests in the scheduler; abort them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Sampler,
        eos_token_ids: Collection[int],
        proposer: Proposer | None = None,
        policy: DraftPolicy | None = None,
        fields: Sequence[Field] = fields_with(),
    ):
        """proposer, policy: both, for speculation. fields: of the inputs that the network reads."""
        self.scheduler = scheduler
        self.runner = runner
        self.sampler = sampler
        self.eos_token_ids = frozenset(eos_token_ids)
        self.proposer = proposer
        self.policy = policy
        self.fields = fields
        self.stats = sampler.masks.stats = scheduler.stats
        self._steps: deque[Step] = deque()  # running, oldest first
        self._stuck: ScheduledBatch | None = None  # failed to launch; runs apart after `_steps`
        self.blame = Blame(scheduler, weakref.proxy(self))
        self._behind: Drafts = {}  # for requests whose last drafts the running step verifies
        self._forced: Drafts = {}  # drafts of the last step that guides force
        self._waits = False  # whether the next step waits for the running one's tokens
        self._last_end = 0.0  # of a step, perf_counter seconds
        self._num_recorded_then = 0  # at that end

    @property
    def num_recorded(self) -> int:
        """Graphs recorded so far by the runner and by the proposer's."""
        of_proposer = 0 if self.proposer is None else self.proposer.num_recorded
        return self.runner.num_recorded + of_proposer

    def add(self, request: Request) -> None:
        """Queues a request; raises ValueError when it can never run (see Scheduler.add)."""
        self.scheduler.add(request)

    def abort(self, request_id: int) -> Request | None:
        """Ends a request as "abort" and frees its blocks; None if it is unknown or ended."""
        self._forget(request_id)
        self.blame.forget(request_id)
        return self.scheduler.abort(request_id)

    def fail(self, request: Request, message: str) -> None:
        """Ends a request as "error"; one that has ended becomes one, unless it was aborted."""
        owner = request.owner
        self._forget(owner.request_id)
        if self.scheduler.abort(owner.request_id, "error") is None:
            if owner.finish_reason in ("abort", "error"):
                return
            owner.finish_reason = "error"
        owner.error = message

    def step(self) -> tuple[ScheduledBatch | None, list[Request]]:
        """Ends one step; its batch (None when nothing is left) and the requests that finished.

        Raises EngineError when nothing can run any more.
        """
        while len(self._steps) <= self.runner.num_ahead and self._launch():
            pass
        if not self._steps:
            return None, self.blame.ended([])
        step = self._steps[0]
        batch, token_ids = step.batch, step.token_ids
        if token_ids is None:
            try:
                token_ids = step.parts[0].tokens.take()
            except Exception as error:  # of the device, known when the host waits for it
                raise device_failure("while a step ran", error) from error
        self._steps.popleft()
        last_end, self._last_end = self._last_end, time.perf_counter()
        num_accepted = self.stats.num_accepted_draft_tokens
        sampled = self._verify(step, token_ids)
        self.blame.end_undrawn(batch, sampled)
        finished = self.scheduler.update(batch, sampled, self.eos_token_ids)
        for request in finished:
            self._forget(request.request_id)
        if self._steps:  # it may choose now that the tokens before it are written back
            try:
                for part in self._steps[0].parts:
                    part.tokens.choose()
            except Exception as error:
                raise device_failure("between two steps", error) from error
        if self.proposer is not None:
            num_accepted = self.stats.num_accepted_draft_tokens - num_accepted
            self._learn(step, num_accepted, self._last_end - last_end)
        if self.runner.num_ahead and not self._steps:
            self._launch()  # first, since the device is idle
        if self.proposer is not None:
            self.blame.retried(self.proposer.settle)
        for part in step.parts:
            self._record_logprobs(part.spans, part.tokens.logprobs())
        return batch, self.blame.ended(finished)

    def probe(self) -> None:
        """Runs one token without a request while no step runs, whose tokens it overwrites."""
        probe = Request(PROBE_ID, [0], SamplingParams(temperature=0.0))
        inputs, runner = empty_example(fields=self.fields), self.runner
        runner.launch(inputs, self.sampler.choices([Row(probe)])).take()

    def _learn(self, step: Step, num_accepted: int, seconds: float) -> None:
        """Reports a step's time and accepted drafts to the policy; looks up new drafts."""
        assert self.proposer is not None
        assert self.policy is not None
        batch = step.batch
        num_recorded = self.num_recorded
        recorded = num_recorded > self._num_recorded_then
        self._num_recorded_then = num_recorded
        plain = batch.num_tokens == sum(span.num_logits for span in batch.spans)
        timed = seconds if plain and step.token_ids is None and not recorded else None
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
        for request, guess in self._proposals(wanting, [self.policy.max_length] * len(wanting)):
            self.policy.guessed(request, guess)

    def _proposals(
        self, requests: Sequence[Request], limits: Sequence[int]
    ) -> list[tuple[Request, Sequence[int]]]:
        """The proposals by request; requests for which the proposer fails end."""
        proposer = self.proposer
        assert proposer is not None
        found: list[tuple[Request, Sequence[int]]] = []

        def propose(wanted: Sequence[tuple[Request, int]]) -> None:
            requests, limits = zip(*wanted, strict=True)
            for request, drafts in zip(requests, proposer.propose(requests, limits), strict=True):
                allowed = drafts if request.guide is None else request.guide.valid(drafts)
                found.append((request, allowed))

        def failed(wanted: tuple[Request, int], error: Exception) -> None:
            if not proposer.looks_up:  # a draft model proposes while no step runs
                self.blame.probe(wanted[0], error)
            self.blame.end(wanted[0], error)

        apart(list(zip(requests, limits, strict=True)), propose, failed)
        return found

    def _record_logprobs(self, spans: Sequence[ScheduledSpan], logprobs: Logprobs) -> None:
        row = prompt_row = 0
        for span in spans:
            request, record = span.request, span.request.logprobs
            if record is not None:
                try:
                    if logprobs.tokens is not None:
                        known = request.num_prompt_tokens + len(record.tokens)
                        new = request.token_ids[known : request.num_known_tokens]
                        record.add(logprobs.tokens, row, new)
                    if span.num_prompt_logits and logprobs.prompt is not None:
                        targets = span.prompt_targets
                        record.add_prompt(logprobs.prompt, prompt_row, span.start + 1, targets)
                except Exception as error:
                    self.blame.end(request, error)
            row += span.num_logits
            prompt_row += span.num_prompt_logits

    def _launch(self) -> bool:
        """Queues one more step; False when there is none to queue now."""
        if self._steps and self._steps[-1].decides:
            self._waits = True
            return False
        if self._stuck is not None:
            if self._steps:
                return False
            stuck, self._stuck = self._stuck, None
            self._steps.append(self._run_apart(stuck))
            return True
        drafts: Drafts = {}
        limits: Mapping[Request, int] = {}
        if self.proposer is not None and self.policy is not None:
            limits = self.policy.limits(self.scheduler.decoding, on_way=bool(self._steps))
            if limits and self._steps:
                self._waits = True
                return False
            drafts = self._propose(limits)
            self._behind = {}
        self._forced = self._forced_drafts(drafts, limits)
        if self._forced:
            drafts = {**drafts, **self._forced}
        while (batch := self.blame.retried(partial(self.scheduler.schedule, drafts))) is None:
            if self._steps or not self.scheduler.wait():
                return False
        if batch.block_copies:
            self.runner.copy_blocks(batch.block_copies)
        try:
            part = self._run(batch.spans)
        except Exception:  # which request failed is found when nothing else runs
            self._stuck = batch
            return self._launch()
        decides = batch.decides
        if self.runner.num_ahead and not decides:
            self.scheduler.advance(batch)
        self._steps.append(Step(batch, (part,), decides, self._waits))
        self._waits = False
        if drafts and self.proposer is not None and self.proposer.propose_behind is not None:
            self._behind = self._propose_behind(batch, self.proposer.propose_behind)
        return True

    def inputs(self, spans: Sequence[ScheduledSpan]) -> StepInputs:
        """The network's inputs of a step of these spans."""
        config = self.scheduler.config
        inputs = span_inputs(spans, config.block_size)
        if config.placing is not None:
            inputs = placed(inputs, spans, config.placing)
        if config.adapters is not None:
            inputs = adapted(inputs, spans, config.adapters)
        return inputs

    def _run(self, spans: Sequence[ScheduledSpan]) -> StepPart:
        """Launches some of a step's spans."""
        inputs = self.inputs(spans)
        rows = [
            Row(span.request, span.draft_token_ids[:index])
            for span in spans
            for index in range(span.num_logits)
        ]
        targets = [token for span in spans for token in span.prompt_targets]
        prompt = NO_TARGETS
        if targets:
            num_top = num_wanted([span.request for span in spans], of_prompts=True)
            prompt = PromptTargets(targets, num_top or 0)
        return StepPart(spans, self.runner.launch(inputs, self.sampler.choices(rows, prompt)))

    def _run_apart(self, batch: ScheduledBatch) -> Step:
        """Runs a failed step again without drafts, split into parts so that failing requests end.

        Nothing else may run. A part may write the same cache slots again.
        """
        batch = self.scheduler.undrafted(batch)
        parts: list[StepPart] = []
        found: dict[Request, int | Candidates] = {}

        def run(spans: Sequence[ScheduledSpan]) -> None:
            part = self._run(spans)
            tokens = part.tokens.take()
            sampling = [span.request for span in spans if span.samples]
            found.update(zip(sampling, tokens, strict=True))
            parts.append(StepPart(spans, KnownTokens(tokens, part.tokens.logprobs().copied())))

        self.blame.find(batch.spans, run)
        token_ids = [found.get(span.request, FAILED) for span in batch.spans if span.samples]
        return Step(batch, parts, True, self._waits, token_ids)

    def _propose_behind(self, batch: ScheduledBatch, propose: ProposeBehind) -> Drafts:
        """Drafts for the step after `batch`, which was just queued and has drafts."""
        assert self.policy is not None
        limits = self.policy.limits(self.scheduler.decoding, on_way=True)
        verified, lengths = followable(batch.spans, limits)
        found: Drafts = {}
        if not verified:
            return found

        def follow(wanted: Sequence[tuple[Verified, int]]) -> None:
            verified, lengths = zip(*wanted, strict=True)
            found.update(propose(verified, lengths))

        apart(
            list(zip(verified, lengths, strict=True)),
            follow,
            lambda wanted, error: self.blame.end(wanted[0].request, error),
        )
        return found

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
        if self.runner.num_ahead:  # a draft model's tokens stay on the device
            limits = {r: limit for r, limit in limits.items() if r.guide is None}
        if not limits:
            return {}
        proposals = self._proposals(list(limits), list(limits.values()))
        return {request.request_id: each for request, each in proposals}

    def _forced_drafts(self, proposed: Drafts, limits: Mapping[Request, int]) -> Drafts:
        """Tokens that guides force in the next step, for requests without proposed drafts.

        Where steps run ahead, only for requests that may have drafts, since no step runs ahead
        then. Else as many as keep the step within FEW_ROWS.
        """
        if self.runner.num_ahead:
            return forced_drafts(proposed, limits, sum(limits.values()))
        decoding = self.scheduler.decoding
        num_spare = FEW_ROWS - len(decoding) - sum(map(len, proposed.values()))
        return forced_drafts(proposed, dict.fromkeys(decoding, MAX_DRAFT_TOKENS), num_spare)

    def _verify(
        self, step: Step, token_ids: Sequence[int | Candidates]
    ) -> list[int | Sequence[int] | Candidates]:
        """Per sampling span its token, or with drafts the accepted tokens."""
        if self.proposer is None and not any(span.draft_token_ids for span in step.batch.spans):
            return list(token_ids)
        sampled: list[int | Sequence[int] | Candidates] = []
        start = 0
        for span in step.batch.spans:
            if not span.samples:
                continue
            chosen = token_ids[start : start + span.num_logits]
            start += span.num_logits
            if not span.draft_token_ids:
                sampled.append(chosen[0])
            elif span.request.status is RequestStatus.FINISHED:
                sampled.append(())  # aborted while the step ran
            else:
                # A request with drafts has no beams, and a step with drafts one part.
                tokens, drawn = step.parts[0].tokens, cast(Sequence[int], chosen)
                try:
                    sampled.append(self._accepted(span, tokens, drawn))
                except Exception as error:
                    self.blame.end(span.request, error)
                    sampled.append(())
        return sampled

    def _accepted(
        self, span: ScheduledSpan, tokens: StepTokens, chosen: Sequence[int]
    ) -> Sequence[int]:
        """The accepted drafts of a span, and one more token."""
        request, drafts = span.request, span.draft_token_ids
        if request.request_id in self._forced:
            accepted = accepted_tokens(drafts, chosen)
            self.stats.num_forced_tokens += len(accepted) - 1
            return accepted
        assert self.proposer is not None
        assert self.policy is not None
        if not self.proposer.looks_up:
            known = tokens.known(drafts)
            drafts = known[: known.index(FAILED)] if FAILED in known else known
        accepted = accepted_tokens(drafts, chosen)
        self.proposer.observe(request, drafts, chosen)
        self.policy.record(request, len(drafts), len(accepted) - 1)
        self.stats.num_draft_spans += 1
        self.stats.num_draft_tokens += len(drafts)
        self.stats.num_accepted_draft_tokens += len(accepted) - 1
        return accepted

    def _forget(self, request_id: int) -> None:
        self._behind.pop(request_id, None)
        self.sampler.forget(request_id)
        if self.proposer is not None and self.policy is not None:
            self.proposer.forget(request_id)
            self.policy.forget(request_id)
