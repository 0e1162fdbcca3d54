"""Slots of states: whose state a step reads and writes, what prompts leave behind, who makes room.

In the simulation a state is the hash of the tokens that it has seen.
"""

from __future__ import annotations

import itertools
import random

import pytest

from predict.engine import states
from predict.engine.beams import Candidates
from predict.engine.request_state import Request
from predict.engine.scheduled import ScheduledBatch, SchedulerConfig
from predict.engine.scheduler import Scheduler
from predict.request import SamplingParams
from tests.support.scheduler_traffic import (
    Simulation,
    config,
    first_hash,
    prefix_hashes,
    request,
    run_random,
)


class StateSimulation(Simulation):
    """Every step finds in the slot that it reads the state of just its request's tokens."""

    def __init__(self, limits: SchedulerConfig, rng: random.Random) -> None:
        super().__init__(limits, rng)
        self.states: dict[int, int] = {}

    def _execute(self, batch: ScheduledBatch) -> list[int | list[int] | Candidates]:
        last = self.last
        sampled = super()._execute(batch)
        sources = {span.state[0] for span in batch.spans}
        targets = [span.state[1] for span in batch.spans]
        assert len(set(targets)) == len(targets)
        assert not sources & set(targets)
        assert not set(targets) & set(self.scheduler._states._kept.values())
        for span in batch.spans:
            tokens = [*span.request.token_ids, *span.draft_token_ids]
            for place, token in enumerate(tokens):
                if token < 0:
                    entry = last[-1 - token]
                    assert not isinstance(entry, Candidates)
                    tokens[place] = entry if isinstance(entry, int) else entry[0]
            first = first_hash(span.request)
            hashes = [first, *prefix_hashes(tokens, first)]
            source, target = span.state
            assert (first if source < 0 else self.states[source]) == hashes[span.start]
            self.states[target] = hashes[span.start + span.num_tokens]
        return sampled

    def check(self) -> None:
        super().check()
        self.scheduler.check()


LIMITS = {
    "roomy": {"num_state_slots": 40, "num_blocks": 60},
    "few slots": {"num_state_slots": 11, "num_blocks": 40},
    "no slot to spare": {"num_state_slots": 8, "num_blocks": 32},
    "few blocks": {"num_state_slots": 20, "num_blocks": 9, "max_num_batched_tokens": 7},
    "whole prompts": {"num_state_slots": 20, "chunked_prefill": False, "separate_steps": True},
    "reserved": {"num_state_slots": 8, "reserve_full": True, "prefix_caching": False},
}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("num_events", [250, pytest.param(2000, marks=pytest.mark.slow)])
def test_each_step_reads_the_state_of_its_own_tokens(
    name: str, ahead: bool, num_events: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "STRIDE", 4)
    limits = config(**LIMITS[name])
    run = run_random(limits, 7, num_events, drafts=not ahead, ahead=ahead, kind=StateSimulation)
    slots = run.scheduler._states
    assert len(slots._free) + slots.num_kept == limits.num_state_slots
    if name == "roomy":
        assert run.scheduler.stats.num_prefix_hit_tokens > num_events / 2


def run_prompt(scheduler: Scheduler, added: Request) -> list[tuple[int, int]]:
    """Runs a request to its end; the slots of its steps."""
    scheduler.add(added)
    slots = []
    while scheduler.has_unfinished():
        batch = scheduler.schedule()
        assert batch is not None
        slots += [span.state for span in batch.spans]
        scheduler.update(batch, [1] * batch.num_samples)
    return slots


def hits(scheduler: Scheduler) -> tuple[int, int]:
    return scheduler.stats.num_prefix_hit_tokens, scheduler.stats.num_stateless_tokens


def of_length(number: int, count: int, first: int = 1) -> Request:
    return request(number, [*range(first, first + count)], 1)


ROOMY = {"max_length": 400, "num_blocks": 100, "max_num_batched_tokens": 400, "block_size": 16}


