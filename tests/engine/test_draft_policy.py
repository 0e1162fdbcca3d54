"""How many drafts there are: as many as pay, and what they lose is bounded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from predict.engine.draft_policy import (
    ALLOWANCE,
    FEWEST_TIMES,
    FIRST_BALANCE,
    LONGEST_REST,
    MOST_BALANCE,
    MOST_EXCUSES,
    Costs,
    DraftPolicy,
)
from predict.engine.request_state import Request
from predict.request import SamplingParams

CPU = Costs(row=0.04)
GPU = Costs(row=0.0055, wait=0.08, wait_each=0.004)


def request(number: int = 0, prompt: int = 1) -> Request:
    made = Request(number, list(range(prompt)), SamplingParams())
    made.max_num_tokens = 1 << 20
    return made


def made(max_length: int, max_rows: int, costs: Costs, looks_up: bool) -> DraftPolicy:
    """A policy that has timed steps without drafts."""
    policy = DraftPolicy(max_length, max_rows, costs, looks_up)
    for _ in range(FEWEST_TIMES):
        policy.stepped(1, [], 0, False, 0.004 * (1 + costs.row))
    return policy


def lengths(policy: DraftPolicy, requests: list[Request]) -> list[int]:
    limits = policy.limits(requests, on_way=False)
    return [limits.get(each, 0) for each in requests]


def test_drafts_get_shorter_as_they_fail_and_longer_as_they_succeed() -> None:
    policy, one = made(8, 64, CPU, looks_up=False), request()
    assert 1 < lengths(policy, [one])[0] < 8  # nothing is known
    for _ in range(5):
        policy.record(one, 4, 4)
    assert lengths(policy, [one]) == [8]
    found = []
    for _ in range(12):
        policy.record(one, 4, 0)
        found += lengths(policy, [one])
    assert found == sorted(found, reverse=True)
    assert found[0] >= 3
    assert found[-1] <= 2
    for _ in range(5):
        policy.record(one, 4, 4)
    assert lengths(policy, [one]) == [8]


def test_drafts_get_shorter_in_batches_and_where_drafting_costs() -> None:
    policy = made(15, 64, CPU, looks_up=False)
    costly = made(15, 64, Costs(row=0.04, draft=0.2), looks_up=False)
    some = [request(number) for number in range(40)]
    for each in (policy, costly):
        each.record(some[-1], 8, 6)
    alone = lengths(policy, some[:1])[0]
    among_four = lengths(policy, some[:4])
    assert alone > among_four[0] > 1
    assert len(set(among_four)) == 1
    assert 0 < sum(lengths(policy, some)) <= 64
    assert 1 < lengths(costly, some[:1])[0] < alone


def test_the_draft_models_steps_are_shared_by_those_that_draft() -> None:
    """A long bet alone does not keep a draft model at work that the others have done with."""
    policy = made(15, 64, Costs(row=0.005, draft=0.2), looks_up=False)
    some = [request(number) for number in range(8)]
    for _ in range(20):
        policy.record(some[0], 15, 15)
        for other in some[1:]:
            policy.record(other, 1, 0)
    assert lengths(policy, some[:1]) == [15]
    assert max(lengths(policy, some)) <= 1


def test_there_are_no_drafts_before_a_step_without_them_was_timed() -> None:
    policy, one = DraftPolicy(8, 64, CPU, looks_up=False), request()
    for count in range(FEWEST_TIMES):
        assert lengths(policy, [one]) == [0], count
        policy.stepped(1, [], 0, False, None)  # with a prompt in it
        assert lengths(policy, [one]) == [0], count
        policy.stepped(1, [], 0, False, 0.004)
    assert lengths(policy, [one]) != [0]


def test_drafts_end_with_their_request() -> None:
    policy, one = made(8, 64, CPU, looks_up=False), request()
    policy.record(one, 8, 8)
    one.max_num_tokens = one.num_tokens + 4
    assert lengths(policy, [one]) == [3]
    one.max_num_tokens = one.num_tokens + 1
    assert lengths(policy, [one]) == [0]


class Text:
    """Decodes a request token by token as an engine that runs `num_ahead` steps ahead does.

    A stand-in for a proposer guesses `guess_of(place)`: what it takes the next tokens to be.
    """

    def __init__(
        self, policy: DraftPolicy, token_of: Callable[[int], int], guess_of: Callable[[int], int]
    ):
        self.policy, self.token_of, self.guess_of = policy, token_of, guess_of
        self.request = request()
        self.num_steps = 0
        self.drafted: list[int] = []  # steps that had drafts
        self.waited: list[int] = []  # steps that waited for tokens

    def step(self, ahead: bool) -> None:
        policy, one = self.policy, self.request
        limits = policy.limits([one], on_way=ahead)
        waits = ahead and bool(limits)
        if waits:
            self.waited.append(self.num_steps)
        if ahead:  # the token on its way comes
            self.come([self.token_of(one.num_tokens)])
            limits = policy.limits([one], on_way=False) if waits else {}
        drafts = list(policy.guess(one, limits[one])) if limits else []
        if drafts:
            place = one.num_tokens
            right = [self.token_of(place + i) for i in range(len(drafts) + 1)]
            pairs = enumerate(zip(drafts, right, strict=False))
            wrong = next((i for i, (a, b) in pairs if a != b), len(drafts))
            policy.record(one, len(drafts), wrong)
            self.drafted.append(self.num_steps)
            self.come(right[: wrong + 1])
        elif not ahead:
            self.come([self.token_of(one.num_tokens)])
        self.num_steps += 1

    def come(self, tokens: list[int]) -> None:
        policy, one = self.policy, self.request
        one.token_ids += tokens
        if policy.follow(one):
            policy.guessed(one, [self.guess_of(one.num_tokens + i) for i in range(8)])


@pytest.mark.parametrize("ahead", [False, True])
def test_guesses_that_fail_are_neither_verified_nor_waited_for(ahead: bool) -> None:
    policy = made(8, 64, GPU if ahead else CPU, looks_up=True)
    text = Text(policy, lambda place: place, lambda place: -place)
    for _ in range(1000):
        text.step(ahead)
    assert len(text.drafted) <= 20, text.drafted
    assert len(text.waited) <= 20, text.waited
    assert max([0, *text.drafted, *text.waited]) < 100


@pytest.mark.parametrize("ahead", [False, True])
def test_guesses_that_come_true_become_drafts_within_a_few_tokens(ahead: bool) -> None:
    policy = made(8, 64, GPU if ahead else CPU, looks_up=True)
    text = Text(policy, lambda place: place, lambda place: place if place >= 500 else -place)
    while text.request.num_tokens < 500:
        text.step(ahead)
    before = text.num_steps
    for _ in range(LONGEST_REST + 12):
        text.step(ahead)
    recent = [step for step in text.drafted if step >= before]
    assert recent
    assert recent[0] <= before + LONGEST_REST + 4
    assert text.request.num_tokens > 540


def test_nothing_is_waited_for_in_a_batch_of_which_one_has_guesses() -> None:
    policy = made(8, 512, GPU, looks_up=True)
    some = [request(number) for number in range(64)]
    for each in some:
        policy.follow(each)
        policy.guessed(each, [] if each.request_id else [5] * 8)
    assert policy.limits(some, on_way=True) == {}
    assert policy.limits(some[:1], on_way=True) != {}


def test_what_one_request_showed_serves_the_next() -> None:
    good, bad = (made(8, 64, Costs(row=0.01, draft=0.2), looks_up=False) for _ in range(2))
    for number in range(30):
        for policy, accepted in ((good, 4), (bad, 0)):
            policy.record(request(number), 4, accepted)
            policy.forget(number)
    bad.balance = good.balance = 0.01
    assert lengths(good, [request(99)]) == [8]
    assert lengths(bad, [request(99)]) == [0]


class Clock:
    """Time as a draft model takes it whose drafts are right with a probability, in steps."""

    def __init__(self, policy: DraftPolicy, real: float, output: int, num_decoding: int = 1):
        """real: what drafts cost, over what the policy takes them to. output: tokens a request."""
        self.policy, self.real, self.output = policy, real, output
        self.random = np.random.default_rng(0)
        self.num_decoding = num_decoding
        self.requests: list[Request] = []
        self.num_requests = 0
        self.lost = [0.0]  # since the start, after each step
        self.dearest = 0.0  # step
        self.has_drafts: list[bool] = []

    def step(self, agreement: float) -> None:
        policy, costs = self.policy, self.policy.costs
        while len(self.requests) < self.num_decoding:
            self.requests.append(request(self.num_requests, 40))
            self.num_requests += 1
        limits = policy.limits(self.requests, on_way=False)
        one_row = 1 + costs.row * self.num_decoding
        extra = num_accepted = 0.0
        if limits:
            drafts = costs.row * sum(limits.values()) + costs.draft * max(limits.values())
            catch_up = costs.draft * costs.row * policy._num_missing
            extra = (self.real * (costs.wait + drafts) + catch_up) / one_row
        for each in list(self.requests):
            count = 0
            if each in limits:
                right = self.random.random(limits[each]) < agreement
                count = int(np.argmin([*right, False]))
                policy.record(each, limits[each], count)
            num_accepted += count
            each.token_ids += [0] * (1 + count)
            if each.num_tokens - 40 >= self.output:
                self.requests.remove(each)
                policy.forget(each.request_id)
        seconds = 0.004 * one_row * (1 + extra)
        drafted = list(limits.values())
        policy.stepped(self.num_decoding, drafted, int(num_accepted), False, seconds)
        self.lost.append(self.lost[-1] + extra - num_accepted / self.num_decoding)
        self.dearest = max(self.dearest, extra)
        self.has_drafts.append(bool(limits))

    def most_lost(self) -> list[float]:
        """Beyond the allowance, from the best moment before each step on."""
        net = np.array(self.lost) - ALLOWANCE * np.arange(len(self.lost))
        return list(net - np.minimum.accumulate(net))


DRAFT = Costs(row=0.0055, draft=0.2, wait=0.08)


@pytest.mark.parametrize("output", [20, 256, 100_000])
@pytest.mark.parametrize("num_decoding", [1, 8])
@pytest.mark.parametrize("real", [0.5, 1.0, 3.0])
def test_drafts_that_fail_lose_no_more_than_is_allowed(
    output: int, num_decoding: int, real: float
) -> None:
    clock = Clock(made(8, 64, DRAFT, looks_up=False), real, output, num_decoding)
    for _ in range(5000):
        clock.step(0.0)
    # What is invested is paid for later, and one step more may go wrong.
    assert max(clock.most_lost()) <= FIRST_BALANCE + 2 * clock.dearest
    assert clock.lost[-1] <= FIRST_BALANCE + 2 * clock.dearest + ALLOWANCE * 5000
    assert sum(clock.has_drafts) > 5  # now and then it is tried


@pytest.mark.parametrize("seed", range(4))
def test_text_that_changes_loses_no_more_than_is_allowed(seed: int) -> None:
    """Phases of text that suits the draft model and of text that does not."""
    clock = Clock(made(8, 64, DRAFT, looks_up=False), 1.0, 100)
    random = np.random.default_rng(seed)
    while len(clock.lost) < 6000:
        agreement = float(random.choice([0.0, 0.3, 0.6, 0.9]))
        for _ in range(int(random.integers(1, 300))):
            clock.step(agreement)
    assert max(clock.most_lost()) <= MOST_BALANCE + 2 * clock.dearest + 1
    assert clock.lost[-1] < 0  # on the whole they pay


def test_a_draft_model_that_agrees_again_is_used_again() -> None:
    clock = Clock(made(8, 64, DRAFT, looks_up=False), 1.0, 100_000)
    for _ in range(2000):
        clock.step(0.0)
    assert not any(clock.has_drafts[-50:-40])
    before, found = clock.lost[-1], len(clock.has_drafts)
    for _ in range(1000):
        clock.step(0.9)
    assert any(clock.has_drafts[found : found + 300])
    assert sum(clock.has_drafts[-500:]) > 400
    assert before - clock.lost[-1] > 700


def test_a_draft_model_as_dear_as_the_model_is_given_up_however_well_it_agrees() -> None:
    clock = Clock(made(8, 64, DRAFT, looks_up=False), 5.0, 256)
    for _ in range(3000):
        clock.step(0.95)
    assert clock.policy.costs == DRAFT
    assert max(clock.most_lost()) <= FIRST_BALANCE + 2 * clock.dearest
    assert sum(clock.has_drafts[-1000:]) < 20


def test_few_long_steps_are_excused() -> None:
    """As where a graph is recorded for each shape of drafts."""
    policy = made(8, 64, DRAFT, looks_up=False)
    before = policy.balance
    for _ in range(MOST_EXCUSES):
        policy.stepped(1, [1], 1, False, 0.5)
    assert policy.balance >= before
    policy.stepped(1, [1], 1, False, 0.5)
    policy.stepped(1, [1], 1, False, 0.5)
    assert policy.balance == -MOST_BALANCE


def test_a_pause_is_excused_where_costs_are_known() -> None:
    """As of a garbage collection, seven steps long, amid drafts that pay."""
    clock = Clock(made(8, 64, DRAFT, looks_up=False), 1.0, 100_000)
    for _ in range(200):
        clock.step(0.7)
    assert sum(clock.has_drafts[-50:]) > 40
    policy = clock.policy
    balance = policy.balance
    policy.stepped(1, [4], 4, False, 8 * 0.004)
    assert policy.balance >= balance
    # Costs that are far from what they were taken to be are learned, as long as none is known.
    fresh = made(8, 64, DRAFT, looks_up=False)
    for _ in range(20):
        fresh.stepped(1, [], 0, False, 0.004)
    fresh.stepped(1, [4], 4, False, 6 * 0.004)
    assert fresh.balance < 2
