"""How sure a ratio of two sets of repetitions is: intervals that assume no shape of the noise.

Times of a program have long tails and few repetitions, so means and normal curves would say too
much. Both intervals here are exact for any continuous distribution, and there is none where the
repetitions are too few for the confidence that is asked for.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

MOST_SAMPLES = 100  # of a side: the exact distribution takes their product's time


@dataclass(frozen=True)
class Ratio:
    """How many times as much one side is as the other, and between what it lies."""

    value: float
    low: float | None  # None: too few repetitions for the confidence
    high: float | None

    def is_beyond(self, least: float) -> bool:
        """Whether the interval leaves 1 out, and the ratio is further from it than `least`.

        least: a share, the same upwards and downwards: of 0.02, above 1.02 or below 1 / 1.02.
        """
        if self.low is None or self.high is None or self.low <= 1.0 <= self.high:
            return False
        return abs(math.log(self.value)) > math.log1p(least)


def ratio_between(before: Sequence[float], after: Sequence[float], confidence: float) -> Ratio:
    """Of `after` to `before`, two sets of positive numbers that were measured apart.

    The median of all pairs' ratios (Hodges and Lehmann 1963, over logarithms), and the interval
    that goes with the rank test of Mann and Whitney (1947).
    """
    pairs = sorted(late / early for early in before for late in after)
    left_out = _rank_of_pairs(len(before), len(after), confidence)
    return _of_sorted(pairs, left_out)


def ratio_of_turns(before: Sequence[float], after: Sequence[float], confidence: float) -> Ratio:
    """Of `after` to `before`, positive numbers that were measured side by side, turn by turn.

    The median of the turns' ratios, and the interval between two of them that the sign test gives.
    """
    turns = sorted(late / early for early, late in zip(before, after, strict=True))
    return _of_sorted(turns, _rank_of_turns(len(turns), confidence))


def least_repetitions(confidence: float) -> int:
    """Of each of two sides, that give `ratio_between` an interval."""
    return next(n for n in range(1, MOST_SAMPLES) if _rank_of_pairs(n, n, confidence) is not None)


def least_turns(confidence: float) -> int:
    """That give `ratio_of_turns` an interval."""
    return next(n for n in range(1, MOST_SAMPLES) if _rank_of_turns(n, confidence) is not None)


def _of_sorted(ratios: Sequence[float], left_out: int | None) -> Ratio:
    value = statistics.median(ratios)
    if left_out is None:
        return Ratio(value, None, None)
    return Ratio(value, ratios[left_out], ratios[-1 - left_out])


@cache
def _rank_of_pairs(num_before: int, num_after: int, confidence: float) -> int | None:
    """Ratios to leave out at either end of all pairs' sorted ones; None: too few pairs."""
    counts = _orders(num_before, num_after)
    return _rank(counts, math.comb(num_before + num_after, num_before), confidence)


def _rank_of_turns(num_turns: int, confidence: float) -> int | None:
    """Ratios to leave out at either end of the turns' sorted ones; None: too few turns."""
    counts = [math.comb(num_turns, number) for number in range(num_turns + 1)]
    return _rank(counts, 2**num_turns, confidence)


def _rank(counts: Sequence[int], total: int, confidence: float) -> int | None:
    """The most that both tails of a distribution can leave out with at most 1 - confidence."""
    allowed, below, rank = (1.0 - confidence) / 2.0, 0, 0
    while rank < len(counts) and below + counts[rank] <= allowed * total:
        below += counts[rank]
        rank += 1
    return rank - 1 if rank else None


def _orders(num_before: int, num_after: int) -> list[int]:
    """How many orders of the samples have U pairs the wrong way round, for U from 0 on.

    The coefficients of the product over i of (1 - q^(num_after + i)) / (1 - q^i), i up to
    num_before: one factor at a time, exact in whole numbers.
    """
    counts = [1] + [0] * (num_before * num_after)
    for i in range(1, num_before + 1):
        for u in range(len(counts) - 1, num_after + i - 1, -1):
            counts[u] -= counts[u - num_after - i]
        for u in range(i, len(counts)):
            counts[u] += counts[u - i]
    return counts
