"""Starts the ranks of a model; what the front runs steps with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from predict.config.engine import EngineConfig
from predict.device import library
from predict.device.devices import kind_of
from predict.engine.addons import WritePrefix
from predict.loading.exported import part_of_run
from predict.loading.memory import mib
from predict.loading.model import read_spec
from predict.ranks.addons import RanksShelf, prefix_writer
from predict.ranks.ahead import AheadRunner, OnWay
from predict.ranks.front import Ranks, RanksRunner
from predict.system.notes import LOG


class Started(NamedTuple):
    """Ranks that are loaded."""

    ranks: Ranks
    runner: RanksRunner
    draft_runner: RanksRunner | None  # of a draft model, or a drafter
    num_blocks: int  # of each rank's caches
    num_slots: int  # of each rank's states
    write_prefix: WritePrefix


@contextmanager
def spawned(config: EngineConfig) -> Iterator[Ranks | None]:
    """The processes of a model that has several, which end where the block raises.

    They import and open what they need meanwhile; `start` has them load. None where `start` is to
    begin them: behind all that may refuse an export, or what runs without a library. Raises
    UserError for a model that cannot be shared.
    """
    is_static = config.model.mode == "static"
    if config.ranks.tensor_parallel_degree == 1 or is_static or library.find() is None:
        yield None
        return
    spec, _ = read_spec(config.model.model_name_or_path, config.model.model_type)
    part_of_run(config, spec, 0)
    ranks = _begun(config)
    try:
        yield ranks
    except BaseException:
        ranks.close()
        raise


def _begun(config: EngineConfig) -> Ranks:
    given = config.ranks
    return Ranks(config.settings, given.tensor_parallel_degree, given.rank_timeout)


def start(
    config: EngineConfig, ranks: Ranks | None, shelf: RanksShelf, vocab_size: int, has_draft: bool
) -> Started:
    """Waits until they are loaded. Raises UserError and EngineError.

    ranks: spawned; None: not yet. vocab_size: of logits. has_draft: whether a draft model or a
    drafter runs.
    """
    shelf.ranks = ranks = _begun(config) if ranks is None else ranks
    ranks.load(int(library.require().info()["threads"]))
    ready = ranks.ready()
    for rank, each in enumerate(ready):
        LOG.info(f"rank {rank}: {mib(each.weight_bytes)} MiB of weights")
    num_bytes = sum(each.weight_bytes for each in ready)
    on_way = OnWay(ranks)
    if is_ahead := kind_of(config.model.device) == "gpu":
        ranks.settle = on_way.settle
    runners: list[RanksRunner] = []
    for which in range(1 + has_draft):
        given_all = ranks, vocab_size, num_bytes, which
        runners.append(AheadRunner(*given_all, on_way) if is_ahead else RanksRunner(*given_all))
    return Started(
        *(ranks, runners[0], runners[1] if has_draft else None),
        *(ready[0].num_blocks, ready[0].num_slots, prefix_writer(ranks)),
    )
