"""When requests are sent: at times of their own, or each when another one ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import count

import numpy as np

from predict.bench.serving.report import RequestRecord
from predict.bench.serving.workload import Ask

# Sends a request that is due at a time of the event loop's clock; never raises for its failure.
Send = Callable[[Ask, float], Awaitable[RequestRecord]]


def poisson(rate: float, num_requests: int, seed: Sequence[int]) -> list[float]:
    """Ascending seconds from the start; the gaps are exponential with mean 1/rate."""
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, num_requests)
    times: list[float] = np.cumsum(gaps).tolist()
    return times


def fixed(rate: float, num_requests: int, seed: Sequence[int]) -> list[float]:
    """Ascending seconds from the start, 1/rate apart. seed: for the sake of `poisson`."""
    return [number / rate for number in range(num_requests)]


# Arrivals whose load is requests/s; the other kind, "concurrency", keeps so many in flight.
OPEN: dict[str, Callable[[float, int, Sequence[int]], list[float]]] = {
    "poisson": poisson,
    "fixed": fixed,
}


async def send_at(send: Send, asks: Sequence[Ask], times: Sequence[float]) -> list[RequestRecord]:
    """Sends each request at its time, whatever became of those before it.

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
    records: list[RequestRecord | None] = [None] * len(asks)
    numbers: Iterator[int] = count()

    async def work() -> None:
        while (number := next(numbers)) < len(asks):
            records[number] = await send(asks[number], loop.time())

    await asyncio.gather(*(work() for _ in range(min(most, len(asks)))))
    return [record for record in records if record is not None]
