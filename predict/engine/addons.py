"""What requests may name beside the model: adapters, and tuned prefixes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.adapters.pool import ServedAdapter
from predict.adapters.prefixes import NO_PREFIX, ServedPrefix
from predict.adapters.store import AdapterStore
from predict.config.adapters import Change, check_adapter_name, unknown
from predict.config.engine import EngineConfig
from predict.engine.block_manager import num_blocks_for
from predict.engine.kv_cache import write_rows
from predict.engine.scheduler import Scheduler
from predict.errors import UserError
from predict.loading.platform import Platform
from predict.loading.prefix import StoredPrefix, read_prefix
from predict.nn.inputs import LayerCache
from predict.nn.spec import DecoderSpec

# Writes a prefix's values (see StoredPrefix) to slots of the caches.
WritePrefix = Callable[["npt.NDArray[np.float32]", "npt.NDArray[np.int32]"], None]


def prefix_writer(
    config: EngineConfig, platform: Platform, caches: Sequence[LayerCache]
) -> WritePrefix:
    """Of this process's caches."""

    def write(values: Any, slots: Any) -> None:
        form = (config.kv_format, config.model.dtype, platform.place)
        write_rows(platform.backend, caches, values, slots, *form)

    return write


class Addons:
    """The adapters and prefixes of one engine, by name. Changes are made between steps."""

    def __init__(
        self,
        config: EngineConfig,
        spec: DecoderSpec,
        platform: Platform,
        adapters: AdapterStore | None,
        scheduler: Scheduler,
        write_prefix: WritePrefix,
    ):
        """adapters: None where the network takes none."""
        self._config, self._spec, self._platform = config, spec, platform
        self._scheduler, self._write_prefix = scheduler, write_prefix
        self.adapters = adapters
        self.prefixes: dict[str, ServedPrefix] = {}  # "": that of requests without a name
        self._stored: dict[str, StoredPrefix] = {}  # their values, for `write_again`

    @staticmethod
    def read_prefixes(config: EngineConfig, spec: DecoderSpec) -> dict[str, StoredPrefix]:
        """The prefixes of the flags by name. Raises UserError for one that does not fit."""
        found = {
            name: _read(Path(path), config, spec) for name, path in config.adapters.prefixes.items()
        }
        num_blocks = Addons.num_blocks(found, config.cache.block_size)
        given = config.cache.num_cache_blocks
        if given is not None and num_blocks >= given:
            raise UserError(
                f"the prefixes take {num_blocks} blocks of {config.cache.block_size} tokens, and "
                f"num_cache_blocks is {given} (allowed: {num_blocks + 1} and more); raise "
                "--num_cache_blocks"
            )
        return found

    @staticmethod
    def num_blocks(stored: Mapping[str, StoredPrefix], block_size: int) -> int:
        """Blocks that prefixes take."""
        return sum(num_blocks_for(each.num_tokens, block_size) for each in stored.values())

    @property
    def names(self) -> list[str]:
        """Names that requests may use."""
        adapters = [] if self.adapters is None else self.adapters.names
        return [*adapters, *filter(None, list(self.prefixes))]

    def find(self, name: str | None) -> tuple[ServedAdapter | None, ServedPrefix]:
        """The adapter or the prefix of a name; without a name the prefix of such requests.

        Raises UserError for an unknown name.
        """
        prefix = self.prefixes.get(name or "")  # which another thread may change meanwhile
        if name is None:
            return None, prefix or NO_PREFIX
        if name and prefix is not None:
            return None, prefix
        if self.adapters is not None and name in self.adapters.names:
            return self.adapters.get(name), NO_PREFIX
        raise unknown(name, self.names)

    def change(self, change: Change) -> None:
        """Loads or unloads one. Raises UserError, and changes nothing, where it does not fit.

        Requests with what is unloaded go on to their ends.
        """
        if not self._config.adapters.allow_adapter_updates:
            raise UserError("adapters are fixed; start with allow_adapter_updates to change them")
        if change.kind == "prefix":
            self._change_prefix(change)
            return
        if self.adapters is None:
            raise UserError(
                "the exported program takes no adapters of requests; export it with --enable_lora"
            )
        if change.path is None:
            self.adapters.unload(change.name)
            return
        if change.name and change.name in self.prefixes:
            raise UserError(
                f"a prefix {change.name!r} is loaded already; give the adapter another name"
            )
        self.adapters.load(change.name, change.path)

    def _change_prefix(self, change: Change) -> None:
        name = change.name
        if change.path is None:
            if not name or name not in self.prefixes:
                raise unknown(name, [each for each in self.prefixes if each], "prefix")
            self._scheduler.unpin_prefix(self.prefixes.pop(name))
            del self._stored[name]
            return
        check_adapter_name(name)
        if name in self.names:
            raise UserError(f"{name!r} is loaded already; unload it first, or give another name")
        stored = _read(Path(change.path), self._config, self._spec)
        self._platform.make_current()
        self.serve(name, stored, is_late=True)

    def serve(self, name: str, stored: StoredPrefix, is_late: bool = False) -> None:
        """Writes a prefix into pinned blocks; is_late: see Scheduler.pin_prefix."""
        prefix = self._scheduler.pin_prefix(name, stored.num_tokens, is_late)
        try:
            self._write(prefix, stored)
        except BaseException:
            self._scheduler.unpin_prefix(prefix)
            raise
        self.prefixes[name], self._stored[name] = prefix, stored

    def write_again(self) -> None:
        """Writes all prefixes into the cache, whose memory is another one."""
        for name, prefix in self.prefixes.items():
            self._write(prefix, self._stored[name])

    def _write(self, prefix: ServedPrefix, stored: StoredPrefix) -> None:
        block_size = self._config.cache.block_size
        blocks = np.array(prefix.all_block_ids, np.int32)
        slots = blocks[:, None] * block_size + np.arange(block_size, dtype=np.int32)
        rows = slots.reshape(-1)[: stored.num_tokens].astype(np.int32)
        self._write_prefix(stored.values, rows)


def _read(path: Path, config: EngineConfig, spec: DecoderSpec) -> StoredPrefix:
    return read_prefix(path, spec, config.model.dtype, config.max_length)
