"""The engine's loop: schedule, run, take tokens, write back; on a GPU one step ahead of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from predict.engine.batch import build_inputs
from predict.engine.runner import Runner, Tokens
from predict.engine.sampler import Sampler
from predict.engine.scheduler import ScheduledBatch, Scheduler
from predict.request import Request


class Step(NamedTuple):
    """A step that runs: its batch, who gets a token from it, and the tokens to wait for."""

    batch: ScheduledBatch
    requests: list[Request]
    tokens: Tokens


class Engine:
    """Runs requests to their end. The scheduler decides, the runner executes, the sampler chooses.

    Where the runner allows it (`num_ahead`), the next step is scheduled and queued before the last
    one's tokens are known: they go from step to step on the device, and the host's work runs in
    the shadow of the device's. A request that turns out to have ended then has one row too many in
    the step behind, whose token is dropped.

    Not thread-safe. A failing step leaves the requests in the scheduler; abort them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Sampler,
        eos_token_ids: Collection[int],
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.sampler = sampler
        self.eos_token_ids = frozenset(eos_token_ids)
        self._steps: deque[Step] = deque()  # running, oldest first

    def add(self, request: Request) -> None:
        """Queues a request; raises ValueError when it can never run (see Scheduler.add)."""
        self.scheduler.add(request)

    def step(self) -> tuple[ScheduledBatch | None, list[Request]]:
        """Ends one step; its batch (None when nothing is left) and who finished in it."""
        while len(self._steps) <= self.runner.num_ahead and self._launch():
            pass
        if not self._steps:
            return None, []
        batch, requests, tokens = self._steps.popleft()
        token_ids = tokens.take()
        failed = [request for request, token in zip(requests, token_ids, strict=True) if token < 0]
        for request in failed:
            self.scheduler.abort(request.request_id)
        finished = self.scheduler.update(batch, token_ids, self.eos_token_ids)
        if failed:
            raise ValueError(
                f"sample: request {failed[0].request_id} has no finite largest logit to draw from; "
                "the weights or the dtype do not suit the model"
            )
        return batch, finished

    def abort(self, request_id: int) -> Request | None:
        """Ends a request as "abort" and frees its blocks; None if it is unknown or ended."""
        return self.scheduler.abort(request_id)

    def _launch(self) -> bool:
        """Queues one more step; False when there is none to run now."""
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        inputs = build_inputs(batch, self.scheduler.config.block_size)
        requests = [span.request for span in batch.spans if span.samples]
        tokens = self.runner.launch(inputs, requests, self.sampler)
        self.scheduler.advance(batch)
        self._steps.append(Step(batch, requests, tokens))
        return True
