"""Random traffic of requests with adapters, see tests.support.scheduler_traffic.

What a request computes depends on its adapter, so that a block of another's shows as another hash.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predict.adapters.pool import AdapterPool, ServedAdapter
from predict.engine.batch import adapted, span_inputs
from predict.engine.beams import Candidates
from predict.engine.failures import RequestError
from predict.engine.request_state import Request
from predict.engine.scheduled import ScheduledBatch, SchedulerConfig
from predict.engine.scheduler import Scheduler
from predict.errors import UserError
from predict.nn.blocks import ADAPTED
from predict.request import SamplingParams
from tests.support.scheduler_traffic import (
    EOS,
    Simulation,
    config,
    random_config,
    request,
    run_random,
)

NUM_NAMES = 7
MOST_UNFINISHED = 24  # a longer queue is looked through at every step, and finds nothing more
Sampled = list[int | list[int] | Candidates]


class FakeStore:
    """Pages that hold the keys of the adapters that were written there."""

    def __init__(self, num_pages: int, max_pages: int) -> None:
        self.pool = AdapterPool(num_pages, max_pages, self.write)
        self.keys = [0] * num_pages

    def write(self, adapter: ServedAdapter, pages: list[int]) -> None:
        for page in pages:
            self.keys[page] = adapter.key


class AdapterSimulation(Simulation):
    """Adapters of seven names come and go; most requests name one."""

    def __init__(self, limits: SchedulerConfig, rng: random.Random) -> None:
        super().__init__(limits, rng)
        assert limits.adapters is not None
        self.pool = limits.adapters
        self.store: FakeStore = limits.adapters._write.__self__  # type: ignore[attr-defined]
        self.adapters: list[ServedAdapter] = []
        self.num_loaded = self.num_blocked = 0
        self.adapter: ServedAdapter | None = None  # of the next request

    def add(self, prompt: list[int], params: SamplingParams) -> None:
        while len(self.unfinished) > MOST_UNFINISHED:
            if self.ahead:
                self.step_ahead()
            else:
                self.step(drafts=False)
        self._change()
        self.adapter = self.rng.choice([None, *self.adapters])
        before = len(self.requests)
        super().add(prompt, params)
        if len(self.requests) > before and params.num_beams == 1 and self.rng.random() < 0.2:
            super().add(prompt, params)  # another sample of it
            self.requests[before + 1].leader = self.requests[before]

    def abort(self, request_id: int) -> None:
        super().abort(self.rng.choice([request_id, *self.unfinished]))

    def _change(self) -> None:
        """Loads an adapter, or unloads one, whoever has it."""
        if len(self.adapters) == NUM_NAMES or (self.adapters and self.rng.random() < 0.1):
            gone = self.adapters.pop(self.rng.randrange(len(self.adapters)))
            self.pool.forget(gone)
        if not self.adapters or self.rng.random() < 0.2:
            num_pages = self.rng.randint(1, self.pool.max_pages)
            targets = tuple(self.rng.random() < 0.7 for _ in ADAPTED)
            self.num_loaded += 1
            self.adapters.append(ServedAdapter(str(self.num_loaded), num_pages, targets))

    def _request(self, request_id: int, prompt: list[int], params: SamplingParams) -> Request:
        return Request(request_id, prompt, params, adapter=self.adapter)

    def _execute(self, batch: ScheduledBatch) -> Sampled:
        inputs = adapted(span_inputs(batch.spans, self.limits.block_size), batch.spans, self.pool)
        ids, pages = np.asarray(inputs.adapter_ids), np.asarray(inputs.adapter_pages)
        ends = np.asarray(inputs.cu_seqlens_q)
        for index, span in enumerate(batch.spans):
            adapter = span.request.adapter
            rows = set(ids[ends[index] : ends[index + 1]])
            assert len(rows) == 1
            row = rows.pop()
            if adapter is None:
                assert row == -1
                continue
            for changes, found in zip(adapter.targets, pages[row], strict=True):
                own = [page for page in found if page >= 0]
                assert len(own) == adapter.num_pages * changes
                assert len(set(own)) == len(own)
                assert {self.store.keys[page] for page in own} <= {adapter.key}
        return super()._execute(batch)

    def _awaits_more(self, head: Request) -> bool:
        wanted, free = head.adapter, self.pool.num_free_pages
        if wanted is not None and wanted not in self.pool._pages and wanted.num_pages > free:
            return True
        return super()._awaits_more(head)

    def check(self) -> None:
        super().check()
        self.scheduler.check()
        waiting = self.scheduler._waiting
        head = waiting[0].adapter if waiting else None
        self.num_blocked += head is not None and head.num_pages > self.pool.num_free_pages


@pytest.mark.no_cover
@pytest.mark.parametrize("num_events", [2500, pytest.param(25_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["drafts", "ahead"])
def test_thousands_of_arrivals_aborts_loads_and_unloads(mode: str, num_events: int) -> None:
    pool = FakeStore(3, 2).pool
    limits = config(
        max_num_seqs=8, max_num_batched_tokens=24, max_length=32, num_blocks=20, adapters=pool
    )
    found = run_random(
        limits, 11, num_events, mode == "drafts", mode == "ahead", kind=AdapterSimulation
    )
    assert isinstance(found, AdapterSimulation)
    pool.check({})
    requests = found.requests.values()
    reasons = [each.finish_reason for each in requests]
    stats = found.scheduler.stats
    # The run is worth something only if it met all of these.
    assert len(reasons) >= 0.4 * num_events
    assert min(reasons.count(reason) for reason in ("stop", "length", "abort")) >= num_events // 50
    assert stats.num_preemptions >= num_events // 250
    assert stats.num_prefix_hit_tokens >= num_events // 4
    assert found.num_loaded >= num_events // 20
    assert found.num_blocked >= num_events // 50
    assert found.pool.num_written >= num_events // 20
    searches = [each for each in requests if each.beam_group is not None and each.adapter]
    assert sum(each.finish_reason != "abort" for each in searches) >= num_events // 50
    assert sum(each.leader is not None for each in requests) >= num_events // 50


@st.composite
def any_limits(draw: st.DrawFn) -> SchedulerConfig:
    max_pages = draw(st.integers(1, 3))
    num_pages = max_pages * draw(st.integers(1, 3))
    return random_config(draw, FakeStore(num_pages, max_pages).pool)


@pytest.mark.no_cover
@settings(max_examples=100, deadline=None)
@given(
    limits=any_limits(),
    seed=st.integers(0, 2**32 - 1),
    mode=st.sampled_from(["plain", "drafts", "ahead"]),
)
def test_any_limits_keep_every_promise(limits: SchedulerConfig, seed: int, mode: str) -> None:
    run_random(limits, seed, 60, mode == "drafts", mode == "ahead", kind=AdapterSimulation)


def with_adapter(request_id: int, adapter: ServedAdapter, max_new_tokens: int = 4) -> Request:
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    return Request(request_id, [1, 2, 3, 4, 5], params, adapter=adapter)


def test_a_request_waits_for_pages_and_nobody_passes_it() -> None:
    store = FakeStore(2, 2)
    scheduler = Scheduler(config(adapters=store.pool))
    first, second = (ServedAdapter(name, 2, (True,) * len(ADAPTED)) for name in "12")
    scheduler.add(with_adapter(0, first, max_new_tokens=2))
    scheduler.add(with_adapter(1, second))
    scheduler.add(request(2, [1, 2]))
    ran: list[list[int]] = []
    while (batch := scheduler.schedule()) is not None and len(ran) < 4:
        ran.append([span.request.request_id for span in batch.spans])
        scheduler.update(batch, [5] * batch.num_samples, EOS)
    assert ran[:3] == [[0], [0], [1, 2]]


def test_an_adapter_that_cannot_be_written_ends_its_request_alone() -> None:
    class Failing(FakeStore):
        def write(self, adapter: ServedAdapter, pages: list[int]) -> None:
            if adapter.name == "2":
                raise UserError("the file is gone")

    scheduler = Scheduler(config(adapters=Failing(2, 1).pool))
    good, bad = (ServedAdapter(name, 1, (True,) * len(ADAPTED)) for name in "12")
    for index, adapter in enumerate((good, bad, good)):
        scheduler.add(with_adapter(index, adapter))
    with pytest.raises(RequestError) as failure:
        scheduler.schedule()
    assert failure.value.request.request_id == 1
    assert str(failure.value.__cause__) == "the file is gone"
    scheduler.abort(1, "error")
    scheduler.check()
    ended = []
    while (batch := scheduler.schedule()) is not None:
        ended += scheduler.update(batch, [5] * batch.num_samples, EOS)
        scheduler.check()
    assert [each.request_id for each in ended] == [0, 2]


def test_an_adapter_larger_than_the_pages_is_refused() -> None:
    scheduler = Scheduler(config(adapters=FakeStore(4, 2).pool))
    large = ServedAdapter("1", 3, (True,) * len(ADAPTED))
    with pytest.raises(UserError, match=r"has 3 pages \(allowed: up to 2\); raise --max_lora_rank"):
        scheduler.add(with_adapter(0, large))
    with pytest.raises(UserError, match=r"allowed: up to 0"):
        Scheduler(config()).add(with_adapter(0, large))
    assert not scheduler.has_unfinished()
