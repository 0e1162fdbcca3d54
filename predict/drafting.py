"""Who drafts, of a config and what is loaded for it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, TypeAlias, cast

from predict.config.engine import EngineConfig
from predict.engine.draft_policy import Costs, DraftPolicy
from predict.engine.drafts import (
    DraftNetwork,
    Follower,
    Proposer,
    SpeculativeConfig,
    StateDrafting,
)
from predict.engine.kv_cache import allocate_caches
from predict.engine.runner.host_chooser import HostChooser
from predict.engine.sampler import Sampler
from predict.engine.step import Runner
from predict.loading.drafters import DrafterWeights, open_drafter
from predict.loading.drafters.shared import StoredShared, open_stored
from predict.loading.manifest import Manifest
from predict.loading.memory import check_cpu_memory, max_draft_rows
from predict.loading.platform import Platform
from predict.nn.decoder import Decoder
from predict.nn.drafters import ChainDrafter, ChainNetwork, MedusaHeads, MedusaNetwork
from predict.nn.hf_config import ConfigReader
from predict.nn.inputs import LayerCache
from predict.nn.spec import DecoderSpec
from predict.ranks.drafts import RanksDrafter
from predict.speculative import proposer_of
from predict.system.notes import LOG

# The demo model on 2 cores: 1.65 ms for one row, 2.8 for 16.
CPU_COSTS = Costs(row=0.04)
# Llama-3-8B on an H200: 3.8 ms for one row, 6.4 for 128. The host takes some 0.3 ms from a step's
# tokens to the next step, and more for many requests; a draft of a sixth of the bytes takes 0.8 ms.
GPU_COSTS = Costs(row=0.0055, draft=0.05, wait=0.08, wait_each=0.004)

DrafterNetwork: TypeAlias = "ChainNetwork | MedusaNetwork | RanksDrafter"


class StateDrafter:
    """A drafter of hidden states, checked; `read` reads its weights."""

    def __init__(self, weights: DrafterWeights, shared: StoredShared | None):
        """shared: with a model that runs as a program."""
        self.weights, self.shared, self.spec = weights, shared, weights.spec
        self.num_bytes = weights.num_bytes + (0 if shared is None else shared.num_bytes)
        self.loading_bytes = weights.loading_bytes
        self._read: ChainDrafter | MedusaHeads | None = None

    def read(self, decoder: Decoder | None) -> None:
        """decoder: the model's, where it is no program."""
        target = decoder if self.shared is None else self.shared.read()
        assert target is not None
        self._read = self.weights.read(target)

    def network(self, config: EngineConfig, platform: Platform, num_blocks: int) -> DrafterNetwork:
        """What runs it, with its caches made. num_blocks: of the model's."""
        assert self._read is not None
        if isinstance(self._read, MedusaHeads):
            return MedusaNetwork(platform.backend, self._read)
        caches = draft_caches_of(config, self.weights.found.spec, num_blocks)
        return ChainNetwork(platform.backend, self._read, caches)


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
    drafter = StateDrafter(weights, open_stored(config, spec, reader, platform))
    check_cpu_memory(config, spec, platform.free_bytes(), drafter.num_bytes, weights.spec)
    return drafter


class Drafting(NamedTuple):
    """What drafts are made with."""

    config: EngineConfig
    platform: Platform
    drafter: DrafterNetwork | None  # of hidden states
    draft_runner: Runner | None  # of a draft model
    draft_cost: float  # of a step of either, in steps of the model
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
    if of.draft_runner is not None:
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
    costs = GPU_COSTS if on_gpu else CPU_COSTS
    step = costs.draft + of.draft_cost if of.draft_runner or of.drafter else 0.0
    rows = max_draft_rows(config)
    most = config.speculation.speculate_max_draft_token_num
    costs, catches_up = replace(costs, draft=step), of.draft_runner is not None
    return proposer, DraftPolicy(most, rows, costs, proposer.looks_up, catches_up)


def _state_drafting(of: Drafting, sampler: Sampler) -> StateDrafting | None:
    if of.drafter is None:
        return None
    return StateDrafting(
        network=of.drafter,
        choose=HostChooser(of.platform.backend).tokens,
        sampler=sampler,
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
