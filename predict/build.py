"""What an LLM is made of: settings held against the model, networks, caches, an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from predict.adapters.store import AdapterStore
from predict.adapters.weights import (
    OwnShelf,
    Placement,
    base_of,
    empty_pages,
    num_pool_pages,
    pool_bytes,
)
from predict.config.engine import EngineConfig
from predict.device import communicator, devices, library
from predict.device.devices import kind_of
from predict.drafting import (
    Drafting,
    StateDrafter,
    draft_caches_of,
    open_state_drafter,
    speculation,
    window_of,
)
from predict.engine.addons import Addons, WritePrefix, prefix_writer
from predict.engine.engine import Engine
from predict.engine.kv_cache import allocate_caches
from predict.engine.runner.networks import (
    DynamicForward,
    Forward,
    block_copier,
    static_forward,
)
from predict.engine.runner.residence import Residence
from predict.engine.sampler import Sampler
from predict.engine.scheduled import SchedulerConfig
from predict.engine.scheduler import Scheduler
from predict.engine.step import Runner
from predict.loading.adapters import Base
from predict.loading.cache_scales import head_scales
from predict.loading.defaults import with_model_defaults, with_whole_prompts
from predict.loading.draft_config import DraftModel, read_draft
from predict.loading.exported import check_export, part_of_run
from predict.loading.layouts import with_stored_cache
from predict.loading.manifest import Manifest, load_manifest, rank_folder
from predict.loading.memory import (
    LESS_MEMORY,
    check_page_memory,
    gpu_room,
    num_cache_blocks,
    num_state_slots,
)
from predict.loading.model import (
    Opened,
    Weights,
    check_memory,
    open_weights,
    plan_of,
    read_spec,
)
from predict.loading.platform import Platform, platform_of
from predict.loading.program import load_program
from predict.loading.states import check_states
from predict.nn.adapter_pages import with_pages
from predict.nn.blocks import LowRankPages
from predict.nn.cache_formats import DENSE
from predict.nn.decoder import Decoder
from predict.nn.inputs import LayerCache
from predict.nn.places import fields_of, placing_of
from predict.nn.plans import WeightPlan
from predict.nn.spec import DecoderSpec
from predict.ranks.addons import RanksShelf
from predict.ranks.drafts import RanksFeed
from predict.ranks.front import Ranks
from predict.ranks.gpus import device_of
from predict.ranks.start import spawned, start
from predict.resting import Origin, Resting, rebinding, refused, residence_of
from predict.sight import Sight, with_eyes
from predict.stepping import StepRunners
from predict.system.launcher import check_alone
from predict.system.notes import LOG
from predict.text.tokenizer import Tokenizer, tokenizer_of

Network = Callable[[Sequence[LayerCache]], Forward]  # runs over the caches that it is given


class Running(NamedTuple):
    """What runs steps."""

    runner: Runner
    draft_runner: Runner | None
    caches: list[LayerCache]
    num_blocks: int  # of the caches
    write_prefix: WritePrefix
    residence: Residence | None = None  # of the weights and caches of this process


class Parts(NamedTuple):
    """What `build` makes."""

    config: EngineConfig  # with the model's defaults
    platform: Platform
    spec: DecoderSpec
    tokenizer: Tokenizer | None
    draft: DraftModel | None
    decoder: Decoder | None  # in dynamic mode
    caches: list[LayerCache]
    addons: Addons
    engine: Engine
    sight: Sight
    resting: Resting


def build(config: EngineConfig, tokenizer: Tokenizer | None = None) -> Parts:
    """The parts of an LLM. tokenizer: the model's; None: read from its directory.

    Raises UserError before any weight is read when the directory, the flags and the machine do not
    fit together, and in each of several processes that Paddle's launcher has started.
    """
    check_alone()
    with spawned(config) as ranks:
        return Builder(config, tokenizer).parts(ranks)


class Builder:
    """Builds one LLM's parts; made, it has read all but weights."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        rank: int | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """rank: which of several this process is; None: the one that asks them, or the only one."""
        model, self.given, self.rank, self.on_progress = config.model, config, rank, on_progress
        self.num_ranks = config.ranks.tensor_parallel_degree
        compiled = model.inference_model
        if compiled is None and model.mode == "static" and kind_of(model.device) == "cpu":
            compiled = load_manifest(Path(model.model_name_or_path)).library_abi is not None
        self.platform = platform_of(device_of(model.device, rank, self.num_ranks), compiled)
        spec, self.reader = read_spec(model.model_name_or_path, model.model_type)
        self.read_spec = spec
        spec = with_eyes(config, spec, self.platform.gpu is not None)
        check_states(config, spec, self.platform.compiled is not None)
        spec = spec.with_forms(model.latent_form, config.cache.state_dtype)
        if self.num_ranks > 1:
            own = part_of_run(config, spec, rank or 0)
            spec = spec if rank is None else own
            self.platform = replace(self.platform, num_ranks=1 if rank is None else self.num_ranks)
        self.spec = spec
        config = with_model_defaults(with_stored_cache(config, self.reader), spec, self.reader)
        self.config = config = with_whole_prompts(config, spec)
        self.sight = Sight(config, spec)
        self.kv_format = spec.cache_format(config.kv_format)
        if self.platform.gpu is not None:
            self.kv_format.check_gpu(devices.driver_info().gpus[self.platform.gpu.index].capability)
        fake = config.quantization.use_fake_parameter
        self.kv_scales = head_scales(self.kv_format, model.model_name_or_path, spec, fake)
        self.prefixes = Addons.read_prefixes(config, spec)
        if config.max_length > spec.max_context:
            LOG.warning(
                f"--max_length is {config.max_length}, and the model was made for "
                f"{spec.max_context} positions; text beyond them is likely to be poor"
            )
        self.tokenizer, self.eos_token_ids = self._tokenizer(tokenizer)
        self.draft = read_draft(config, spec, self.tokenizer)
        self.drafter: StateDrafter | None = None
        self.weight_bytes = self.num_state_slots = 0
        self.decoder: Decoder | None = None
        self.read_decoder: Decoder | None = None  # as its folder has it
        self.forwards: list[DynamicForward] = []
        self.adapters: AdapterStore | None = None
        self.pages: list[LowRankPages] = []  # of adapters
        self.takes_adapters = config.adapters.is_used  # a program may take none

    def parts(self, ranks: Ranks | None = None) -> Parts:
        """Reads the weights and makes the rest; ranks: see start. Raises UserError."""
        config = self.config
        running = self.running() if self.num_ranks == 1 else self._over_ranks(ranks)
        caches, num_blocks = running.caches, running.num_blocks
        scheduler = self._scheduler(num_blocks)
        addons = Addons(
            *(config, self.spec, self.platform, self.adapters, scheduler, running.write_prefix)
        )
        for name, stored in self.prefixes.items():
            addons.serve(name, stored)
        sampler = Sampler(config.model.seed, self.eos_token_ids, window_of(config))
        drafting = Drafting(
            *(config, self.platform, self.drafter),
            *(running.draft_runner, num_blocks),
        )
        proposer, policy = speculation(drafting, sampler)
        engine = Engine(
            *(scheduler, running.runner, sampler, self.eos_token_ids),
            *(proposer, policy, fields_of(self.spec, self.adapters is not None), self.sight.eyes),
        )
        return Parts(
            *(config, self.platform, self.spec, self.tokenizer, self.draft, self.decoder),
            *(caches, addons, engine, self.sight, self._resting(running.residence)),
        )

    def _resting(self, residence: Residence | None) -> Resting:
        has_draft = self.draft is not None or self.drafter is not None
        origin = Origin(self.config, self.read_spec, self.spec, self.reader)
        return Resting(
            *(origin, self.platform, self.read_decoder, residence),
            refused(self.config, self.platform, has_draft, self.sight.tower is not None),
        )

    def _residence(self, caches: Sequence[LayerCache], runner: Runner) -> Residence:
        """The tensors that may leave the device, and come back."""
        has_scales = self.kv_format.scales == "head"
        kept = [
            c[len(k) :] for c, k in zip(caches, self.spec.kept, strict=True) if k and has_scales
        ]
        of_heads = [tensor for each in kept for tensor in each]
        scratch = [tensor for each in caches for tensor in each]
        scratch += [tensor for page in self.pages for tensor in (page.a, page.b)]
        return residence_of(
            *(self.platform, self.read_decoder, of_heads, scratch),
            rebinding(self.forwards, runner),
        )

    def _over_ranks(self, ranks: Ranks | None) -> Running:
        """The same, of other processes, which this one starts."""
        library.require()  # ranks add in it, whatever operators they run
        if self.config.model.mode == "static":
            self._checked_export()
        self.drafter = open_state_drafter(
            *(self.config, self.spec, self.reader, self.platform, None)
        )
        shelf = RanksShelf(self.config.model.dtype)
        if self.takes_adapters:
            self.adapters = shelf.store(self.config, self.spec, self.reader, self.platform)
        has_draft = self.draft is not None or self.drafter is not None
        started = start(self.given, ranks, shelf, self.spec.vocab_size, has_draft)
        self.sight.over(self.spec, started.ranks)
        self.num_state_slots = started.num_slots
        if self.drafter is not None:
            self.drafter.feed = RanksFeed(started.ranks)
        return Running(
            *(started.runner, started.draft_runner, [], started.num_blocks, started.write_prefix)
        )

    def running(self) -> Running:
        """Reads this process's weights, and makes what runs steps. Raises UserError."""
        gpu = self.platform.gpu
        self.platform.make_current()
        if gpu is not None and gpu.is_plugin:
            devices.release_cached(gpu)  # what an earlier model left in the pools
        with self.platform.explained_out_of_memory(LESS_MEMORY):
            network, draft_network = self._networks()
        platform = self.platform
        num_blocks = self._num_cache_blocks()
        with platform.explained_out_of_memory(LESS_MEMORY):
            caches = self._caches(num_blocks)
            paged = [cache for cache, kept in zip(caches, self.spec.kept, strict=True) if kept]
            copy_blocks = block_copier(platform.backend, paged, self.kv_format)
            runner = self._runner()(network(caches), copy_blocks)
            draft_runner = None
            if self.drafter is not None:
                forward = self.drafter.forward(self.config, platform, num_blocks)
                draft_runner = self._runner()(forward, lambda copies: None, runner)
            if self.draft is not None and draft_network is not None:
                draft_caches = draft_caches_of(self.config, self.draft.spec, num_blocks)
                draft_copies = block_copier(platform.backend, draft_caches, DENSE)
                draft_runner = self._runner()(draft_network(draft_caches), draft_copies, runner)
        if platform.compiled is not None:
            # The weights are in place; from here on only the steps' own tensors come and go.
            library.require().keep_freed_memory()
        write_prefix = prefix_writer(self.config, platform, caches)
        residence = self._residence(caches, runner)
        return Running(runner, draft_runner, caches, num_blocks, write_prefix, residence)

    def _tokenizer(self, tokenizer: Tokenizer | None) -> tuple[Tokenizer | None, Sequence[int]]:
        """The tokenizer, and the ids that end an answer."""
        model, spec = self.config.model, self.spec
        if self.rank is not None and tokenizer is None:
            return None, spec.eos_token_ids
        of_spec = (spec.vocab_size, spec.eos_token_ids)
        return tokenizer_of(model.model_name_or_path, *of_spec, model.chat_template, tokenizer)

    def _networks(self) -> tuple[Network, Network | None]:
        """The network with its weights in place, and the draft model's where there is one."""
        config = self.config
        opened = list[Weights]()
        manifest = self._checked_export() if config.model.mode == "static" else None
        adapter_bytes = self._adapter_bytes()
        if manifest is None:
            opened.append(open_weights(config, self.spec, self.reader, self.platform))
            self.platform = opened[0].platform
            adapter_bytes += self.sight.open(opened[0])
        if self.draft is not None:
            opened.append(open_weights(*self.draft, self.platform))
        self.drafter = open_state_drafter(
            *(config, self.spec, self.reader, self.platform, manifest)
        )
        self._met()
        every: list[Opened] = [*opened, *([self.drafter] if self.drafter else [])]
        if opened:
            check_memory(every, adapter_bytes=adapter_bytes)
        self.weight_bytes = sum(weights.num_bytes for weights in every)
        self._met()
        networks = list[Network]()
        if manifest is not None:
            if manifest.adapters is not None:
                plan, names = plan_of(self.spec, self.reader)
                self.adapters = self._adapter_store(plan, base_of(plan, names, self.reader, None))
            directory = Path(config.model.model_name_or_path) / rank_folder(self.rank)
            program = load_program(directory, config.model.model_prefix, self.platform.device)
            seen = self.sight.of_program(self.spec, manifest, self.platform)
            more: Any = {"pages": self.pages, "taps": manifest.taps or (), "pictures": seen}
            networks.append(partial(static_forward, program, **more))
        elif self.takes_adapters:
            plan, names = opened[0].plan, opened[0].names
            base = base_of(plan, names, self.reader, opened[0].takes_turns)
            self.adapters = self._adapter_store(plan, base)
        decoders = [weights.read(lambda _: self.on_progress()) for weights in opened]
        if manifest is None:
            self.read_decoder = decoders[0]
            decoders[0] = self.sight.joined(decoders[0])
            if self.adapters is not None:
                decoders[0] = with_pages(decoders[0], self.pages)
            self.decoder = decoders[0]
        if self.drafter is not None:
            self.drafter.read(self.decoder)
        networks += [
            partial(self._dynamic, weights, decoder)
            for weights, decoder in zip(opened, decoders, strict=True)
        ]
        return networks[0], networks[1] if self.draft is not None else None

    def _dynamic(
        self, weights: Weights, decoder: Decoder, caches: Sequence[LayerCache]
    ) -> DynamicForward:
        platform = weights.platform
        made = DynamicForward(platform.backend, decoder, caches)
        self.forwards.append(made)
        return made

    def _checked_export(self) -> Manifest:
        """The program's manifest. Raises UserError where the export does not fit this run."""
        import paddle

        loaded = None if self.platform.compiled is None else library.require()
        abi = None if loaded is None else loaded.metadata.abi
        manifest = check_export(self.config, self.spec, paddle.__version__, abi, self.rank)
        self.takes_adapters = self.takes_adapters and manifest.adapters is not None
        return manifest

    def _adapter_bytes(self) -> int:
        config = self.config.adapters
        if not self.takes_adapters:
            return 0
        num_bytes = pool_bytes(self.spec, num_pool_pages(config), self.config.model.dtype)
        check_page_memory(config, num_bytes, self.platform.free_bytes())
        return num_bytes

    def _adapter_store(self, plan: WeightPlan, base: Base) -> AdapterStore:
        """The pages for adapters, and the flags' adapters, which must fit; reads no weights yet."""
        platform, adapters = self.platform, self.config.adapters
        if not adapters.is_used:  # a program that takes adapters needs one page without them too
            adapters = replace(adapters, max_loras=1, max_lora_rank=1)
        dtype = self.config.model.dtype
        placement = Placement(dtype, platform.place, platform.gpu, platform.packs_pages)
        self.pages = empty_pages(plan.spec, num_pool_pages(adapters), placement)
        if self.rank is not None:  # the front reads them
            adapters = replace(adapters, lora_modules=())
        return AdapterStore(OwnShelf(self.pages, placement), plan, base, adapters)

    def _num_cache_blocks(self) -> int:
        """Blocks of the cache, those of prefixes included. Raises UserError."""
        config = self.config
        pinned = Addons.num_blocks(self.prefixes, config.cache.block_size)
        if self.draft and (config.adapters.prefix_path or config.adapters.allow_adapter_updates):
            pinned += config.scheduling.batch_size  # of requests with one, for the draft's cache
        draft = drafter.spec if (drafter := self.draft or self.drafter) else None
        if self.platform.gpu is None:
            self._met()
            free = self.platform.free_bytes() - self.sight.pass_bytes
            self.num_state_slots = self._met(num_state_slots(config, self.spec, free))
            return self._met(num_cache_blocks(config, self.spec, free, draft, pinned))
        memory = devices.memory_info(self.platform.gpu)
        room = gpu_room(
            *(config, self.spec, memory, draft, pinned), pass_bytes=self.sight.pass_bytes
        )
        self.num_state_slots = room.num_slots
        return self._met(room.num_blocks)

    def _met(self, number: int = 0) -> int:
        """Waits for all ranks; the least of their numbers."""
        if self.rank is None:
            return number
        return int(communicator.gather_ranks(np.array([number]), self.num_ranks).min())

    def _caches(self, num_blocks: int) -> list[LayerCache]:
        config = self.config
        return allocate_caches(
            *(self.spec, num_blocks, config.cache.block_size, config.model.dtype),
            *(config.kv_format, self.kv_scales, self.num_state_slots),
        )

    def _scheduler(self, num_blocks: int) -> Scheduler:
        config = self.config
        return Scheduler(
            SchedulerConfig(
                max_num_seqs=config.scheduling.batch_size,
                max_num_batched_tokens=config.token_budget,
                max_length=config.max_length,
                block_size=config.cache.block_size,
                num_blocks=num_blocks,
                reserve_full=config.cache.reserve_full,
                prefix_caching=config.cache.shares_prefixes,
                chunked_prefill=config.scheduling.chunked_prefill,
                priority_aging=config.scheduling.priority_aging,
                separate_steps=config.cache.attention == "block",
                for_drafts=self.draft is not None,
                lookahead=int(self.drafter is not None and self.drafter.spec is not None),
                adapters=None if self.adapters is None else self.adapters.pool,
                pictures=self.sight.rows,
                placing=placing_of(self.spec, config.max_length),
                num_state_slots=self.num_state_slots,
                same_bits=config.model.batch_invariant,
            )
        )

    def _runner(self) -> StepRunners:
        return StepRunners(
            *(self.config, self.platform, self.spec),
            pool=None if self.adapters is None else self.adapters.pool,
            draft=self.draft or self.drafter,
            drafter=self.drafter,
        )
