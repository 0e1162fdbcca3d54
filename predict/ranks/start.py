"""Starts the ranks of a model; what the front runs steps with."""

from __future__ import annotations

from typing import NamedTuple

from predict.config.engine import EngineConfig
from predict.device import library
from predict.device.devices import kind_of
from predict.engine.addons import WritePrefix
from predict.loading.memory import mib
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
    write_prefix: WritePrefix


def start(config: EngineConfig, shelf: RanksShelf, vocab_size: int, has_draft: bool) -> Started:
    """Starts them and waits until they are loaded. Raises UserError and EngineError.

    vocab_size: of logits. has_draft: whether a draft model or a drafter runs.
    """
    given, num_cores = config.ranks, int(library.require().info()["threads"])
    shelf.ranks = ranks = Ranks(
        *(config.settings, given.tensor_parallel_degree, given.rank_timeout), num_cores=num_cores
    )
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
        *(ranks, runners[0], runners[1] if has_draft else None, ready[0].num_blocks),
        prefix_writer(ranks),
    )
