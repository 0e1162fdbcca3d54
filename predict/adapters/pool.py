"""Which adapters are on the device, and in which pages (after S-LoRA, 2023).

Counts pages only; a callback fills them. Imports no Paddle.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.nn.inputs import ADAPTED

READ_AHEAD = 2  # adapters that are read for requests at the head of a queue
_keys = itertools.count(1)


@dataclass(frozen=True, eq=False)
class ServedAdapter:
    """An adapter that requests may name. Two that were loaded under one name are different.

    targets: which of predict.nn.inputs.ADAPTED it changes, in any layer.
    """

    name: str
    num_pages: int
    targets: tuple[bool, ...]
    key: int = field(default_factory=lambda: next(_keys))

    @property
    def salt(self) -> bytes:
        """Separates its requests' cache blocks from those of other requests."""
        return b"adapter" + self.key.to_bytes(8, "little")


class AdapterPool:
    """Pages 0..num_pages-1, each free or of one adapter.

    An adapter is held while requests with it run. An idle adapter stays until others need its
    pages; the longest idle one is evicted first. write(adapter, pages) fills pages; `hold` passes
    on what it raises, and the adapter then has no pages. read(adapter) begins to read the adapter's
    file, on another thread, and is done once `write` reads none; None: `write` reads none now.
    """

    def __init__(
        self,
        num_pages: int,
        max_pages: int,
        write: Callable[[ServedAdapter, list[int]], None],
        read: Callable[[ServedAdapter], Future[Any] | None] = lambda _: None,
    ):
        """max_pages: of one adapter."""
        self.num_pages = num_pages
        self.max_pages = max_pages
        self._write = write
        self._read = read
        self._free = list(range(num_pages - 1, -1, -1))
        self._pages: dict[ServedAdapter, list[int]] = {}
        self._tables: dict[ServedAdapter, npt.NDArray[np.int32]] = {}
        self._holders: Counter[ServedAdapter] = Counter()
        self._idle: OrderedDict[ServedAdapter, None] = OrderedDict()  # held longest ago first
        self.num_written = 0  # adapters written into pages so far

    @property
    def num_free_pages(self) -> int:
        """Pages that `hold` can take, those of idle adapters included."""
        return len(self._free) + sum(len(self._pages[each]) for each in self._idle)

    @property
    def num_used_pages(self) -> int:
        """Pages of adapters, held or idle."""
        return self.num_pages - len(self._free)

    def fetch(self, adapter: ServedAdapter) -> Future[Any] | None:
        """Begins to read an adapter that has no pages; None where nothing is to be waited for."""
        reading = None if adapter in self._pages else self._read(adapter)
        return None if reading is None or reading.done() else reading

    def has_room(self, adapter: ServedAdapter) -> bool:
        """Whether `hold` can place the adapter now, without reading a file."""
        if adapter in self._pages:
            return True
        return adapter.num_pages <= self.num_free_pages and self.fetch(adapter) is None

    def hold(self, adapter: ServedAdapter) -> bool:
        """Keeps the adapter in its pages until `release`; False: there is no room now."""
        if adapter not in self._pages and not self._place(adapter):
            return False
        self._idle.pop(adapter, None)
        self._holders[adapter] += 1
        return True

    def _place(self, adapter: ServedAdapter) -> bool:
        if adapter.num_pages > self.num_free_pages:
            return False
        while len(self._free) < adapter.num_pages:
            self._evict(next(iter(self._idle)))
        pages = [self._free.pop() for _ in range(adapter.num_pages)]
        try:
            self._write(adapter, pages)
        except BaseException:
            self._free += reversed(pages)
            raise
        table = np.full((len(ADAPTED), self.max_pages), -1, np.int32)
        table[np.array(adapter.targets), : len(pages)] = pages
        self._pages[adapter], self._tables[adapter] = pages, table
        self.num_written += 1
        return True

    def _evict(self, adapter: ServedAdapter) -> None:
        del self._idle[adapter], self._tables[adapter]
        self._free += reversed(self._pages.pop(adapter))

    def release(self, adapter: ServedAdapter) -> None:
        """Ends one `hold`. Raises RuntimeError for an adapter that is not held."""
        if self._holders[adapter] < 1:
            raise RuntimeError(f"adapter {adapter.name} is released and nobody holds it")
        self._holders[adapter] -= 1
        if not self._holders[adapter]:
            del self._holders[adapter]
            self._idle[adapter] = None

    def table(self, adapter: ServedAdapter) -> npt.NDArray[np.int32]:
        """[len(ADAPTED), max_pages] the pages for each linear, -1 behind them; it must be held."""
        return self._tables[adapter]

    def forget(self, adapter: ServedAdapter) -> None:
        """Frees the pages of an idle adapter; those of a held one are freed when needed."""
        if adapter in self._idle:
            self._evict(adapter)

    def forget_idle(self) -> None:
        """Frees the pages of all idle adapters: their content is gone."""
        for adapter in list(self._idle):
            self._evict(adapter)

    def check(self, held: Mapping[ServedAdapter, int]) -> None:
        """Raises RuntimeError unless each page has one place, and holders are `held`."""
        pages = [*self._free, *itertools.chain.from_iterable(self._pages.values())]
        if sorted(pages) != list(range(self.num_pages)):
            raise RuntimeError(f"pages of adapters are lost or held twice: {sorted(pages)}")
        if dict(self._holders) != {each: count for each, count in held.items() if count}:
            raise RuntimeError("adapters are not held by those who run")
        if set(self._idle) | set(self._holders) != set(self._pages):
            raise RuntimeError("adapters have pages, and are neither held nor idle")
