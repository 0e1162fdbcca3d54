"""Adapters and prefixes of requests: the front reads them, and each rank has its part of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from predict.adapters.store import AdapterStore
from predict.adapters.weights import PagedLinear, base_of, own_values
from predict.config.engine import EngineConfig
from predict.device.place import check_holds
from predict.engine.addons import WritePrefix
from predict.loading.model import find_weights
from predict.loading.platform import Platform
from predict.loading.prefix import own_heads
from predict.nn.hf_config import ConfigReader
from predict.nn.spec import DecoderSpec
from predict.ranks.front import Ranks
from predict.ranks.messages import Down
from predict.ranks.shared import Arrays

Values = list[PagedLinear | None]


class RanksShelf:
    """The pages of all ranks. See Shelf."""

    def __init__(self, dtype: str):
        self._dtype = dtype
        self.ranks: Ranks | None = None  # once they run

    def store(
        self, config: EngineConfig, spec: DecoderSpec, reader: ConfigReader, platform: Platform
    ) -> AdapterStore:
        """The front's, with the flags' adapters, which must fit. Raises UserError."""
        found = find_weights(config, spec, reader, platform)
        base = base_of(found.plan, found.names, reader, found.takes_turns)
        found.source.close()
        return AdapterStore(self, found.plan, base, config.adapters)

    def made(self, values: Values) -> Values:
        for each in filter(None, values):
            for array in (each.a, each.b):
                check_holds(self._dtype, array, "the adapter", "adapter")
        return values

    def write(self, made: Values, pages: Sequence[int]) -> None:
        assert self.ranks is not None
        pairs = ((None, None) if each is None else (each.a, each.b) for each in made)
        arrays = [array for pair in pairs for array in pair]
        self.ranks.ask(Down.PAGES, [np.array(pages, np.int64), *arrays])


def prefix_writer(ranks: Ranks) -> WritePrefix:
    """Of the caches of all ranks."""

    def write(values: npt.NDArray[np.float32], slots: npt.NDArray[np.int32]) -> None:
        ranks.ask(Down.PREFIX, [values, slots])

    return write


class RankAddons(NamedTuple):
    """What one rank has of them."""

    spec: DecoderSpec
    adapters: AdapterStore | None
    write_prefix: WritePrefix

    @property
    def answers(self) -> dict[Down, Callable[[list[Any]], Arrays]]:
        """What does each of their messages."""
        return {Down.PAGES: self._fill_pages, Down.PREFIX: self._write_prefix}

    def _fill_pages(self, arrays: list[Any]) -> Arrays:
        assert self.adapters is not None
        pages, *values = arrays
        pairs = zip(values[::2], values[1::2], strict=True)
        whole = [None if a is None else PagedLinear(a, b) for a, b in pairs]
        shelf = self.adapters.shelf
        shelf.write(shelf.made(own_values(whole, self.adapters.plan)), pages.tolist())
        return []

    def _write_prefix(self, arrays: list[Any]) -> Arrays:
        values, slots = arrays
        self.write_prefix(own_heads(values, self.spec), slots)
        return []