def test_prompts_leave_states_at_multiples_of_64_and_hits_begin_there() -> None:
    scheduler = Scheduler(config(**ROOMY, num_state_slots=20))
    run_prompt(scheduler, of_length(0, 150))
    assert hits(scheduler) == (0, 0)
    run_prompt(scheduler, of_length(1, 150))
    assert hits(scheduler) == (128, 16)  # keys and values of 144 tokens are there
    run_prompt(scheduler, of_length(2, 128))
    assert hits(scheduler) == (128, 128)  # a token must be left; none at 64 yet
    run_prompt(scheduler, of_length(3, 128))
    assert hits(scheduler) == (192, 176)


def test_a_prompt_that_parts_from_a_known_one_leaves_a_state_there() -> None:
    scheduler = Scheduler(config(**ROOMY, num_state_slots=20))
    for number in range(3):
        prompt = [*range(1, 101), *range(200 + 50 * number, 250 + 50 * number)]
        run_prompt(scheduler, request(number, prompt, 1))
    assert hits(scheduler) == (64, 96 + 32)


@pytest.mark.parametrize(("same_bits", "ends"), [(False, 192), (True, 64)])
def test_an_answer_leaves_its_last_state_unless_bits_are_promised(
    same_bits: bool, ends: int
) -> None:
    scheduler = Scheduler(config(**ROOMY, num_state_slots=20, same_bits=same_bits))
    first = request(0, [*range(1, 101)], 120)
    run_prompt(scheduler, first)
    assert scheduler.stats.num_kept_states == 1 + (not same_bits)
    assert scheduler.stats.num_used_states == 0
    run_prompt(scheduler, request(1, [*range(1, 101), *first.output_token_ids, 7], 1))
    assert hits(scheduler)[0] == ends


@pytest.mark.parametrize("ahead", [False, True])
def test_with_lookahead_a_state_is_known_by_the_token_behind_it(ahead: bool) -> None:
    """A prompt's end and an answer's multiple, whose next token a step ahead does not tell yet."""
    scheduler = Scheduler(config(**ROOMY, num_state_slots=20, lookahead=1))
    first = request(0, [*range(1, 129)], 80)
    scheduler.add(first)
    token = 500
    while scheduler.has_unfinished():
        batch = scheduler.schedule()
        assert batch is not None
        if ahead:
            scheduler.advance(batch)
        token += batch.num_samples
        scheduler.update(batch, [token] * batch.num_samples)
        scheduler.check()
    known = [*range(1, 129), *first.output_token_ids]
    for number, (behind, found) in enumerate([(known[128:130], 128), ([9, 9], 64)], 1):
        run_prompt(scheduler, request(number, [*range(1, 129), *behind], 1))
        assert hits(scheduler)[0] == found + 128 * (number - 1)
    run_prompt(scheduler, request(3, [*known, 7], 1))
    assert hits(scheduler)[0] == 128 + 64 + 192


def test_a_preempted_request_is_not_counted_again() -> None:
    scheduler = Scheduler(config(num_state_slots=8, num_blocks=10, max_num_batched_tokens=32))
    for number in range(2):
        scheduler.add(request(number, [*range(20 * number, 20 * number + 13)], 12))
    while scheduler.has_unfinished():
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.update(batch, [1] * batch.num_samples)
    assert scheduler.stats.num_preemptions == 1
    assert hits(scheduler) == (0, 0)


def test_the_state_that_was_used_longest_ago_makes_room() -> None:
    scheduler = Scheduler(config(**ROOMY, num_state_slots=8, max_num_seqs=3))
    for number, first in enumerate((1, 1000, 2000, 1)):  # with 2 slots of its own each finds room
        run_prompt(scheduler, of_length(number, 70, first))
    for number, first in enumerate(range(3000, 3700, 100), 4):
        run_prompt(scheduler, of_length(number, 70, first))
        run_prompt(scheduler, of_length(number + 100, 70))  # used again and again
    assert hits(scheduler)[0] == 8 * 64
    run_prompt(scheduler, of_length(999, 70, 1000))
    assert hits(scheduler) == (8 * 64, 64)


