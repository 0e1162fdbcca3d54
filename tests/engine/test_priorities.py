"""Requests of smaller numbers first: the order, what it takes from others, and that all end."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predict.engine.request_state import Request, RequestStatus
from predict.engine.scheduled import ScheduledBatch, SchedulerConfig
from predict.engine.scheduler import Scheduler
from predict.request import SamplingParams
from tests.support.scheduler_traffic import EOS, Simulation, config, random_config, run_random

IDS = count()


def request(priority: int = 0, prompt: int = 4, new: int = 20, arrival: float = 0.0) -> Request:
    params = SamplingParams(max_new_tokens=new, ignore_eos=True, priority=priority)
    made = next(IDS)
    return Request(made, [made] * prompt, params, arrival_time=arrival)


def step(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.update(batch, [5] * batch.num_samples, EOS)
    scheduler.check()
    return batch


def steps_to_first_token(scheduler: Scheduler, wanted: Request) -> int:
    scheduler.add(wanted)
    for number in range(1, 200):
        step(scheduler)
        if wanted.token_times:
            return number
    raise AssertionError("no token came")


def test_smaller_numbers_run_first_and_ties_go_by_arrival() -> None:
    scheduler = Scheduler(config(max_num_seqs=1, max_length=64))
    added = [request(priority, new=1) for priority in (3, 0, -1, 0, 3)]
    for each in added:
        scheduler.add(each)
    ran = [step(scheduler).spans[0].request for _ in added]
    assert ran == [added[i] for i in (2, 1, 3, 0, 4)]


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(
    ("budget", "prompt"),
    [(64, 20), (64, 150), (4, 20)],  # one step alone, three, and a budget that decodes fill
)
def test_the_smallest_number_waits_three_steps_at_most_under_a_full_queue(
    budget: int, prompt: int, separate: bool
) -> None:
    """Than on an idle scheduler: sequences, blocks and tokens of a step are all taken."""
    limits = config(
        max_num_batched_tokens=budget,
        max_length=200,
        num_blocks=60,
        separate_steps=separate,
    )
    idle = steps_to_first_token(Scheduler(limits), request(-1, prompt))
    scheduler = Scheduler(limits)
    for _ in range(64):
        scheduler.add(request(0, prompt=30, new=100))
    for _ in range(40):
        step(scheduler)
    assert scheduler.num_waiting > 50
    late = steps_to_first_token(scheduler, request(-1, prompt)) - idle
    assert late <= 3


def test_a_preempted_request_goes_on_where_it_was() -> None:
    scheduler = Scheduler(config(max_num_seqs=2, max_length=64))
    first, second = request(0, new=30), request(0, new=30)
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(5):
        step(scheduler)
    urgent = request(-5, new=2)
    scheduler.add(urgent)
    batch = step(scheduler)
    assert batch.preempted == (second,)
    assert urgent.num_output_tokens == 1
    assert second.num_output_tokens == 5
    while scheduler.has_unfinished():
        step(scheduler)
    assert urgent.finish_time is not None
    assert first.num_preemptions == 0
    assert (second.num_preemptions, second.num_output_tokens) == (1, 30)


def test_nothing_is_preempted_for_who_could_not_run_anyway() -> None:
    limits = config(max_num_seqs=4, chunked_prefill=False, max_num_batched_tokens=16)
    scheduler = Scheduler(limits)
    first = request(-9, prompt=12, new=10)
    scheduler.add(first)
    step(scheduler)
    others = [request(0, prompt=2, new=12) for _ in range(3)]
    for each in others:
        scheduler.add(each)
    step(scheduler)
    scheduler.add(request(-1, prompt=20, new=2))  # whole, and more than the budget
    step(scheduler)
    assert sum(each.num_preemptions for each in others) <= 1


@settings(max_examples=25, deadline=None)
@given(
    aging=st.integers(1, 8),
    priority=st.integers(1, 3),
    num_seqs=st.integers(1, 3),
    num_streams=st.integers(1, 4),
)
def test_waiting_makes_up_for_a_larger_number(
    aging: int, priority: int, num_seqs: int, num_streams: int
) -> None:
    """Requests of number 0 come for ever, more of them than the scheduler can run."""
    limits = config(max_num_seqs=num_seqs, priority_aging=float(aging))
    scheduler, new = Scheduler(limits), 5
    late = request(priority, new=new)
    scheduler.add(late)
    num_ahead, now = 0, 0.0
    # All who may go before it come within so many steps, and each takes `new` steps at most.
    most = aging * priority * num_streams * (new + 2) // num_seqs + 4 * new
    while late.status is not RequestStatus.FINISHED:
        now += 1.0
        for _ in range(num_streams):
            scheduler.add(request(0, new=new, arrival=now))
        step(scheduler)
        num_ahead += 1
        assert num_ahead <= most, "it starves"


class PrioritySimulation(Simulation):
    """Requests of all numbers, which come one after the other."""

    now = 0.0

    def _request(self, request_id: int, prompt: list[int], params: SamplingParams) -> Request:
        from dataclasses import replace

        self.now += self.rng.choice([0.0, 1.0])
        params = replace(params, priority=self.rng.choice([-3, 0, 0, 2]))
        return Request(request_id, prompt, params, arrival_time=self.now)

    def check(self) -> None:
        self.scheduler.check()
        owned = {r.request_id for r in self.scheduler._running}
        assert len(owned) == len(self.scheduler._running)
        ranks = [each.rank for each in self.scheduler._running]
        assert ranks == sorted(ranks)
        waiting = [each.rank for each in self.scheduler._waiting]
        assert waiting == sorted(waiting)
        assert self.scheduler.num_running <= self.limits.max_num_seqs

    def _check_batch(self, batch: ScheduledBatch, running: set[int]) -> None:
        limits = self.limits
        ids = [span.request.request_id for span in batch.spans]
        assert len(set(ids)) == len(ids) <= limits.max_num_seqs
        assert not {each.request_id for each in batch.preempted} & set(ids)
        for span in batch.spans:
            group = span.request.beam_group
            assert group is None or all(beam.request_id in ids for beam in group.beams)
        if limits.chunked_prefill:
            assert batch.num_tokens <= limits.max_num_batched_tokens
        going = [r for r in self.unfinished.values() if r.num_tokens < r.max_num_tokens]
        first = min(going, key=lambda r: r.rank, default=None)
        owners = {span.request.owner for span in batch.spans}
        self._check_turn(first is not None and first not in owners, "the first does not proceed")


@pytest.mark.no_cover
@settings(max_examples=60, deadline=None)
@given(
    limits=st.composite(random_config)(),
    seed=st.integers(0, 2**32 - 1),
    mode=st.sampled_from(["plain", "drafts", "ahead"]),
)
def test_any_traffic_of_any_numbers_ends_with_its_own_tokens(
    limits: SchedulerConfig, seed: int, mode: str
) -> None:
    run_random(
        limits,
        seed,
        num_events=40,
        drafts=mode == "drafts",
        ahead=mode == "ahead",
        kind=PrioritySimulation,
    )


@pytest.mark.no_cover
def test_the_traffic_meets_what_it_is_for() -> None:
    limits = config(max_num_seqs=6, max_num_batched_tokens=16, num_blocks=20)
    simulation = run_random(limits, 3, 600, drafts=True, kind=PrioritySimulation)
    assert simulation.scheduler.stats.num_preemptions >= 20
