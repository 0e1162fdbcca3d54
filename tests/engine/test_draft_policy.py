"""How many drafts there are: as many as pay, and what they lose is bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from predict.engine.draft_policy import ALLOWANCE, BALANCE, DraftPolicy
from predict.engine.guesses import LONGEST_REST
from predict.engine.request_state import Request
from predict.request import SamplingParams


def request(number: int = 0, prompt: int = 1) -> Request:
    made = Request(number, list(range(prompt)), SamplingParams())
    made.max_num_tokens = 1 << 20
    return made


class Clock:
    """Steps of a proposer whose drafts are right with a probability, in time made up.

    row, draft: what one more row takes, and a step of the draft model, in steps without drafts.
    """

    def __init__(self, row: float, draft: float, num_decoding: int = 1, most: int = 8):
        self.policy = DraftPolicy(most, 64, looks_up=False)
        self.row, self.draft = row, draft
        self.requests = [request(number) for number in range(num_decoding)]
        self.random = np.random.default_rng(0)
        self.lost = 0.0  # steps, the tokens gained taken off
        self.lengths: list[int] = []

    def run(self, num_steps: int, right: float) -> None:
        policy, size = self.policy, len(self.requests)
        for _ in range(num_steps):
            limits = policy.limits(self.requests, on_way=False)
            found = [int(np.argmin([*(self.random.random(k) < right), 0])) for k in limits.values()]
            for each, count in zip(limits, found, strict=True):
                policy.record(each, limits[each], count)
            longest = max(limits.values(), default=0)
            extra = self.row * sum(limits.values()) + self.draft * longest
            drafts = [*limits.values()]
            policy.stepped(size, drafts, sum(found), False, 0.004 * (1 + extra))
            self.lost += extra - sum(found) / size
            self.lengths.append(longest)


def test_drafts_get_shorter_as_they_fail_and_longer_as_they_succeed() -> None:
    clock = Clock(0.02, 0.02)
    found = []
    for right in (0.95, 0.6, 0.2, 0.95):
        clock.run(400, right)
        found.append(float(np.mean(clock.lengths[-100:])))
    assert found[0] > 6
    assert found[0] > found[1] > found[2]
    assert found[3] > 6


def test_drafts_get_shorter_in_batches_and_where_drafting_costs() -> None:
    alone, many, costly = Clock(0.02, 0.0), Clock(0.02, 0.0, 8), Clock(0.02, 0.3)
    for clock in (alone, many, costly):
        clock.run(500, 0.8)
    means = [float(np.mean(clock.lengths[-100:])) for clock in (alone, many, costly)]
    assert means[0] > max(means[1:])
    assert min(means[1:]) >= 1


def test_one_number_serves_all_requests_and_rows_are_bounded() -> None:
    clock = Clock(0.001, 0.0, 16)
    clock.run(300, 0.9)
    limits = clock.policy.limits(clock.requests, on_way=False)
    assert set(limits.values()) == {64 // 16}


def test_there_are_no_drafts_before_steps_without_them_were_timed() -> None:
    policy, one = DraftPolicy(8, 64, looks_up=False), request()
    policy.stepped(1, [], 0, False, 0.0)  # with a prompt in it
    for _ in range(2):
        assert policy.limits([one], on_way=False) == {}
        policy.stepped(1, [], 0, False, 0.004)
    assert policy.limits([one], on_way=False) == {one: 1}


def test_drafts_end_with_their_request() -> None:
    clock = Clock(0.01, 0.0)
    clock.run(200, 1.0)
    (one,) = clock.requests
    for left in (4, 1):
        one.max_num_tokens = one.num_tokens + left
        limits = clock.policy.limits([one], on_way=False)
        assert limits == ({one: left - 1} if left > 1 else {})


@pytest.mark.parametrize("num_decoding", [1, 8])
@pytest.mark.parametrize("draft", [0.04, 0.2, 1.5])
def test_drafts_that_fail_lose_no_more_than_is_allowed(num_decoding: int, draft: float) -> None:
    clock = Clock(0.01, draft, num_decoding)
    clock.run(5000, 0.0)
    assert clock.lost <= BALANCE + ALLOWANCE * 5000 + 2 * draft
    assert sum(clock.lengths) > 5  # now and then it is tried


@pytest.mark.parametrize("seed", range(3))
def test_text_that_changes_gains_on_the_whole(seed: int) -> None:
    clock, random = Clock(0.0055, 0.2), np.random.default_rng(seed)
    while len(clock.lengths) < 6000:
        clock.run(int(random.integers(1, 300)), float(random.choice([0.0, 0.3, 0.6, 0.9])))
    assert clock.lost < 0


def test_a_draft_model_that_agrees_again_is_used_again() -> None:
    clock = Clock(0.0055, 0.2)
    clock.run(2000, 0.0)
    before = clock.lost
    clock.run(1000, 0.9)
    assert np.mean(np.array(clock.lengths[-500:]) > 0) > 0.8
    assert before - clock.lost > 700


@pytest.mark.parametrize("num_slow", [2, 6])
def test_the_first_steps_of_a_length_do_not_end_longer_ones(num_slow: int) -> None:
    """As steps that run before a graph of their size is recorded, at twice the time."""
    policy, one = DraftPolicy(4, 64, looks_up=False), request()
    random, met = np.random.default_rng(0), Counter[int]()
    lengths: list[int] = []
    for step in range(400):
        # Each fifth one has room for two.
        one.max_num_tokens = one.num_tokens + (3 if step % 5 == 0 else 100)
        length = policy.limits([one], on_way=False).get(one, 0)
        count = int(np.argmin([*(random.random(length) < 0.75), 0]))
        if length:
            policy.record(one, length, count)
        met[length] += 1
        seconds = 0.004 * (1 + 0.05 * length) + 0.003 * (length > 0 and met[length] <= num_slow)
        policy.stepped(1, [length] if length else [], count, False, seconds)
        lengths.append(length)
    assert np.mean([each for step, each in enumerate(lengths[200:]) if step % 5]) > 3.5


def test_slow_first_steps_without_drafts_do_not_speak_for_drafts() -> None:
    """Where the first steps run before a graph is recorded, and all of them wait for a head."""
    policy, one = DraftPolicy(4, 64, looks_up=False), request()
    random, lengths = np.random.default_rng(0), list[int]()
    for step in range(300):
        length = policy.limits([one], on_way=False).get(one, 0) if step % 20 else 0
        count = int(np.argmin([*(random.random(length) < 0.75), 0]))
        if length:
            policy.record(one, length, count)
        seconds = 0.018 if length else 0.02 if step < 3 else 0.0057
        policy.stepped(1, [length] if length else [], count, True, seconds, 0.0007)
        lengths.append(length)
    assert np.mean(lengths[100:]) < 0.5


def test_one_long_step_does_not_end_drafts_that_pay() -> None:
    """As of a garbage collection."""
    clock = Clock(0.0055, 0.1)
    clock.run(300, 0.8)
    clock.policy.stepped(1, [4], 4, False, 0.2)
    clock.run(30, 0.8)
    assert min(clock.lengths[-30:]) > 0


class Text:
    """Decodes a request token by token as an engine that runs `num_ahead` steps ahead does.

    A stand-in for a proposer guesses `guess_of(place)`: what it takes the next tokens to be.
    """

    def __init__(self, token_of: Callable[[int], int], guess_of: Callable[[int], int]):
        self.policy, self.request = DraftPolicy(8, 64, looks_up=True), request()
        self.token_of, self.guess_of = token_of, guess_of
        self.drafted: list[int] = []  # tokens of the request at steps that had drafts
        self.lost = 0.0

    def step(self, ahead: bool) -> None:
        policy, one = self.policy, self.request
        waited = ahead and bool(policy.limits([one], on_way=True))
        if ahead:  # the token on its way comes
            self.come([self.token_of(one.num_tokens)])
        limits = policy.limits([one], on_way=False) if waited or not ahead else {}
        drafts = list(policy.guess(one, limits[one])) if limits else []
        place = one.num_tokens
        right = [self.token_of(place + index) for index in range(len(drafts) + 1)]
        count = next((i for i, token in enumerate(drafts) if token != right[i]), len(drafts))
        if drafts:
            policy.record(one, len(drafts), count)
            self.drafted.append(place)
        if drafts or not ahead:
            self.come(right[: count + 1])
        extra = 0.04 * len(drafts) + 0.08 * waited
        policy.stepped(1, [len(drafts)] if drafts else [], count, waited, 0.004 * (1 + extra))
        self.lost += extra - count

    def come(self, tokens: list[int]) -> None:
        policy, one = self.policy, self.request
        one.token_ids += tokens
        if policy.follow(one):
            policy.guessed(one, [self.guess_of(one.num_tokens + i) for i in range(8)])


@pytest.mark.parametrize("ahead", [False, True])
def test_guesses_that_fail_cost_what_is_allowed(ahead: bool) -> None:
    text = Text(lambda place: place, lambda place: -place)
    for _ in range(2000):
        text.step(ahead)
    assert text.lost <= BALANCE + ALLOWANCE * 2000 + 1


@pytest.mark.parametrize("ahead", [False, True])
def test_guesses_that_come_true_become_drafts_within_a_few_tokens(ahead: bool) -> None:
    text = Text(lambda place: place, lambda place: place if place >= 500 else -place)
    while text.request.num_tokens < 600:
        text.step(ahead)
    recent = [place for place in text.drafted if place >= 500]
    assert recent
    assert recent[0] <= 500 + 2 * LONGEST_REST
    assert text.lost < -30
