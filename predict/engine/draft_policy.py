"""Number of drafts in a step: the one that brings the most tokens in the time that it takes."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from predict.engine.guesses import Guess
from predict.engine.request_state import Request
from predict.nn.inputs import bucket_size

LENGTHS = (1, 2, 3, 4, 5, 7, 10)  # drafts of a request, below the most
LEARNING = 0.1  # least weight of a step's outcomes in the chance that a draft is right
NUM_TIMES = 7  # last ones of a kind of step that count; with drafts, the first that do
ALLOWANCE = 0.0075  # of a step, what drafts may lose in each
BALANCE = 2.0  # steps that they may lose besides, and twice that where they seem to pay


class DraftPolicy:
    """Chooses one number of drafts for all requests of a step; of look-ups, for those that found.

    It has the most tokens per second, by the share of right drafts at each place behind right ones
    and by the time of steps with so many requests and drafts; each length is timed before the next
    one is tried. Where none pays, one request has a draft while the balance, in steps, is above 0:
    tokens gained add to it, time lost comes off. Guesses of look-ups are compared with the tokens
    that follow, verified or not, and their rest is drafted.
    """

    def __init__(self, max_length: int, max_rows: int, looks_up: bool):
        """max_length: drafts of one request. max_rows: drafts of a step. looks_up: see Proposer."""
        self.max_length, self.max_rows, self.looks_up = max_length, max_rows, looks_up
        self.balance, self.rates = BALANCE, [0.0]  # by place; later ones are as the last
        self.lost = 0.0  # steps, by drafts and by the drafter's work without any; tokens gained off
        self._num_seen = defaultdict[int, int](int)  # drafts, by place
        self._num_able = 1  # requests that could have had drafts in the last step
        # By requests: by drafts of one, and requests that have some; counts are rounded up.
        self._seconds = defaultdict[int, dict[tuple[int, int], float]](dict)
        self._times = defaultdict[object, deque[float]](lambda: deque(maxlen=NUM_TIMES))
        self._guesses = defaultdict[int, Guess](Guess)

    def limits(self, requests: Sequence[Request], on_way: bool) -> dict[Request, int]:
        """Drafts of each request that is to have some. on_way: they wait for a step that runs."""
        able: dict[Request, tuple[int, int]] = {}  # the first draft's place, and drafts at most
        for request in requests:
            # A step with drafts yields one token more than there are drafts.
            place, room = 0, request.max_num_tokens - request.num_tokens - 1
            if self.looks_up:
                guess = self._guesses[request.request_id]
                place = guess.num_right + on_way
                room = min(room, len(guess.token_ids) - place)
            if room > 0:
                able[request] = place, min(room, self.max_length)
        if not able or self.balance <= -BALANCE or not self._seconds[bucket_size(len(requests))]:
            return {}
        length = self._length(list(able.values()), len(requests), on_way)
        if not length and self.balance > 0:
            able, length = dict([*able.items()][:1]), 1
        self._num_able = len(able)
        return {each: min(length, room) for each, (_, room) in able.items()} if length else {}

    def _length(self, able: Sequence[tuple[int, int]], num_decoding: int, on_way: bool) -> int:
        known, drafting = self._seconds[bucket_size(num_decoding)], bucket_size(len(able))
        most = min(self.max_rows // len(able), max(room for _, room in able))
        best, found, plain = 1.0, 0, known[0, 0]
        for length in (*(each for each in LENGTHS if each < most), most):
            fewer = (s for (a, b), s in known.items() if a <= length and b <= drafting)
            seconds = known.get((length, drafting)) or max(fewer)
            gains = sum(self._gain(*each, length, on_way) for each in able)
            if (gain := (1 + gains / num_decoding) * plain / seconds) > best:
                best, found = gain, length
            if (length, drafting) not in known:
                break
        return found

    def _gain(self, place: int, room: int, length: int, on_way: bool) -> float:
        """Tokens that drafts from this place on add to a request's next step."""
        start, last = max(place - on_way, 0), len(self.rates) - 1
        places = range(start, place + min(length, room))
        chances = accumulate((self.rates[min(each, last)] for each in places), mul)
        return sum([*chances][place - start :])

    def guess(self, request: Request, limit: int) -> Sequence[int]:
        """The rest of a request's guess, as drafts."""
        guess = self._guesses[request.request_id]
        return guess.token_ids[guess.num_right :][:limit]

    def follow(self, request: Request) -> bool:
        """Compares the request's guess with its new tokens; returns whether it needs another."""
        guess = self._guesses[request.request_id]
        for place, right in guess.compared(request):
            self._learn(place, right)
        return guess.is_wanted

    def guessed(self, request: Request, token_ids: Sequence[int]) -> None:
        """Stores a new guess, in the place of one that is over; empty where there is none."""
        self._guesses[request.request_id].put(token_ids)

    def record(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Stores the outcome of a verification, before the tokens are added to the request."""
        guess = self._guesses[request.request_id]
        for index in range(min(num_accepted + 1, num_drafts)):
            self._learn(guess.num_right + index, index < num_accepted)
        guess.num_right += num_accepted
        guess.put(())

    def stepped(
        self,
        size: int,
        lengths: Sequence[int],
        num_accepted: int,
        waited: bool,
        seconds: float,
        own: float = 0.0,
    ) -> None:
        """Updates balance, losses and times by a step of `size` decoding requests.

        lengths: of its drafts. waited: it could not run ahead. seconds: 0 where they say nothing.
        own: those of them in which the drafter worked: no part of what a plain step takes.
        """
        known, longest = self._seconds[bucket_size(size)], max(lengths, default=0)
        self.balance += ALLOWANCE
        if known and seconds:
            cost = seconds / known[0, 0] - 1 if lengths or waited else own / known[0, 0]
            # What takes longer than all that the drafts stand for is something else.
            lost = min(cost, 1 + longest) - num_accepted / size
            if lengths or own:
                self.lost = max(self.lost + lost, 0.0)
            if lengths or (waited and not own):
                self.balance -= lost
        self.balance = min(max(self.balance, -BALANCE), BALANCE)
        kind = longest, bucket_size(len(lengths)) if lengths else 0
        # Where steps run ahead, only what reads no states is a plain one; others take no less.
        if seconds and (lengths or not waited or own):
            times = self._times[bucket_size(size), kind]
            times.append(seconds if lengths else seconds - own)
            # The first are slow, until graphs are recorded, and no length is timed again for them.
            if len(times) >= (NUM_TIMES if longest else 2) and (known or not longest):
                known[kind] = min([*times, known[kind]] if own and known and not longest else times)

    def forget(self, request_id: int) -> None:
        """Drops the state of an ended request."""
        self._guesses.pop(request_id, None)

    def _learn(self, place: int, right: bool) -> None:
        self.rates += [self.rates[-1]] * (place + 1 - len(self.rates))
        self._num_seen[place] += 1
        weight = max(LEARNING / self._num_able, 1 / (1 + self._num_seen[place]))
        self.rates[place] += weight * (right - self.rates[place])