def test_a_step_that_runs_again_reads_what_it_read_before() -> None:
    scheduler = Scheduler(config(num_state_slots=8))
    scheduler.add(request(0, [1, 2, 3], 4))
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.spans[0].state[0] == -1
    scheduler.update(batch, [1])
    batch = scheduler.schedule({0: [1, 1]})
    assert batch is not None
    before = batch.spans[0].state
    assert scheduler.undrafted(batch).spans[0].state == before
    scheduler.abort(0)
    scheduler.check()
    assert len(scheduler._states._free) == 8


def test_after_rejected_drafts_the_state_before_them_stays() -> None:
    scheduler = Scheduler(config(num_state_slots=8))
    scheduler.add(Request(0, [1, 2, 3], SamplingParams(max_new_tokens=9, ignore_eos=True)))
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.update(batch, [5])
    batch = scheduler.schedule({0: [6, 7, 8]})
    assert batch is not None
    source = batch.spans[0].state[0]
    scheduler.update(batch, [[6, 9]])  # one of three stands
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.spans[0].state[0] == source
    assert batch.spans[0].token_ids == [5, 6, 9]


SYSTEM, NUM_CONVERSATIONS = 700, 16  # tokens; at a time


def conversations(kind: str, slots: int) -> tuple[int, int]:
    """Tokens of prompts that were hit, and that could be, of 16 conversations of 8 turns in turns.

    Those that could be: a prompt has them in common with something served before, less 64. kind:
    what follows a turn: the answer as it is, the answer without its thinking, the same prompt
    again, or another conversation. The latter counts from the third prompt on.
    """
    rng = random.Random(1)
    tokens = itertools.count(1)
    limits = config(
        max_length=20_000,
        num_blocks=4000,
        max_num_batched_tokens=512,
        block_size=64,
        num_state_slots=8 + slots,
    )
    scheduler = Scheduler(limits)
    system = [next(tokens) for _ in range(SYSTEM)]
    histories: list[list[int]] = [list(system) for _ in range(NUM_CONVERSATIONS)]
    served: list[list[int]] = []
    possible = hit = 0
    for number in range(8 * NUM_CONVERSATIONS):
        which = number % NUM_CONVERSATIONS
        history = list(system) if kind == "other questions" else histories[which]
        if kind != "sent again" or number // NUM_CONVERSATIONS % 2 == 0:
            history = [*history, *(next(tokens) for _ in range(rng.randint(10, 90)))]
        before = scheduler.stats.num_prefix_hit_tokens
        added = request(number, history, rng.randint(20, 150))
        scheduler.add(added)
        while scheduler.has_unfinished():
            batch = scheduler.schedule()
            assert batch is not None
            scheduler.update(batch, [next(tokens) for _ in range(batch.num_samples)])
        if kind != "other questions" or number > 1:
            possible += max(0, max((common(history, each) for each in served), default=0) - 64)
            hit += scheduler.stats.num_prefix_hit_tokens - before
        answer = added.output_token_ids
        served.append([*history, *answer])
        if kind == "no thinking":
            answer = answer[len(answer) // 2 :]
        histories[which] = history if kind == "sent again" else [*history, *answer]
    return hit, possible


def common(one: list[int], other: list[int]) -> int:
    """Tokens at their beginnings that are the same."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("slots", [64, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["as generated", "no thinking", "sent again", "other questions"])
def test_turns_of_conversations_hit_what_was_served(kind: str, slots: int) -> None:
    hit, possible = conversations(kind, slots)
    assert hit >= (0.95 if slots == 64 else 0.5) * possible
    print(f"{kind}, {slots} states: {hit / possible:.3f} of {possible} tokens")
