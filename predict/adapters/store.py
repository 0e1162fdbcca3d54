"""The adapters that requests may name: read, kept in host memory, written into pages on demand."""

from __future__ import annotations

import os
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from predict.adapters.pool import READ_AHEAD, AdapterPool, ServedAdapter
from predict.adapters.weights import (
    PagedLinear,
    Shelf,
    check_servable,
    num_pages_for,
    num_pool_pages,
    paged,
    targets,
)
from predict.config.adapters import AdaptersConfig, check_adapter_name, unknown
from predict.errors import UserError
from predict.loading.adapters import Adapter, Base, fitted, read_adapter
from predict.nn.plans import WeightPlan

PageValues = list[PagedLinear | None]  # of each linear
Stamp = list[tuple[str, int, int]]  # of a folder's files: name, bytes, time of the last change


def stamp_of(directory: Path) -> Stamp:
    """Names, sizes and times of a folder's files; [] where there is no folder."""
    if not directory.is_dir():
        return []
    found: Stamp = []
    for entry in os.scandir(directory):
        with suppress(OSError):  # a broken link, say, is no file of the adapter
            stat = entry.stat()
            found.append((entry.name, stat.st_size, stat.st_mtime_ns))
    return sorted(found)


class AdapterStore:
    """Adapters by name, over pages beside a network's linears. Not thread-safe.

    The max_cpu_loras adapters that were used last stay in host memory; others are read again, on
    a thread of their own, ahead of the step that needs them.
    """

    def __init__(
        self,
        shelf: Shelf,
        plan: WeightPlan,
        base: Base,
        config: AdaptersConfig,
    ):
        """plan, base: of the network.

        Raises UserError for an adapter of `config` that does not fit; see `load`.
        """
        self.shelf, self.plan, self.base, self.config = shelf, plan, base, config
        most = num_pages_for(config.max_lora_rank)
        self.pool = AdapterPool(num_pool_pages(config), most, self._write, self._fetch)
        self._by_name: dict[str, ServedAdapter] = {}
        # Unloaded adapters stay as long as a request has them.
        self._adapters: WeakKeyDictionary[ServedAdapter, Adapter] = WeakKeyDictionary()
        self._stamps: WeakKeyDictionary[ServedAdapter, Stamp] = WeakKeyDictionary()
        self._values: OrderedDict[ServedAdapter, Any] = OrderedDict()  # latest used last
        # Of adapters that requests wait for; the oldest ones are given up.
        self._reading: OrderedDict[ServedAdapter, Future[PageValues]] = OrderedDict()
        self._reader = ThreadPoolExecutor(1, "regatta-adapters")
        for name, directory in config.directories.items():
            self.load(name, directory)

    @property
    def names(self) -> list[str]:
        """Names that requests may use, in the order of loading."""
        return list(self._by_name)

    def load(self, name: str, directory: str | os.PathLike[str]) -> ServedAdapter:
        """Reads an adapter, which requests may name from now on.

        Raises UserError for one that does not fit the model or the pages, and for a name in use.
        """
        check_adapter_name(name)
        if name in self._by_name:
            raise UserError(f"an adapter {name!r} is loaded already; unload it first")
        stamp = stamp_of(Path(directory))
        adapter = fitted(read_adapter(Path(directory)), self.base)
        check_servable(adapter, self.plan)
        rank, most = adapter.max_rank, self.config.max_lora_rank
        if rank > most:
            raise UserError(
                f"{directory}: the adapter has rank {rank} (allowed: up to {most}); raise "
                "--max_lora_rank"
            )
        served = ServedAdapter(name, num_pages_for(rank), targets(adapter, self.plan))
        self._keep(served, paged(adapter, self.plan, served.num_pages))
        self._adapters[served], self._stamps[served] = adapter, stamp
        self._by_name[name] = served
        return served

    def unload(self, name: str) -> None:
        """Removes the name; running requests finish. Raises UserError for an unknown name."""
        served = self.get(name)
        del self._by_name[name]
        if served in self._values:
            self._values.move_to_end(served, last=False)  # the first to go
        self.pool.forget(served)

    def get(self, name: str) -> ServedAdapter:
        """The adapter of a name. Raises UserError for an unknown one."""
        found = self._by_name.get(name)
        if found is None:
            raise unknown(name, list(self._by_name))  # which another thread may change meanwhile
        return found

    def _keep(self, served: ServedAdapter, values: PageValues) -> None:
        self._values[served] = self.shelf.made(values)
        while len(self._values) > self.config.max_cpu_loras:
            self._values.popitem(last=False)

    def _fetch(self, served: ServedAdapter) -> Future[PageValues] | None:
        """Begins to read an adapter that is not in host memory; see AdapterPool."""
        if served in self._values:
            return None
        if served not in self._reading:
            self._reading[served] = self._reader.submit(self._read_again, served)
        self._reading.move_to_end(served)
        while len(self._reading) > 2 * READ_AHEAD:  # for the queues of answers and of texts
            self._reading.popitem(last=False)[1].cancel()
        return self._reading[served]

    def _read_again(self, served: ServedAdapter) -> PageValues:
        adapter = self._adapters[served]
        if stamp_of(adapter.directory) != self._stamps[served]:
            raise UserError(
                f"{adapter.directory}: files of adapter {served.name!r} have changed since it was "
                "loaded; unload it, and load it again"
            )
        return paged(adapter, self.plan, served.num_pages)

    def _write(self, served: ServedAdapter, pages: list[int]) -> None:
        """Fills pages of the pools; see AdapterPool."""
        if served not in self._values:
            reading = self._reading.pop(served, None)
            read = self._read_again(served) if reading is None else reading.result()
            self._keep(served, read)
        values = self._values[served]
        self._values.move_to_end(served)
        self.shelf.write(values, pages)
