"""The engine's loop: schedule, run, take tokens, write back; on a GPU one step ahead of them."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from predict.engine.batch import adapted, placed, span_inputs, stated
from predict.engine.beams import Candidates
from predict.engine.blame import Blame
from predict.engine.choices import Row
from predict.engine.draft_policy import DraftPolicy
from predict.engine.drafts import FAILED, Proposer
from predict.engine.failures import device_failure
from predict.engine.pictures import Eyes
from predict.engine.request_state import Request, num_wanted
from predict.engine.sampler import Sampler
from predict.engine.scheduled import ScheduledBatch, ScheduledSpan
from predict.engine.scheduler import Scheduler
from predict.engine.speculation import Speculation
from predict.engine.step import (
    NO_TARGETS,
    KnownTokens,
    Logprobs,
    PromptTargets,
    Runner,
    StepTokens,
)
from predict.nn.decoder import FINAL
from predict.nn.inputs import Field, StepInputs, empty_example, fields_with
from predict.request import SamplingParams

T = TypeVar("T")
PROBE_ID = -(2**62)  # of the request of `probe`; beams' ids are above


class StepPart(NamedTuple):
    """Spans that run together, and their tokens to wait for.

    riding: spans of texts behind those, whose hidden states are wanted, and no tokens.
    """

    spans: Sequence[ScheduledSpan]
    tokens: StepTokens
    riding: Sequence[ScheduledSpan] = ()


class Riders(Protocol):
    """Texts that run in the steps of answers; see predict.engine.embedding."""

    def make_way(self) -> None:
        """Gives back blocks that answers may need. Called ahead of each step's schedule."""

    def board(self, batch: ScheduledBatch) -> Sequence[ScheduledSpan]:
        """Spans to run in a batch's step. They go on by `arrive` or `stay`."""

    def stay(self, spans: Sequence[ScheduledSpan]) -> None:
        """Takes spans back: their step failed to launch."""

    def arrive(self, part: StepPart) -> None:
        """Takes the hidden states of the spans of a step that has ended."""


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

    `riders` fill the room that a step's requests leave; nothing runs ahead of such a step.
    """

    riders: Riders | None = None

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Sampler,
        eos_token_ids: Collection[int],
        proposer: Proposer | None = None,
        policy: DraftPolicy | None = None,
        fields: Sequence[Field] = fields_with(),
        eyes: Eyes | None = None,
    ):
        """proposer, policy: both, for speculation. fields: of the inputs that the network reads."""
        self.eyes = eyes
        self.scheduler = scheduler
        self.runner = runner
        self.sampler = sampler
        self.eos_token_ids = frozenset(eos_token_ids)
        self.fields = fields
        self.stats = sampler.masks.stats = scheduler.stats
        self._steps: deque[Step] = deque()  # running, oldest first
        self._stuck: ScheduledBatch | None = None  # failed to launch; runs apart after `_steps`
        self.blame = Blame(scheduler, weakref.proxy(self))
        runs_ahead = runner.num_ahead > 0
        self.speculation = Speculation(scheduler, self.blame, runs_ahead, proposer, policy)
        self._waits = False  # whether the next step waits for the running one's tokens
        self._last_end = 0.0  # of a step, perf_counter seconds

    @property
    def num_recorded(self) -> int:
        """Graphs recorded so far by the runner and by the proposer's."""
        return self.runner.num_recorded + self.speculation.num_recorded

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
        for part in step.parts:
            if part.riding and self.riders:
                self.riders.arrive(part)  # ahead of what may be launched over its hidden states
        self._steps.popleft()
        last_end, self._last_end = self._last_end, time.perf_counter()
        tokens = step.parts[0].tokens if step.parts else None  # all of its requests failed
        sampled = self.speculation.accepted(batch, tokens, token_ids)
        self.blame.end_undrawn(batch, sampled)
        finished = self.scheduler.update(batch, sampled, self.eos_token_ids)
        for part in step.parts:
            self.speculation.follow(part.spans, part.tokens)
        for request in finished:
            self._forget(request.request_id)
        if self._steps:  # it may choose now that the tokens before it are written back
            try:
                for part in self._steps[0].parts:
                    part.tokens.choose()
            except Exception as error:
                raise device_failure("between two steps", error) from error
        alone = step.token_ids is None and not any(part.riding for part in step.parts)
        seconds = self._last_end - last_end if alone else None
        self.speculation.stepped(batch, step.decides, step.waited, seconds, self.num_recorded)
        if self.runner.num_ahead and not self._steps:
            self._launch()  # first, since the device is idle
        self.speculation.settle()
        for part in step.parts:
            self._record_logprobs(part.spans, part.tokens.logprobs())
        return batch, self.blame.ended(finished)

    def probe(self) -> None:
        """Runs one token without a request while no step runs, whose tokens it overwrites."""
        probe = Request(PROBE_ID, [0], SamplingParams(temperature=0.0))
        inputs, runner = empty_example(fields=self.fields), self.runner
        runner.launch(inputs, self.sampler.choices([Row(probe)])).take()

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
        # States of a step are read before the next one overwrites them.
        if self._steps and (self._steps[-1].decides or self.speculation.taps):
            self._waits = True
            return False
        if self._stuck is not None:
            if self._steps:
                return False
            stuck, self._stuck = self._stuck, None
            self._steps.append(self._run_apart(stuck))
            return True
        limits = self.speculation.limits(on_way=bool(self._steps))
        if limits and self._steps:
            self._waits = True
            return False
        if self.riders:
            self.riders.make_way()
        drafts = self.speculation.propose(limits)
        if self.eyes is not None:
            self.eyes.look(bool(self.scheduler.decoding))
        while (batch := self.blame.retried(partial(self.scheduler.schedule, drafts))) is None:
            if self.eyes is not None and not self._steps and self.eyes.finish():
                continue
            if self._steps or not self.scheduler.wait():
                return False
        if batch.block_copies:
            self.runner.copy_blocks(batch.block_copies)
        riding = self.riders.board(batch) if self.riders else ()
        try:
            part = self._run(batch.spans, riding)
        except Exception:  # which request failed is found when nothing else runs
            if self.riders:
                self.riders.stay(riding)
            self._stuck = batch
            return self._launch()
        decides = batch.decides or bool(riding)
        if self.runner.num_ahead and not decides:
            self.scheduler.advance(batch)
        self._steps.append(Step(batch, (part,), decides, self._waits))
        self._waits = False
        self.speculation.launched(batch, drafts)
        return True

    def inputs(self, spans: Sequence[ScheduledSpan]) -> StepInputs:
        """The network's inputs of a step of these spans."""
        config = self.scheduler.config
        inputs = span_inputs(spans, config.block_size)
        if config.placing is not None:
            inputs = placed(inputs, spans, config.placing)
        if config.adapters is not None:
            inputs = adapted(inputs, spans, config.adapters)
        if self.eyes is not None:
            inputs = self.eyes.seen(inputs, spans)
        return stated(inputs, spans) if config.num_state_slots else inputs

    def _run(
        self, spans: Sequence[ScheduledSpan], riding: Sequence[ScheduledSpan] = ()
    ) -> StepPart:
        """Launches some of a step's spans."""
        inputs = self.inputs([*spans, *riding])
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
        choices = self.sampler.choices(rows, prompt)
        if taps := dict.fromkeys([*self.speculation.taps, *((FINAL,) if riding else ())]):
            choices = choices._replace(taps=tuple(taps))
        return StepPart(spans, self.runner.launch(inputs, choices), riding)

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
            known = KnownTokens(tokens, part.tokens.logprobs().copied())
            # Parts of one shape may be replays of one graph, whose states the next one overwrites.
            # Those that lie on ranks are taken back here by the next part's launch.
            known.hidden = hidden = part.tokens.hidden
            if all(states is not None for states in hidden.values()):
                known.hidden = {tap: states.clone() for tap, states in hidden.items()}
            parts.append(StepPart(spans, known))

        self.blame.find(batch.spans, run)
        token_ids = [found.get(span.request, FAILED) for span in batch.spans if span.samples]
        return Step(batch, parts, True, self._waits, token_ids)

    def _forget(self, request_id: int) -> None:
        self.sampler.forget(request_id)
        self.speculation.forget(request_id)
