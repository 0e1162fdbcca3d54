"""Which requests of an engine failed: each ends alone, and where that is not known it is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from predict.engine.beams import Candidates
from predict.engine.drafts import FAILED
from predict.engine.failures import RequestError, apart, explained
from predict.engine.request_state import Request, RequestStatus
from predict.engine.scheduled import ScheduledBatch, ScheduledSpan
from predict.engine.scheduler import Scheduler
from predict.errors import EngineError
from predict.text.guides import contradiction

T = TypeVar("T")


class Failing(Protocol):
    """The engine, as far as blame needs it."""

    def fail(self, request: Request, message: str) -> None:
        """Ends a request as "error"."""

    def probe(self) -> None:
        """Runs a step of one token without any request; raises where that fails."""


class Blame:
    """Ends requests that fail, and raises EngineError where the fault is no request's.

    A request with logits that no token can be drawn from ends as "error", alone. So does one that
    makes a step fail, in any stage: where the request is not known at once, the requests of the
    step run apart, after the running steps. When a step of one token without any request fails
    too, or blocks are lost, the device or the state is broken.
    """

    def __init__(self, scheduler: Scheduler, engine: Failing):
        """engine: as a weak reference, since it ends with its last user and not in a cycle."""
        self._scheduler, self._engine = scheduler, engine
        self._failed: list[Request] = []  # since the last step

    def ended(self, finished: list[Request]) -> list[Request]:
        """The requests that ended since the last step: `finished`, and those that failed."""
        if not self._failed:
            return finished
        failed, self._failed = self._failed, []
        return list(dict.fromkeys([*failed, *finished]))

    def forget(self, request_id: int) -> None:
        """Leaves an aborted request out, after a step that raised."""
        if self._failed:
            self._failed = [each for each in self._failed if each.request_id != request_id]

    def end(self, request: Request, error: BaseException) -> None:
        """Ends a request that failed. Raises EngineError where the scheduler's state is broken."""
        self._engine.fail(request, explained(request, error))
        self._failed.append(request.owner)
        try:
            self._scheduler.check()
        except RuntimeError as broken:
            raise EngineError(
                f"the engine cannot go on: its blocks are in disorder ({broken}) after "
                f"{explained(request, error)}"
            ) from error

    def probe(self, request: Request, error: Exception) -> None:
        """Raises EngineError where a step without any request fails too. Nothing else may run."""
        try:
            self._engine.probe()
        except Exception as broken:
            raise EngineError(
                f"the engine cannot go on: {explained(request, error)}; and so does a step of one "
                "token without any request"
            ) from broken

    def retried(self, call: Callable[[], T]) -> T:
        """The result of call(), called again after each request that fails in it has ended."""
        while True:
            try:
                return call()
            except RequestError as failure:
                self.end(failure.request, failure)

    def find(
        self, spans: Sequence[ScheduledSpan], run: Callable[[Sequence[ScheduledSpan]], None]
    ) -> None:
        """Runs the spans in parts such that all but those of failing requests run; ends those."""
        failures: list[tuple[Request, Exception]] = []

        def failed(span: ScheduledSpan, error: Exception) -> None:
            self.probe(span.request, error)
            failures.append((span.request, error))

        alive = [span for span in spans if span.request.status is not RequestStatus.FINISHED]
        if alive:
            apart(alive, run, failed)
        for request, error in failures:
            self.end(request, error)

    def end_undrawn(
        self, batch: ScheduledBatch, sampled: Sequence[int | Sequence[int] | Candidates]
    ) -> None:
        """Ends requests for which no token could be drawn."""
        spans = (span for span in batch.spans if span.samples)
        for span, entry in zip(spans, sampled, strict=True):
            if isinstance(entry, int):
                fails = entry < 0
            elif isinstance(entry, Candidates):
                fails = not entry.token_ids
            else:
                fails = FAILED in entry
            if fails and span.request.owner.status is not RequestStatus.FINISHED:
                owner = span.request.owner
                self._engine.fail(owner, _no_token_message(owner))
                self._failed.append(owner)


def _no_token_message(request: Request) -> str:
    """Why no token could be drawn for a request."""
    name = f"request {request.request_id}"
    if request.guide is None:
        return (
            f"{name} has no finite largest logit to draw from; the weights or the dtype do not "
            "suit the model"
        )
    if request.guide.error is not None:
        return f"{name} failed in stage guide: {request.guide.error}"
    params = request.sampling_params
    kind = "" if params.guide is None else params.guide.kind
    return f"{name} failed in stage guide: {contradiction(kind, params.bans)}"
