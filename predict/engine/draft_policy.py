"""Number of drafts of each request in a step: as many as are likely to pay."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from predict.engine.request_state import Request

DECAY = 0.85  # of a guess's weight in a request's acceptance, per guess
DECAY_OF_ALL = 0.9  # likewise in the acceptance of all requests
FIRST_RIGHT, FIRST_WRONG = 1.0, 1.0  # guesses that an engine starts with
PRIOR_WEIGHT = 2.5  # weight of all requests' acceptance in one request's, in guesses
FOUND_DECAY = 0.7  # of the chance that a look-up finds something, per look-up
MANY_VAIN = 4  # look-ups in a row without a right token, after which look-ups rest
# Steps of a rest: REST more after each further vain look-up, up to LONGEST_REST. A draft model that
# does not pay rests for REST steps.
REST, LONGEST_REST = 3, 12
LEAST_CHANCE = 0.05  # of drafts to wait for
LEAST_SPEED_UP = 1.02
# What drafts may lose: a share of all steps, and a number of steps at the start or after they paid.
ALLOWANCE = 0.0075
FIRST_BALANCE, MOST_BALANCE = 2.0, 6.0
MOST_ON_TRIAL = 8  # requests
FEW_MISSING = 32  # tokens that a draft model catches up with by the way
FEW_OUTCOMES = 8  # of drafts: acceptance is a guess
INVESTED = 64  # steps over which what a draft model missed is paid for
NUM_TIMES, FEWEST_TIMES = 15, 5  # measured ones that count: their median
# Steps whose time is ignored since drafts cannot explain it (they loaded kernels, say), and whose
# expected cost counts instead; one more every 1 / ALLOWANCE steps.
MOST_EXCUSES = 32
FAR, FAR_AT_FIRST = (3.0, 1.0), (8.0, 2.0)  # times what was expected, and steps beyond


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of drafts, as fractions of a decode step of one row."""

    row: float  # of one more row in a step
    draft: float = 0.0  # of one step of the draft model
    # Where steps run ahead without drafts: the wait for tokens at batch 1, and for each request.
    wait: float = 0.0
    wait_each: float = 0.0


@dataclass
class _State:
    found: float  # the chance that a look-up finds something
    right: float = 0.0
    wrong: float = 0.0
    guess: Sequence[int] = ()
    num_right: int = 0  # tokens of the guess that came
    num_seen: int = 0  # tokens of the request that were compared
    num_vain: int = 0  # look-ups in a row without a right token
    rest: int = 0  # steps until the next look-up
    num_drafted: int = 0  # tokens of the request that a draft model has in its cache


def _rest_of(state: _State) -> int:
    return min(max(state.num_vain - MANY_VAIN + 1, 0) * REST, LONGEST_REST)


class _Bet(NamedTuple):
    """A request that may have drafts."""

    request: Request
    rate: float  # the chance that a draft behind right ones is right
    chance: float  # that there are drafts
    room: int  # drafts at most
    missing: int  # tokens that a draft model has to catch up with


