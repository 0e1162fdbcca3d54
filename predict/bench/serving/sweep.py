"""The highest load that holds its limits: steps of two, then halving what is left."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

Holds = Callable[[float], Awaitable[bool]]  # measures a load

STEPS_DOWN = 10  # from where it began, to a thousandth


@dataclass(frozen=True)
class Found:
    """Between which loads the limit lies."""

    highest: float | None  # that held; None when none did
    lowest_failed: float | None  # None when even `most` held


async def highest_load(
    holds: Holds, start: float, most: float, resolution: float, whole: bool
) -> Found:
    """Looks for the highest load up to `most` for which `holds` is true.

    resolution: how much above the highest one that held the lowest one that failed may be, as a
    share of it. whole: loads are whole numbers, as requests in flight. Takes for granted that a
    load above one that failed fails too.
    """
    good: float | None = None
    bad: float | None = None
    load = min(start, most)
    for _ in range(64):
        if await holds(load):
            good = load
            if load >= most:
                break
            following = min(2.0 * load, most)
        else:
            bad = load
            following = load / 2.0
            if load <= start / 2.0**STEPS_DOWN or (whole and load <= 1):
                break
        if good is not None and bad is not None:
            break
        load = math.ceil(following) if whole else following
    if good is None or bad is None:
        return Found(good, bad)
    while bad > good * (1.0 + resolution):
        middle = math.sqrt(good * bad)
        if whole:
            middle = min(max(round(middle), good + 1), bad - 1)
            if bad - good <= 1:
                break
        if await holds(middle):
            good = middle
        else:
            bad = middle
    return Found(good, bad)
