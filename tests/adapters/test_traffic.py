"""Random traffic of requests with adapters, see tests.support.scheduler_traffic.

What a request computes depends on its adapter, so that a block of another's shows as another hash.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predict.adapters.pool import ServedAdapter
from predict.engine.failures import RequestError
from predict.engine.scheduled import SchedulerConfig
from predict.engine.scheduler import Scheduler
from predict.errors import UserError
from predict.nn.inputs import ADAPTED
from tests.support.resource_traffic import AdapterSimulation, FakeStore, with_adapter
from tests.support.scheduler_traffic import (
    EOS,
    config,
    random_config,
    request,
    run_random,
)


@pytest.mark.no_cover
@pytest.mark.parametrize("num_events", [2500, pytest.param(10_000, marks=pytest.mark.slow)])
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