class DraftPolicy:
    """Chooses lengths by each request's acceptance, and by what rows and drafts cost.

    With acceptance a, the k-th draft yields a^k tokens. It is worth its row, and its share of a
    step of the draft model, as long as that is more than they would yield otherwise: so drafts get
    shorter as acceptance falls and as batches grow. Where all drafts together do not pay, there are
    none.

    Text where drafts fail costs next to nothing, for two reasons. Look-ups are free, so acceptance
    is learned from guesses without verification: a guess is compared with the tokens that follow
    anyway, and its rest becomes drafts once its first tokens were right. And losses are counted:
    the time of a step with drafts, less that of one without and less the tokens gained, comes off
    a balance. The balance grows by ALLOWANCE of a step per step, and without balance there are no
    drafts. A draft model, whose guesses are not free, is tried when the balance covers a trial.

    A new request starts with the acceptance of all requests.
    """

    def __init__(
        self,
        max_length: int,
        max_rows: int,
        costs: Costs,
        looks_up: bool,
        catches_up: bool = True,
    ):
        """max_length: drafts of one request. max_rows: drafts of a step.

        looks_up: see Proposer. catches_up: whether a proposer that does not has a request's earlier
        tokens to compute.
        """
        self.catches_up = catches_up
        self.max_length = max_length
        self.max_rows = max_rows
        self.costs = costs
        self.looks_up = looks_up
        self.balance = FIRST_BALANCE  # steps
        self._debt = 0.0  # steps that come off the balance later
        self._num_excuses = float(MOST_EXCUSES)
        self._step_times: deque[float] = deque(maxlen=NUM_TIMES)  # seconds of one row, no drafts
        self._ratios: deque[float] = deque(maxlen=NUM_TIMES)  # of measured costs and `costs`
        self._scale = 1.0  # their median
        self._states: dict[int, _State] = {}
        self._right, self._wrong, self._found = FIRST_RIGHT, FIRST_WRONG, 0.0  # of all requests
        self._num_outcomes = 0
        self._rest = 0  # steps until it is computed again whether drafts pay
        self._num_missing = 0  # tokens that the draft model catches up with in this step

    def limits(self, requests: Sequence[Request], on_way: bool) -> dict[Request, int]:
        """Numbers of drafts in the next step, of those decoding requests that are to have some.

        on_way: a step runs whose tokens the drafts would have to wait for.
        """
        if not on_way:
            self._num_missing = 0
        if self.balance <= 0 or len(self._step_times) < FEWEST_TIMES:
            return {}
        if self.looks_up and not on_way and not any(s.guess for s in self._states.values()):
            return {}  # the most common case in text that does not repeat itself
        if self._rest > 0:
            self._rest -= 1
            return {}
        bets = [bet for bet in (self._bet(request, on_way) for request in requests) if bet]
        if not self.looks_up:
            bets = self._affordable(bets, len(requests))
        if not bets:
            return {}
        lengths, speed_up = self._lengths(bets, len(requests), 1.0)
        if speed_up > LEAST_SPEED_UP:  # then a step's time is worth more, too
            lengths, _ = self._lengths(bets, len(requests), speed_up)
        else:
            lengths = [0] * len(bets) if self.looks_up else self._trial(bets, len(requests))
        if sum(lengths) > self.max_rows:
            share = self.max_rows // len(lengths)
            lengths = [min(length, share) for length in lengths]
        if not self.looks_up and not any(lengths):
            self._rest = REST  # little changes from step to step
        limits: dict[Request, int] = {}
        for bet, length in zip(bets, lengths, strict=True):
            if length > 0:
                limits[bet.request] = length
                if not on_way:
                    self._num_missing += bet.missing
                    self._state(bet.request).num_drafted = bet.request.num_tokens
        return limits

    def guess(self, request: Request, limit: int) -> Sequence[int]:
        """The rest of a request's guess, as drafts."""
        state = self._state(request)
        return state.guess[state.num_right : state.num_right + limit]

    def follow(self, request: Request) -> bool:
        """Compares the request's guess with its new tokens; returns whether it needs another."""
        state, num_tokens = self._state(request), request.num_known_tokens
        if not state.guess:
            resting = state.rest > 0
            state.rest -= resting
            return not resting
        new = request.token_ids[state.num_seen : num_tokens]
        state.num_seen = num_tokens
        for token in new:
            right = token == state.guess[state.num_right]
            state.num_right += right
            state.right += right
            state.wrong += not right
            if right:
                state.num_vain = 0
            if not right or state.num_right == len(state.guess):
                self._learn(state.num_right, not right)
                state.guess = ()
                state.rest = _rest_of(state)
                return state.rest == 0
        self._count_look_up(state, True)
        return False

    def guessed(self, request: Request, guess: Sequence[int]) -> None:
        """Stores a new guess; empty where the look-up found nothing."""
        state = self._state(request)
        state.guess, state.num_right, state.num_seen = guess, 0, request.num_known_tokens
        state.num_vain += 1
        state.rest = 0 if guess else _rest_of(state)
        self._count_look_up(state, bool(guess))
        if guess:
            state.right *= DECAY
            state.wrong *= DECAY

    def record(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Stores the outcome of a verification, before the tokens are added to the request."""
        state = self._state(request)
        failed = num_accepted < num_drafts
        if not state.guess:
            state.right *= DECAY
            state.wrong *= DECAY
        state.right += num_accepted
        state.wrong += failed
        state.guess = ()
        if num_accepted:
            state.num_vain = 0
        state.rest = _rest_of(state)
        self._learn(state.num_right + num_accepted, failed)
        state.num_right = 0

    def stepped(
        self,
        num_decoding: int,
        lengths: Sequence[int],
        num_accepted: int,
        waited: bool,
        seconds: float | None,
    ) -> None:
        """Updates balance and costs with the time and the accepted drafts of a step.

        lengths: of its drafts. waited: it could not run ahead. seconds: since the previous step's
        end; None for a step with prompts, or in which a graph was recorded.
        """
        if self._num_excuses < MOST_EXCUSES:
            self._num_excuses += ALLOWANCE
        change = ALLOWANCE
        if self._debt:
            repaid = self._debt / INVESTED
            self._debt -= repaid
            change -= repaid
        one_row = 1 + self.costs.row * num_decoding
        if lengths or (waited and seconds is not None):
            cost = self._extra(lengths, num_decoding)
            catch_up = self._catch_up(self._num_missing, num_decoding) if lengths else 0.0
            if seconds is not None and len(self._step_times) >= FEWEST_TIMES:
                extra = seconds / (statistics.median(self._step_times) * one_row) - 1
                times, beyond = FAR if len(self._ratios) >= FEWEST_TIMES else FAR_AT_FIRST
                if extra > times * (cost + catch_up) + beyond and self._num_excuses >= 1:
                    self._num_excuses -= 1
                elif catch_up > cost / 2:
                    catch_up = max(extra - cost, 0.0)
                else:
                    self._rate_costs(extra, cost + catch_up)
                    cost = max(extra - catch_up, 0.0)
            self._debt += catch_up
            change += num_accepted / num_decoding - cost
        elif seconds is not None:
            self._step_times.append(seconds / one_row)
        self.balance = min(max(self.balance + change, -MOST_BALANCE), MOST_BALANCE)

    def forget(self, request_id: int) -> None:
        """Drops the state of an ended request."""
        self._states.pop(request_id, None)

    @property
    def acceptance(self) -> float:
        """The chance that a draft of a new request is right after right drafts."""
        return self._right / (self._right + self._wrong)

    def _bet(self, request: Request, on_way: bool) -> _Bet | None:
        """The request's chances; None where drafts are unlikely."""
        state = self._state(request)
        left = len(state.guess) - state.num_right
        if self.looks_up and not (left or (on_way and state.found > LEAST_CHANCE)):
            return None
        # A step with drafts yields one token more than there are drafts.
        room = min(self.max_length, request.max_num_tokens - request.num_tokens - 1)
        if self.looks_up and not on_way:
            room = min(room, left)
        if room <= 0:
            return None
        rate = (state.right + PRIOR_WEIGHT * self.acceptance) / (
            state.right + state.wrong + PRIOR_WEIGHT
        )
        rate = min(max(rate, 0.001), 0.995)
        if not self.looks_up:
            missing = request.num_tokens - state.num_drafted if self.catches_up else 0
            return _Bet(request, rate, 1.0, room, missing)
        chance = 1.0
        if on_way:
            chance = rate + (1 - rate) * state.found if left else state.found
        return _Bet(request, rate, chance, room, 0)

    def _affordable(self, bets: Sequence[_Bet], num_decoding: int) -> list[_Bet]:
        """Leaves out requests whose missing tokens in the draft model cost more than allowed."""
        proven = self._num_outcomes >= FEW_OUTCOMES
        left = (MOST_BALANCE if proven else self.balance) - self._debt
        kept: list[_Bet] = []
        for bet in bets:
            if bet.missing > FEW_MISSING:
                cost = self._catch_up(bet.missing, num_decoding)
                if left < min(cost, MOST_BALANCE / 2):
                    continue
                left -= cost
            kept.append(bet)
        return kept

    def _lengths(
        self, bets: Sequence[_Bet], num_decoding: int, worth: float
    ) -> tuple[list[int], float]:
        """The best lengths, and the speed-up that they give.

        worth: value of a step's time, in the tokens that it yields without drafts.
        """
        costs = self.costs
        one_row = 1 + costs.row * num_decoding
        row, step = self._scale * costs.row / one_row, self._scale * costs.draft / one_row
        missing = sum(
            bet.missing / min(bet.request.max_num_tokens - bet.request.num_tokens, INVESTED)
            for bet in bets
        )
        cost = 1 + self._extra((), num_decoding) + self._catch_up(missing, num_decoding)
        tokens, best, depth = 1.0, 1.0, 0
        lengths = [0] * len(bets)
        right = [1.0] * len(bets)  # the chance that all drafts so far are
        active = list(range(len(bets)))
        for count in range(1, self.max_length + 1):
            going_on: list[int] = []
            for index in active:
                bet = bets[index]
                right[index] *= bet.rate
                if count <= bet.room and right[index] > row * num_decoding * worth:
                    going_on.append(index)
                    lengths[index] = count
                    tokens += bet.chance * right[index] / num_decoding
            if not going_on:
                break
            active = going_on
            cost += step + row * len(active)
            if tokens / cost > best:
                best, depth = tokens / cost, count
        return [min(length, depth) for length in lengths], best

    def _trial(self, bets: Sequence[_Bet], num_decoding: int) -> list[int]:
        """One draft for as many of the likeliest requests as the balance covers."""
        lengths = [0] * len(bets)
        missing = 0
        saved = self.balance - self._debt
        order = sorted(range(len(bets)), key=lambda index: -bets[index].rate)
        for count, index in enumerate(order[:MOST_ON_TRIAL], 1):
            missing += bets[index].missing
            cost = self._extra([1] * count, num_decoding) + self._catch_up(missing, num_decoding)
            if saved < (min(cost, MOST_BALANCE / 2) if count == 1 else cost):
                break
            lengths[index] = 1
        return lengths

    def _extra(self, lengths: Sequence[int], num_decoding: int) -> float:
        """Cost in steps of drafts of these lengths, the wait included."""
        costs = self.costs
        extra = costs.row * sum(lengths) + costs.draft * max(lengths, default=0)
        extra += costs.wait + costs.wait_each * num_decoding
        return self._scale * extra / (1 + costs.row * num_decoding)

    def _catch_up(self, num_tokens: float, num_decoding: int) -> float:
        """Cost in steps of tokens that the draft model has not computed yet."""
        costs = self.costs
        return costs.draft * costs.row * num_tokens / (1 + costs.row * num_decoding)

    def _rate_costs(self, measured: float, expected: float) -> None:
        # A little on both sides: small differences are within the noise.
        ratio = (max(measured, 0.0) + 0.1) / (expected / self._scale + 0.1)
        self._ratios.append(min(max(ratio, 0.25), 8.0))
        if len(self._ratios) >= FEWEST_TIMES:
            self._scale = statistics.median(self._ratios)

    def _learn(self, num_right: int, failed: bool) -> None:
        self._num_outcomes += 1
        self._right = DECAY_OF_ALL * self._right + num_right
        self._wrong = DECAY_OF_ALL * self._wrong + failed

    def _count_look_up(self, state: _State, found: bool) -> None:
        state.found = FOUND_DECAY * state.found + (1 - FOUND_DECAY) * found
        self._found = DECAY_OF_ALL * self._found + (1 - DECAY_OF_ALL) * found

    def _state(self, request: Request) -> _State:
        state = self._states.get(request.request_id)
        if state is None:
            state = self._states[request.request_id] = _State(self._found)
        return state
