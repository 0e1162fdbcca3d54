"""All resources at once: blocks, pages of adapters that must be read first, tuned prefixes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, cast

import pytest

from predict.adapters.pool import AdapterPool, ServedAdapter
from predict.adapters.prefixes import NO_PREFIX
from predict.engine.failures import RequestError
from predict.engine.request_state import Request
from predict.engine.scheduled import ScheduledBatch
from predict.engine.scheduler import Scheduler
from predict.errors import UserError
from predict.nn.inputs import ADAPTED
from predict.request import SamplingParams
from predict.text.answer_text import AnswerText
from tests.support.resource_traffic import (
    AdapterSimulation,
    ComingAndGoing,
    FakeStore,
    with_adapter,
)
from tests.support.scheduler_traffic import EOS, config, request, run_random


class SlowStore(FakeStore):
    """Adapters that are read when the test says so, and forgotten once they are in pages."""

    def __init__(self, num_pages: int, max_pages: int) -> None:
        super().__init__(num_pages, max_pages)
        self.pool = AdapterPool(num_pages, max_pages, self.write, self.read)
        self.reads: dict[ServedAdapter, Future[None]] = {}
        self.broken: set[ServedAdapter] = set()

    def read(self, adapter: ServedAdapter) -> Future[None]:
        return self.reads.setdefault(adapter, Future())

    def finish(self, rng: random.Random, share: float) -> None:
        for adapter, read in self.reads.items():
            if not read.done() and rng.random() < share:
                read.set_result(None)
                self.broken |= {adapter} if rng.random() < 0.1 else set()

    def write(self, adapter: ServedAdapter, pages: list[int]) -> None:
        assert self.reads.pop(adapter).done(), "read within a decision"
        if adapter in self.broken:
            raise UserError("the file is gone")
        super().write(adapter, pages)


class Breaking:
    """An answer whose text cannot be made from its second token on."""

    num_tokens = 0

    def append(self, *_: Any) -> bool:
        self.num_tokens += 1
        if self.num_tokens > 1:
            raise ValueError("no text")
        return False


class Everything(AdapterSimulation, ComingAndGoing):
    """Requests with an adapter, a prefix or none; some fail."""

    num_failed = num_waits = 0

    def _request(self, request_id: int, prompt: list[int], params: SamplingParams) -> Request:
        prefix = NO_PREFIX if self.adapter is not None else self.prefix()
        made = Request(request_id, prompt, params, adapter=self.adapter, prefix=prefix)
        if self.rng.random() < 0.1 and params.num_beams == 1:
            made.answer = cast(AnswerText, Breaking())
        return made

    def _schedule(self, drafts: Mapping[int, list[int]] | None = None) -> ScheduledBatch | None:
        store = cast(SlowStore, self.store)
        while True:
            store.finish(self.rng, 0.3)
            try:
                batch = self.scheduler.schedule(drafts)
            except RequestError as failure:
                self.num_failed += 1
                failed = self.scheduler.abort(failure.request.request_id, "error")
                assert failed is not None
                self._end(failed)
                self.check()
                continue
            if batch is not None or self.ahead or not self.unfinished:
                return batch
            store.finish(self.rng, 1.0)
            assert self.scheduler.wait()
            self.num_waits += 1

    def _awaits_more(self, head: Request) -> bool:
        reads = cast(SlowStore, self.store).reads
        read = None if head.adapter is None else reads.get(head.adapter)
        return (read is not None and not read.done()) or super()._awaits_more(head)


@pytest.mark.no_cover
@pytest.mark.parametrize("num_events", [800, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["drafts", "ahead"])
def test_the_head_runs_whenever_there_is_room_and_nothing_is_lost(
    mode: str, num_events: int
) -> None:
    limits = config(
        max_num_seqs=8,
        max_num_batched_tokens=32,
        num_blocks=18,
        adapters=SlowStore(3, 2).pool,
        for_drafts=mode == "drafts",
    )
    found = run_random(limits, 5, num_events, mode == "drafts", mode == "ahead", kind=Everything)
    assert isinstance(found, Everything)
    found.pool.check({})
    requests = found.requests.values()
    reasons = [each.finish_reason for each in requests]
    # The run is worth something only if it met all of these.
    assert min(reasons.count(reason) for reason in ("stop", "length", "abort")) >= num_events // 50
    assert reasons.count("error") > found.num_failed >= num_events // 100
    assert found.num_waits >= num_events // 200
    assert found.num_loaded >= num_events // 20
    assert found.scheduler.stats.num_preemptions >= num_events // 250
    assert sum(each.beam_group is not None for each in requests) >= num_events // 50
    assert sum(each.prefix is not NO_PREFIX for each in requests) >= num_events // 100


def test_a_cold_adapter_is_read_while_others_run_and_keeps_its_turn() -> None:
    store = SlowStore(2, 1)
    scheduler = Scheduler(config(adapters=store.pool))
    scheduler.add(request(0, [1, 2], max_new_tokens=3))
    cold = ServedAdapter("1", 1, (True,) * len(ADAPTED))
    scheduler.add(with_adapter(1, cold))
    scheduler.add(request(2, [1, 2]))
    ran: list[list[int]] = []
    while (batch := scheduler.schedule()) is not None:
        ran.append([span.request.request_id for span in batch.spans])
        scheduler.update(batch, [5] * batch.num_samples, EOS)
    assert ran == [[0], [0], [0]]
    store.finish(random.Random(0), 1.0)
    store.broken.clear()
    assert scheduler.wait()  # it was done between the attempt and the wait
    assert not scheduler.wait()
    batch = scheduler.schedule()
    assert batch is not None
    assert [span.request.request_id for span in batch.spans] == [1, 2]
