"""How many drafts the requests of a step have: as many as are likely to pay."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

LONGEST_REST = 64  # steps
LONGEST_MISS = 8
NUM_TIMES = 9  # measured ones that count: their median
MISS_DECAY = 0.7  # of the chance that there is a draft to try, per step without one
DECAY = 0.85  # of a step's weight in the acceptance, per step with drafts
FIRST_RIGHT, FIRST_WRONG = 2.0, 0.5  # drafts that a new request is taken to have had


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What drafts cost, as parts of a decode step of one row."""

    row: float  # of one more row in a step
    draft: float = 0.0  # of one step of the draft model, until it is measured
    # Where steps run ahead without drafts: for the tokens before the next step, at batch 1, and
    # more for each request.
    wait: float = 0.0
    wait_each: float = 0.0


@dataclass
class _State:
    right: float = FIRST_RIGHT
    wrong: float = FIRST_WRONG
    rest: int = 0  # steps until the next try
    next_rest: int = 0
    next_miss: int = 1
    found: float = 1.0  # the chance that there is a draft to try

    @property
    def acceptance(self) -> float:
        """The chance that a draft behind right ones is right."""
        return min(max(self.right / (self.right + self.wrong), 0.001), 0.995)


class DraftPolicy:
    """Chooses lengths by each request's acceptance, and by what rows and drafts cost.

    With acceptance a, the k-th draft yields a^k tokens. It is worth its row, and its share of a
    step of the draft model, as long as that is more than they would yield otherwise: so drafts get
    shorter as acceptance falls and as batches grow. Where all drafts together do not pay, there are
    none but for a try every LONGEST_REST steps. A request of whose drafts none was right several
    times in a row rests, twice as long each time, so that text without repetition costs next to
    nothing.
    """

    def __init__(self, max_length: int, max_rows: int, costs: Costs):
        """max_length: drafts of one request. max_rows: drafts of a step."""
        self.max_length = max_length
        self.max_rows = max_rows
        self.costs = costs
        # Of the last decode steps, and of a draft in the last proposals; in seconds.
        self._step_times: deque[float] = deque(maxlen=NUM_TIMES)
        self._draft_times: deque[float] = deque(maxlen=NUM_TIMES)
        self._states: dict[int, _State] = {}
        self._num_idle = 0  # steps since the last drafts, or the last try to find some

    def is_resting(self, request_id: int) -> bool:
        """Whether the request has no drafts in the next step."""
        state = self._states.get(request_id)
        return state is not None and state.rest > 0

    def stepped(self, request_ids: Sequence[int], has_drafts: bool) -> None:
        """Counts a step that these requests were in."""
        self._num_idle = 0 if has_drafts else self._num_idle + 1
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is not None and state.rest > 0:
                state.rest -= 1

    def lengths(self, request_ids: Sequence[int], num_decoding: int) -> list[int]:
        """Drafts to ask for, of each of these requests, in a step with so many decoding ones."""
        if not request_ids:
            return []
        states = [self._state(request_id) for request_id in request_ids]
        rates = [state.acceptance for state in states]
        chances = [state.found for state in states]
        costs = self.costs
        step = 1 + costs.row * num_decoding
        # Tokens that a draft's row and its share of the draft model's step stand for.
        price = (costs.row * num_decoding + costs.draft * num_decoding / max(len(rates), 1)) / step
        lengths = self._worthwhile(rates, price)
        speed_up = self._speed_up(rates, chances, lengths, num_decoding)
        if speed_up > 1.0:  # then a step's time is worth more, too
            lengths = self._worthwhile(rates, min(price * speed_up, 0.99))
        elif self._num_idle < LONGEST_REST:
            return [0] * len(rates)
        if sum(lengths) > self.max_rows:
            share = self.max_rows // len(lengths)
            lengths = [min(length, share) for length in lengths]
        return lengths

    def _worthwhile(self, rates: Sequence[float], price: float) -> list[int]:
        """For each acceptance the most drafts of which the last yields more than `price` tokens."""
        most = math.log(max(price, 1e-6))
        return [min(max(int(most / math.log(rate)), 1), self.max_length) for rate in rates]

    def _speed_up(
        self,
        rates: Sequence[float],
        chances: Sequence[float],
        lengths: Sequence[int],
        num_decoding: int,
    ) -> float:
        """Tokens per time with these drafts, over those without."""
        gain = sum(
            chance * rate * (1 - rate**length) / (1 - rate)
            for rate, chance, length in zip(rates, chances, lengths, strict=True)
        )
        costs = self.costs
        extra = costs.row * sum(lengths) + costs.draft * max(lengths, default=0)
        extra += costs.wait + costs.wait_each * num_decoding
        return (1 + gain / num_decoding) / (1 + extra / (1 + costs.row * num_decoding))

    def time_step(self, seconds: float) -> None:
        """Takes in what a decode step took."""
        self._step_times.append(seconds)

    def time_drafts(self, seconds: float, num_drafts: int) -> None:
        """Takes in what a proposal of so many drafts took; the draft model's cost follows."""
        self._draft_times.append(seconds / num_drafts)
        if self.costs.draft and len(self._draft_times) == len(self._step_times) == NUM_TIMES:
            ratio = statistics.median(self._draft_times) / statistics.median(self._step_times)
            self.costs = replace(self.costs, draft=ratio)

    def missed(self, request_id: int) -> None:
        """The request had no draft to try: it rests, a little longer each time in a row.

        For engines that run ahead, which a request that may have drafts stops.
        """
        state = self._state(request_id)
        state.found *= MISS_DECAY
        self._num_idle = 0
        state.rest = state.next_miss + 1  # the step that it has none in is counted too
        state.next_miss = min(2 * state.next_miss, LONGEST_MISS)

    def record(self, request_id: int, num_drafts: int, num_accepted: int) -> None:
        """The outcome of a step with drafts."""
        state = self._state(request_id)
        state.right = DECAY * state.right + num_accepted
        state.wrong = DECAY * state.wrong + (num_accepted < num_drafts)
        state.next_miss = 1
        state.found = 1 - MISS_DECAY * (1 - state.found)
        if num_accepted:
            state.next_rest = 0
        else:
            state.rest = state.next_rest
            state.next_rest = min(max(2 * state.next_rest, 1), LONGEST_REST)

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        self._states.pop(request_id, None)

    def _state(self, request_id: int) -> _State:
        return self._states.setdefault(request_id, _State())
