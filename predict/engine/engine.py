"""One engine step: schedule, execute, sample, write back."""

from __future__ import annotations

from collections.abc import Collection

from predict.engine.batch import build_inputs
from predict.engine.runner import Runner
from predict.engine.sampler import Sampler
from predict.engine.scheduler import ScheduledBatch, Scheduler
from predict.request import Request


class Engine:
    """Runs requests to their end. The scheduler decides, the runner executes, the sampler chooses.

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

    def add(self, request: Request) -> None:
        """Queues a request; raises ValueError when it can never run (see Scheduler.add)."""
        self.scheduler.add(request)

    def step(self) -> tuple[ScheduledBatch | None, list[Request]]:
        """Runs one step; the batch that ran (None when nothing is left) and who finished in it."""
        batch = self.scheduler.schedule()
        if batch is None:
            return None, []
        logits = self.runner.execute(build_inputs(batch, self.scheduler.config.block_size))
        sampling = [span.request for span in batch.spans if span.samples]
        tokens = self.sampler.sample(logits, sampling) if sampling else []
        return batch, self.scheduler.update(batch, tokens, self.eos_token_ids)
