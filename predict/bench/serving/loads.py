"""When requests are sent, and the highest load that holds: steps of two, then halving the rest."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from predict.bench.serving.report import RequestRecord
from predict.bench.serving.workload import Ask

# Sends a request that is due at a time of the event loop's clock; never raises for its failure.
Send = Callable[[Ask, float], Awaitable[RequestRecord]]
STEPS_DOWN = 10  # of a sweep from where it began, to a thousandth


def poisson(rate: float, num_requests: int, seed: Sequence[int]) -> list[float]:
    """Ascending seconds from the start; the gaps are exponential with mean 1/rate."""
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, num_requests)
    times: list[float] = np.cumsum(gaps).tolist()
    return times


def fixed(rate: float, num_requests: int, seed: Sequence[int]) -> list[float]:
    """Ascending seconds from the start, 1/rate apart. seed: not used."""
    return [number / rate for number in range(num_requests)]


# Arrivals whose load is requests/s; the other kind, "concurrency", keeps so many in flight.
OPEN: dict[str, Callable[[float, int, Sequence[int]], list[float]]] = {
    "poisson": poisson,
    "fixed": fixed,
}


async def send_at(send: Send, asks: Sequence[Ask], times: Sequence[float]) -> list[RequestRecord]:
    """Sends each request at its time, without waiting for the answers to earlier ones.

    times: seconds from now.
    """
    loop = asyncio.get_running_loop()
    start = loop.time()
    tasks: list[asyncio.Future[RequestRecord]] = []
    for ask, offset in zip(asks, times, strict=True):
        due = start + offset
        if due > loop.time():
            await asyncio.sleep(due - loop.time())
        tasks.append(asyncio.ensure_future(send(ask, due)))
    return list(await asyncio.gather(*tasks))


async def send_in_flight(send: Send, asks: Sequence[Ask], most: int) -> list[RequestRecord]:
    """Keeps `most` requests in flight until none is left."""
    loop = asyncio.get_running_loop()
    records: dict[int, RequestRecord] = {}
    numbers: Iterator[int] = count()

    async def work() -> None:
        while (number := next(numbers)) < len(asks):
            records[number] = await send(asks[number], loop.time())

    await asyncio.gather(*(work() for _ in range(min(most, len(asks)))))
    return [records[number] for number in range(len(asks))]


@dataclass(frozen=True)
class Found:
    """Between which loads the limit lies."""

    highest: float | None  # that held; None when none did
    lowest_failed: float | None  # None when even the highest allowed load held


async def highest_load(
    holds: Callable[[float], Awaitable[bool]],
    start: float,
    most: float,
    resolution: float,
    whole: bool,
) -> Found:
    """Looks for the highest load up to `most` for which `holds` is true.

    resolution: how much above the highest one that held the lowest one that failed may be, as a
    share of it. whole: loads are whole numbers, as requests in flight. Takes for granted that a
    load above one that failed fails too.
    """
    good: float | None = None
    bad: float | None = None
    load = min(start, most)
    while good is None or bad is None:
        if await holds(load):
            good, following = load, min(2.0 * load, most)
            if load >= most:
                return Found(good, None)
        else:
            bad, following = load, load / 2.0
            if load <= start / 2.0**STEPS_DOWN or (whole and load <= 1):
                return Found(good, bad)
        load = math.ceil(following) if whole else following
    while bad > good * (1.0 + resolution) and not (whole and bad - good <= 1):
        middle = math.sqrt(good * bad)
        if whole:
            middle = min(max(round(middle), good + 1), bad - 1)
        if await holds(middle):
            good = middle
        else:
            bad = middle
    return Found(good, bad)
