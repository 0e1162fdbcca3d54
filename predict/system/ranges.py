"""Ranges of numbers, the same for flags, fields of configs and files."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from predict.errors import UserError, quoted

MAX_INT32 = 2**31 - 1  # token ids, counts of tokens and top_k reach operators as int32
MAX_INT64 = 2**63 - 1  # seeds
MAX_LENGTH = 1 << 24  # tokens of a sequence, a step or a text
MAX_COUNT = 1 << 24  # of requests, repetitions, batches


def refusal(name: str, value: object, allowed: object) -> UserError:
    """The error for a value that is not allowed."""
    return UserError(f"{name} {quoted(value)} is not supported (allowed: {allowed})")


@dataclass(frozen=True)
class Range:
    """The numbers that a key may have: `low` to `high`, without `low` itself where `above`."""

    low: float
    high: float
    whole: bool = True
    above: bool = False
    words: str = ""  # for messages; "": made of the above
    or_zero: bool = False  # 0 is allowed besides

    def __contains__(self, value: object) -> bool:
        # bool is an int in Python, but never a size in a config.
        kind = numbers.Integral if self.whole else numbers.Real
        if isinstance(value, bool) or not isinstance(value, kind):
            return False
        number: Any = value
        if self.or_zero and number == 0:
            return True
        return (number > self.low if self.above else number >= self.low) and number <= self.high

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        return self.words or (
            f"{kind} {'above' if self.above else 'from'} {_shown(self.low)} to {_shown(self.high)}"
        )

    def taken(self, name: str, value: Any, suffix: str = "") -> Any:
        """`value` as Python's int or float; NumPy's numbers are taken, Fraction and True are not.

        Raises UserError that calls it `name` and says what is allowed, with `suffix` behind.
        """
        number = value
        if isinstance(value, numbers.Rational) and not isinstance(value, numbers.Integral):
            number = None
        elif isinstance(value, numbers.Real) and not (self.whole or isinstance(value, bool)):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
        if number not in self:
            raise refusal(name, value, f"{self}{suffix}")
        return int(number) if self.whole else number


def _shown(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:.15g}"


LENGTH = Range(1, MAX_LENGTH)
COUNT = Range(1, MAX_COUNT)
BATCH = Range(1, 1 << 20)
SEED = Range(0, MAX_INT64)  # reaches the sampling op as int64
SHARE = Range(0.0, 1.0, whole=False)
SHARE_ABOVE = Range(0.0, 1.0, whole=False, above=True)
SECONDS = Range(0.0, 86400.0, whole=False, above=True)

# By name, of flags that several commands have without a config's field.
RANGES: Mapping[str, Range] = {
    "max_new_tokens": LENGTH,
    "input_len": LENGTH,
    "output_len": LENGTH,
    "context_len": LENGTH,
    "num_tokens": Range(1, 1 << 20),
    "num_requests": COUNT,
    "repetitions": Range(0, MAX_COUNT),
    "seed": SEED,
    "copy_edits": SHARE,
    "draft_agreement": SHARE,
    "seconds": Range(0.0, 3600.0, whole=False, above=True),
    "request_timeout": SECONDS,
}
