"""Who drafts, of a config and what is loaded for it."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from predict.config.engine import EngineConfig
from predict.engine.draft_policy import DraftPolicy
from predict.engine.drafts import (
    DraftNetwork,
    Follower,
    Proposer,
    SpeculativeConfig,
    StateDrafting,
)
from predict.engine.kv_cache import allocate_caches
from predict.engine.sampler import Sampler, UnadjustedSampler
from predict.engine.step import Runner
from predict.loading.drafters import DrafterWeights, open_drafter
from predict.loading.drafters.shared import StoredShared, open_stored
from predict.loading.manifest import Manifest
from predict.loading.memory import check_cpu_memory, max_draft_rows
from predict.loading.platform import Platform
from predict.nn.decoder import Decoder
from predict.nn.drafters import (
    ChainDrafter,
    ChainForward,
    Feed,
    MedusaForward,
    MedusaHeads,
)
from predict.nn.hf_config import ConfigReader
from predict.nn.inputs import LayerCache, bucket_size
from predict.nn.spec import DecoderSpec
from predict.speculative import proposer_of
from predict.system.notes import LOG


class StateDrafter:
    """A drafter of hidden states, checked; `read` reads its weights."""

    def __init__(self, weights: DrafterWeights, shared: StoredShared | None):
        """shared: with a model that runs as a program."""
        self.weights, self.shared, self.spec = weights, shared, weights.spec
        self.num_bytes = weights.num_bytes + (0 if shared is None else shared.num_bytes)
        self.loading_bytes = weights.loading_bytes
        self._read: ChainDrafter | MedusaHeads | None = None
        self.feed: Any = None  # what its steps read states from, once it runs

    def read(self, decoder: Decoder | None) -> None:
        """decoder: the model's, where it is no program."""
        target = decoder if self.shared is None else self.shared.read()
        assert target is not None
        self._read = self.weights.read(target)

    def forward(
        self, config: EngineConfig, platform: Platform, num_blocks: int
    ) -> ChainForward | MedusaForward:
        """What runs it, with its caches made. num_blocks: of the model's."""
        ops, self.feed = platform.backend, _feed_of(config, platform)
        if isinstance(self._read, MedusaHeads):
            return MedusaForward(ops, self._read, self.feed)
        assert self._read is not None
        caches = draft_caches_of(config, self.weights.found.spec, num_blocks)
        return ChainForward(ops, self._read, caches, self.feed)

    @property
    def columns(self) -> npt.NDArray[np.int64] | None:
        """[V] column of its logits by token, D for tokens that it does not know; None: all V."""
        columns = None if self._read is None else self._read.columns
        return None if columns is None else columns.numpy()


def _feed_of(config: EngineConfig, platform: Platform) -> Any:
    if platform.gpu is None:
        return Feed(platform.backend)
    from predict.engine.runner.gpu_feed import GpuFeed
    from predict.engine.runner.graphs import MAX_SPAN

    size = bucket_size(config.scheduling.batch_size * MAX_SPAN)
    return GpuFeed(platform.backend, platform.gpu, size)


def open_state_drafter(
    config: EngineConfig,
    spec: DecoderSpec,
    reader: ConfigReader,
    platform: Platform,
    program: Manifest | None,
) -> StateDrafter | None:
    """The drafter of hidden states that `config` asks for; None where it is none.

    spec, reader: the model's, or what a rank has of it, whose drafter this is then. program: it
    runs as. Raises UserError before any weight is read.
    """
    share = spec.share
    whole, ranks = (spec, None) if share is None else (share.whole, share.ranks)
    weights = open_drafter(config, whole, reader, platform, ranks)
    if weights is None or program is None:
        return None if weights is None else StateDrafter(weights, None)
    weights.check_given(program.taps, config.model.model_name_or_path)
    # What a rank's program holds of embedding and head is in no tensor: it has both whole besides.
    drafter = StateDrafter(weights, open_stored(config, whole, reader, platform))
    check_cpu_memory(config, spec, platform.free_bytes(), drafter.num_bytes, weights.spec)
    return drafter


class Drafting(NamedTuple):
    """What drafts are made with."""

    config: EngineConfig
    platform: Platform
    drafter: StateDrafter | None
    draft_runner: Runner | None  # of the drafter, or of a draft model
    num_blocks: int  # of the model's caches


def draft_caches_of(config: EngineConfig, spec: DecoderSpec, num_blocks: int) -> list[LayerCache]:
    """New caches of a drafter beside the model's."""
    num_blocks += config.scheduling.batch_size  # see DraftNetwork
    return allocate_caches(spec, num_blocks, config.cache.block_size, config.model.dtype)


def speculation(of: Drafting, sampler: Sampler) -> tuple[Proposer | None, DraftPolicy | None]:
    """What proposes drafts, and what says how many; None where nothing does."""
    config = of.config
    if config.speculation.speculate_method is None:
        return None, None
    on_gpu = of.platform.gpu is not None
    draft = None
    if of.drafter is None and of.draft_runner is not None:
        draft = DraftNetwork(
            runner=of.draft_runner,
            sampler=Sampler(config.model.seed, sampler.eos_token_ids),
            block_size=config.cache.block_size,
            num_blocks=of.num_blocks,
            token_budget=config.token_budget,
            follower=cast(Follower, of.draft_runner) if on_gpu else None,
        )
    proposer = proposer_of(
        SpeculativeConfig(
            method=config.speculation.speculate_method,
            max_ngram_size=config.speculation.speculate_max_ngram_size,
            draft=draft,
            states=_state_drafting(of, sampler),
        )
    )
    most = config.speculation.speculate_max_draft_token_num
    return proposer, DraftPolicy(most, max_draft_rows(config), proposer.looks_up)


def _state_drafting(of: Drafting, sampler: Sampler) -> StateDrafting | None:
    if of.drafter is None:
        return None
    assert of.draft_runner is not None
    return StateDrafting(
        runner=of.draft_runner,
        feed=of.drafter.feed,
        taps=of.drafter.weights.taps,
        num_heads=of.drafter.weights.num_heads,
        sampler=UnadjustedSampler(sampler.seed, sampler.eos_token_ids),
        block_size=of.config.cache.block_size,
        num_blocks=of.num_blocks,
    )


def window_of(config: EngineConfig) -> tuple[int, int] | None:
    """Of window verification: the window, and its candidates."""
    if not config.speculation.verifies_by_window:
        return None
    window = config.speculation.speculate_verify_window or 2
    max_candidate_len = config.speculation.speculate_max_candidate_len or 5
    LOG.warning(
        "drafts of sampled requests stand by PaddleNLP's TopP + window verification "
        f"(window {window}, {max_candidate_len} candidates): their text is not distributed as "
        "without drafts; greedy requests stay exact"
    )
    return window, max_candidate_len
