"""LLM: a checkpoint (or an exported program) with an engine around it; prompts in, outputs out."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from predict.adapters.pool import ServedAdapter
from predict.adapters.prefixes import NO_PREFIX, ServedPrefix
from predict.adapters.store import AdapterStore
from predict.adapters.weights import Placement, base_of, empty_pages, num_pool_pages, pool_bytes
from predict.config.adapters import check_adapter_name, unknown
from predict.config.engine import EngineConfig, check_params
from predict.config.model import DTYPE_BYTES
from predict.device import devices, library
from predict.device.devices import Device
from predict.engine.block_manager import num_blocks_for
from predict.engine.draft_policy import Costs, DraftPolicy
from predict.engine.drafts import DraftNetwork, Follower, Proposer, SpeculativeConfig
from predict.engine.embedding import Pooling, check_pooling, embed
from predict.engine.engine import Engine
from predict.engine.kv_cache import allocate_caches, write_rows
from predict.engine.request_state import Request
from predict.engine.runner.host_chooser import HostChooser
from predict.engine.runner.networks import (
    DynamicForward,
    Forward,
    HostNetwork,
    HostRunner,
    Within,
    block_copier,
    static_forward,
)
from predict.engine.sampler import Sampler
from predict.engine.samples import FailedPrompt, Samples, StreamOutput
from predict.engine.scheduled import ScheduledBatch, SchedulerConfig
from predict.engine.scheduler import Scheduler
from predict.engine.stats import EngineStats
from predict.engine.step import CopyBlocks, Runner
from predict.errors import EngineError, TokenizerError, UserError, quoted
from predict.loading.adapters import Base
from predict.loading.cache_scales import head_scales
from predict.loading.defaults import with_model_defaults
from predict.loading.draft_config import read_draft
from predict.loading.exported import check_export
from predict.loading.generation_config import read_recommended
from predict.loading.layouts import with_stored_cache
from predict.loading.manifest import Manifest
from predict.loading.memory import (
    check_page_memory,
    graph_bytes,
    max_draft_rows,
    num_cache_blocks,
    num_gpu_cache_blocks,
    workspace_bytes,
)
from predict.loading.model import Weights, check_memory, open_weights, plan_of, read_spec
from predict.loading.platform import platform_of
from predict.loading.prefix import StoredPrefix, read_prefix
from predict.loading.program import load_program
from predict.nn.adapter_pages import with_pages
from predict.nn.cache_formats import DENSE
from predict.nn.decoder import Decoder
from predict.nn.hf_config import ConfigReader
from predict.nn.inputs import Field, LayerCache, fields_with
from predict.nn.places import fields_of, placing_of
from predict.nn.plans import WeightPlan
from predict.nn.spec import DecoderSpec
from predict.request import RequestOutput, SamplingParams
from predict.speculative import proposer_of
from predict.system.bounds import is_integer, prompt_token_ids
from predict.system.notes import LOG
from predict.text.conversation import Message, conversation_messages
from predict.text.detokenizer import Detokenizer
from predict.text.guides import Guides
from predict.text.params import with_token_ids
from predict.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from predict.config.keywords import Settings

Prompt = str | Sequence[int]
# In the place of a prompt that its tokenizer failed on: its answer says so, the others are given.
PromptOrError = Prompt | TokenizerError
Conversation = Sequence[Message]
# The demo model on 2 cores: 1.65 ms for one row, 2.8 for 16.
CPU_COSTS = Costs(row=0.04)
# Llama-3-8B on an H200: 3.8 ms for one row, 6.4 for 128. The host takes some 0.3 ms from a step's
# tokens to the next step, and more for many requests; a draft of a sixth of the bytes takes 0.8 ms.
GPU_COSTS = Costs(row=0.0055, draft=0.05, wait=0.08, wait_each=0.004)
LESS_MEMORY = (
    "use a smaller --dtype, lower --max_length or --batch_size, or end other processes on this "
    "device"
)
Network = Callable[[Sequence[LayerCache]], Forward]  # runs over the caches that it is given


def as_several(prompts: Prompt | Sequence[PromptOrError]) -> Sequence[PromptOrError]:
    """Prompts as a list; a text, or whole numbers, are one prompt. Raises UserError."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray, Mapping)) or not hasattr(prompts, "__len__"):
        raise UserError(
            f"prompts is {quoted(prompts)} (allowed: a text, token ids, or a list of these; for "
            "conversations use chat)"
        )
    if len(prompts) and all(is_integer(each) for each in prompts):
        return [cast("Sequence[int]", prompts)]
    return cast("Sequence[PromptOrError]", prompts)


def check_kind(params: SamplingParams) -> None:
    """Raises UserError unless `params` is a SamplingParams."""
    if not isinstance(params, SamplingParams):
        raise UserError(
            f"sampling_params has {quoted(params)} (allowed: a SamplingParams for all prompts, or "
            "a list with one for each)"
        )


def check_streamed(params: SamplingParams) -> None:
    """Raises UserError for answers that cannot be streamed."""
    check_kind(params)
    if params.num_samples > params.n:
        raise UserError(
            "best_of chooses among finished answers, which cannot be streamed; use generate, or n "
            "alone"
        )


def _with_whole_prompts(config: EngineConfig, spec: DecoderSpec) -> EngineConfig:
    """The config; for a model that runs prompts whole, with steps of max_length tokens.

    An explicit max_num_batched_tokens stays.
    """
    scheduling = config.scheduling
    if spec.prefix is None or scheduling.max_num_batched_tokens is not None:
        return config
    return config.changed(max_num_batched_tokens=max(config.token_budget, config.max_length))


class LLM:
    """Answers prompts with one model.

    Raises UserError (a ValueError) before any weight is read when the directory, the flags and the
    machine do not fit together. Not thread-safe.
    """

    def __init__(
        self,
        model: EngineConfig | str | os.PathLike[str],
        tokenizer: Tokenizer | None = None,
        **settings: Unpack[Settings],
    ):
        """model: its directory, or a config. settings: of EngineConfig, by name.

        tokenizer: the model's, when the caller has it already; else read from its directory.
        """
        started = time.perf_counter()
        config = EngineConfig.of(model, **settings)
        self.platform = platform_of(config.model.device, config.model.inference_model)
        spec, reader = read_spec(config.model.model_name_or_path, config.model.model_type)
        self.spec = spec.with_latent_form(config.model.latent_form)
        self.config = config = _with_whole_prompts(
            with_model_defaults(with_stored_cache(config, reader), self.spec, reader), self.spec
        )
        kv_format = self.spec.cache_format(config.kv_format)
        if self.device is not None:
            kv_format.check_gpu(devices.driver_info().gpus[self.device.index].capability)
        fake = config.quantization.use_fake_parameter
        kv_scales = head_scales(kv_format, config.model.model_name_or_path, self.spec, fake)
        max_length = config.max_length
        stored_prefixes = self._read_prefixes()
        if max_length > self.spec.max_context:
            LOG.warning(
                f"--max_length is {max_length}, and the model was made for "
                f"{self.spec.max_context} positions; text beyond them is likely to be poor"
            )
        directory = config.model.model_name_or_path
        if tokenizer is None and Tokenizer.exists(directory):
            tokenizer = Tokenizer.from_dir(directory, config.model.chat_template)
        self.tokenizer = tokenizer
        eos_token_ids = self.spec.eos_token_ids
        self._detokenizer = None
        if self.tokenizer is not None:
            if self.tokenizer.vocab_size > self.spec.vocab_size:
                raise UserError(
                    f"{directory}: the tokenizer has {self.tokenizer.vocab_size} tokens and "
                    f"config.json says vocab_size {self.spec.vocab_size}; they do not belong to "
                    "one model"
                )
            self._detokenizer = Detokenizer(self.tokenizer)
            # An id that the model cannot make ends nothing, and has no logit to suppress.
            known = [i for i in self.tokenizer.eos_token_ids if i < self.spec.vocab_size]
            eos_token_ids = tuple(known) or eos_token_ids

        self.draft = read_draft(config, self.spec, self.tokenizer)
        self._draft_cost = 0.0  # of a step of the draft model, in steps of the model
        self.backend = self.platform.backend
        self.decoder: Decoder | None = None  # in dynamic mode
        self.adapters: AdapterStore | None = None  # where requests may name some
        self._takes_adapters = config.adapters.is_used  # a program may take none
        self.platform.make_current()
        if self.device is not None and self.device.is_plugin:
            devices.release_cached(self.device)  # what an earlier model left in the pools
        with self.platform.explained_out_of_memory(LESS_MEMORY):
            network, draft_network = self._load_networks(reader)
        num_blocks = self._num_cache_blocks(
            self._num_prefix_blocks(stored_prefixes) + self._num_draft_blocks()
        )
        with self.platform.explained_out_of_memory(LESS_MEMORY):
            caches = allocate_caches(
                self.spec,
                num_blocks,
                config.cache.block_size,
                config.model.dtype,
                config.kv_format,
                kv_scales,
            )
            copy_blocks = block_copier(self.backend, caches, kv_format)
            runner = self._runner(network(caches), copy_blocks)
            draft_runner = None
            if self.draft is not None and draft_network is not None:
                num_draft_blocks = num_blocks + config.scheduling.batch_size  # see DraftNetwork
                draft_caches = allocate_caches(
                    self.draft.spec, num_draft_blocks, config.cache.block_size, config.model.dtype
                )
                draft_copies = block_copier(self.backend, draft_caches, DENSE)
                draft_runner = self._runner(draft_network(draft_caches), draft_copies, runner)
        if self.platform.compiled is not None:
            # The weights are in place; from here on only the steps' own tensors come and go.
            library.require().keep_freed_memory()
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.scheduling.batch_size,
                max_num_batched_tokens=config.token_budget,
                max_length=config.max_length,
                block_size=config.cache.block_size,
                num_blocks=num_blocks,
                reserve_full=config.cache.reserve_full,
                prefix_caching=config.cache.shares_prefixes,
                chunked_prefill=config.scheduling.chunked_prefill,
                separate_steps=config.cache.attention == "block",
                for_drafts=self.draft is not None,
                adapters=None if self.adapters is None else self.adapters.pool,
                placing=placing_of(self.spec, config.max_length),
            )
        )
        self._caches = caches
        # By name; "" is the prefix of requests without a name.
        self.prefixes = {
            name: self._served_prefix(name, stored, scheduler, caches)
            for name, stored in stored_prefixes.items()
        }
        sampler = Sampler(config.model.seed, eos_token_ids, self._window())
        proposer, policy = self._speculation(draft_runner, sampler, num_blocks)
        fields = self._fields()
        self.engine = Engine(scheduler, runner, sampler, eos_token_ids, proposer, policy, fields)
        self._ids = itertools.count()
        self._compiler: Guides | None = None
        self._guides_lock = threading.Lock()
        self.startup_seconds = time.perf_counter() - started

    @property
    def device(self) -> Device | None:
        """The GPU that the model runs on; None for the CPU and for other devices."""
        return self.platform.gpu

    def _load_networks(self, reader: ConfigReader) -> tuple[Network, Network | None]:
        """The network with its weights in place, and the draft model's where there is one."""
        config = self.config
        opened: list[Weights] = []
        manifest = self._checked_export() if config.model.mode == "static" else None
        adapter_bytes = self._adapter_bytes()
        if config.model.mode == "dynamic":
            opened.append(open_weights(config, self.spec, reader, self.platform))
        if self.draft is not None:
            opened.append(open_weights(*self.draft, self.platform))
        if opened:
            check_memory(opened, adapter_bytes=adapter_bytes)
        networks: list[Network] = []
        if manifest is not None:
            if manifest.adapters is not None:
                plan, names = plan_of(self.spec, reader)
                self.adapters = self._adapter_store(plan, base_of(plan, names, reader, None))
            directory = Path(config.model.model_name_or_path)
            program = load_program(directory, config.model.model_prefix, self.platform.device)
            pages = () if self.adapters is None else self.adapters.pools
            networks.append(partial(static_forward, program, pages=pages))
        elif self._takes_adapters:
            plan, names = opened[0].plan, opened[0].names
            base = base_of(plan, names, reader, opened[0].takes_turns)
            self.adapters = self._adapter_store(plan, base)
        if self.draft is not None:
            own = DTYPE_BYTES[config.model.dtype] * self.spec.num_matmul_weights
            if config.model.mode == "dynamic":
                own = opened[0].num_bytes
            self._draft_cost = opened[-1].num_bytes / own
        decoders = [weights.read() for weights in opened]
        if config.model.mode == "dynamic" and self.adapters is not None:
            decoders[0] = with_pages(decoders[0], self.adapters.pools)
        networks += [partial(DynamicForward, self.backend, decoder) for decoder in decoders]
        if config.model.mode == "dynamic":
            self.decoder = decoders[0]
        return networks[0], networks[1] if self.draft is not None else None

    def _checked_export(self) -> Manifest:
        """The program's manifest. Raises UserError where the export does not fit this run."""
        import paddle

        loaded = None if self.platform.compiled is None else library.require()
        abi = None if loaded is None else loaded.metadata.abi
        manifest = check_export(self.config, self.spec, paddle.__version__, abi)
        self._takes_adapters = self._takes_adapters and manifest.adapters is not None
        return manifest

    def _fields(self) -> tuple[Field, ...]:
        return fields_of(self.spec, self.adapters is not None)

    def _adapter_bytes(self) -> int:
        config = self.config.adapters
        if not self._takes_adapters:
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
        pools = empty_pages(self.spec, num_pool_pages(adapters), placement)
        return AdapterStore(pools, plan, base, adapters, placement)

    def _read_prefixes(self) -> dict[str, StoredPrefix]:
        """The prefixes of the flags by name. Raises UserError for one that does not fit."""
        config = self.config
        found = {name: self._read_prefix(path) for name, path in config.adapters.prefixes.items()}
        num_blocks, given = self._num_prefix_blocks(found), config.cache.num_cache_blocks
        if given is not None and num_blocks >= given:
            raise UserError(
                f"the prefixes take {num_blocks} blocks of {config.cache.block_size} tokens, and "
                f"num_cache_blocks is {given} (allowed: {num_blocks + 1} and more); raise "
                "--num_cache_blocks"
            )
        return found

    def _read_prefix(self, path: str | os.PathLike[str]) -> StoredPrefix:
        config = self.config
        return read_prefix(Path(path), self.spec, config.model.dtype, config.max_length)

    def _num_prefix_blocks(self, stored: Mapping[str, StoredPrefix]) -> int:
        block_size = self.config.cache.block_size
        return sum(num_blocks_for(each.num_tokens, block_size) for each in stored.values())

    def _num_draft_blocks(self) -> int:
        """Extra blocks of requests with a prefix, for the draft model's cache."""
        adapters = self.config.adapters
        has_prefixes = bool(adapters.prefix_path) or adapters.allow_adapter_updates
        return self.config.scheduling.batch_size if self.draft and has_prefixes else 0

    def _served_prefix(
        self,
        name: str,
        stored: StoredPrefix,
        scheduler: Scheduler,
        caches: Sequence[LayerCache],
        is_late: bool = False,
    ) -> ServedPrefix:
        """Writes a prefix into pinned blocks; is_late: see Scheduler.pin_prefix."""
        block_size = self.config.cache.block_size
        prefix = scheduler.pin_prefix(name, stored.num_tokens, is_late)
        blocks = np.array(prefix.all_block_ids, np.int32)
        slots = blocks[:, None] * block_size + np.arange(block_size, dtype=np.int32)
        try:
            write_rows(
                self.backend,
                caches,
                stored.values,
                slots.reshape(-1)[: stored.num_tokens].astype(np.int32),
                self.config.kv_format,
                self.config.model.dtype,
                self.platform.place,
            )
        except BaseException:
            scheduler.unpin_prefix(prefix)
            raise
        return prefix

    def _runner(
        self, forward: Forward, copy_blocks: CopyBlocks, target: Runner | None = None
    ) -> Runner:
        """target: the target's runner, for a draft model."""
        fields = fields_with() if target is not None else self._fields()
        if self.device is None:
            network = HostNetwork(forward, self.platform.place, fields)
            return HostRunner(network, HostChooser(self.backend), copy_blocks)
        from predict.device.cuda import left_queued
        from predict.engine.runner.gpu import GpuRunner

        config = self.config
        if config.model.mode == "static" and target is None and self.device.is_plugin:
            forward = Within(left_queued, forward)
        if config.model.batch_invariant:
            forward = Within(library.require().batch_invariant, forward)
        num_drafts = 0 if target is not None else max_draft_rows(config)
        return GpuRunner(
            forward,
            copy_blocks,
            self.device,
            config.max_length,
            config.scheduling.batch_size,
            config.cache.block_size,
            self.spec.vocab_size,
            graph_bytes(config, self.spec),
            max_rows=config.scheduling.batch_size + num_drafts,
            max_drafts=0 if self.draft is None else num_drafts,
            shelf=target.shelf if isinstance(target, GpuRunner) else None,
            fields=fields,
            adapter_pages=0 if self.adapters is None else self.adapters.pool.max_pages,
            # A program takes all of its inputs, and a draft model's steps have no adapters.
            always_adapted=config.model.batch_invariant or config.model.mode == "static",
        )

    def _speculation(
        self, draft_runner: Runner | None, sampler: Sampler, num_blocks: int
    ) -> tuple[Proposer | None, DraftPolicy | None]:
        config = self.config
        if config.speculation.speculate_method is None:
            return None, None
        draft = None
        if draft_runner is not None:
            draft = DraftNetwork(
                runner=draft_runner,
                sampler=Sampler(config.model.seed, sampler.eos_token_ids),
                block_size=config.cache.block_size,
                num_blocks=num_blocks,
                token_budget=config.token_budget,
                follower=None if self.device is None else cast(Follower, draft_runner),
            )
        proposer = proposer_of(
            SpeculativeConfig(
                method=config.speculation.speculate_method,
                max_ngram_size=config.speculation.speculate_max_ngram_size,
                draft=draft,
            )
        )
        costs = CPU_COSTS if self.device is None else GPU_COSTS
        step = 0.0 if self.draft is None else costs.draft + self._draft_cost
        costs = replace(costs, draft=step)
        rows = max_draft_rows(config)
        most = config.speculation.speculate_max_draft_token_num
        return proposer, DraftPolicy(most, rows, costs, proposer.looks_up)

    def _window(self) -> tuple[int, int] | None:
        """Of window verification: the window, and its candidates."""
        config = self.config
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

    def _num_cache_blocks(self, num_pinned: int) -> int:
        draft = None if self.draft is None else self.draft.spec
        if self.device is None:
            free_bytes = self.platform.free_bytes()
            return num_cache_blocks(self.config, self.spec, free_bytes, draft, num_pinned)
        return num_gpu_cache_blocks(
            self.config,
            self.spec,
            devices.memory_info(self.device),
            workspace_bytes(self.config, self.spec, draft),
            draft,
            num_pinned,
        )

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UserError("this model was loaded without a tokenizer; pass token ids")
            prompt = self.tokenizer.encode(prompt)  # a damaged one may make ids of any size
        return prompt_token_ids(prompt, self.spec.vocab_size - 1)

    def samples(
        self, prompt: Prompt, params: SamplingParams, prompt_index: int = 0, streamed: bool = False
    ) -> Samples:
        """The requests of a prompt, checked, not queued. Raises UserError."""
        check_kind(params)
        check_params(params, self.config)
        params = with_token_ids(params, self.tokenizer, self.spec.vocab_size)
        if params.stop_strings and self.tokenizer is None:
            raise UserError(
                "stop needs a text, and this model was loaded without a tokenizer; use "
                "stop_token_ids"
            )
        adapter, prefix = self._named(params.adapter)
        return Samples(
            self._token_ids(prompt),
            params,
            lambda: next(self._ids),
            self.tokenizer,
            self._detokenizer,
            prompt_index,
            streamed,
            self.engine.fail,
            None
            if params.guide is None
            else self._guides().states(params.guide, params.num_samples),
            adapter,
            prefix,
        )

    def _named(self, name: str | None) -> tuple[ServedAdapter | None, ServedPrefix]:
        """The adapter or the prefix of a name; without a name the prefix of such requests."""
        prefix = self.prefixes.get(name or "")  # which another thread may change meanwhile
        if name is None:
            return None, prefix or NO_PREFIX
        if name and prefix is not None:
            return None, prefix
        if self.adapters is not None and name in self.adapters.names:
            return self.adapters.get(name), NO_PREFIX
        raise unknown(name, self._names())

    def _names(self) -> list[str]:
        """Names of adapters and prefixes that requests may use."""
        adapters = [] if self.adapters is None else self.adapters.names
        return [*adapters, *filter(None, list(self.prefixes))]

    def load_adapter(self, name: str, directory: str | os.PathLike[str]) -> None:
        """Reads a LoRA adapter that requests may name from now on. Raises UserError."""
        store = self._updatable()
        if name and name in self.prefixes:
            raise UserError(f"a prefix {name!r} is loaded already; give the adapter another name")
        store.load(name, directory)

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter; requests that run go on to their ends. Raises UserError."""
        self._updatable().unload(name)

    def _updatable(self) -> AdapterStore:
        self._check_updates()
        if self.adapters is None:
            raise UserError(
                "the exported program takes no adapters of requests; export it with --enable_lora"
            )
        return self.adapters

    def _check_updates(self) -> None:
        if not self.config.adapters.allow_adapter_updates:
            raise UserError("adapters are fixed; start with allow_adapter_updates to change them")

    def load_prefix(self, name: str, path: str | os.PathLike[str]) -> None:
        """Writes a tuned prefix into the cache, which requests may name from now on.

        path: a folder or a .npy file, see predict.loading.prefix. Raises UserError, and changes
        nothing, for a prefix that does not fit the model or the free cache.
        """
        self._check_updates()
        check_adapter_name(name)
        if name in self._names():
            raise UserError(f"{name!r} is loaded already; unload it first, or give another name")
        stored = self._read_prefix(path)
        self.platform.make_current()
        scheduler = self.engine.scheduler
        self.prefixes[name] = self._served_prefix(name, stored, scheduler, self._caches, True)

    def unload_prefix(self, name: str) -> None:
        """Forgets a prefix; its blocks are freed when its last request ends. Raises UserError.

        The prefix of requests without a name stays.
        """
        self._check_updates()
        if not name or name not in self.prefixes:
            raise unknown(name, [each for each in self.prefixes if each], "prefix")
        self.engine.scheduler.unpin_prefix(self.prefixes.pop(name))

    def _guides(self) -> Guides:
        """The compiler of guides, made for the first guide."""
        with self._guides_lock:
            if self._compiler is None:
                if self.tokenizer is None:
                    raise UserError(
                        "a guide needs a tokenizer, and this model was loaded without one; leave "
                        "the guide out"
                    )
                self._compiler = Guides(
                    self.tokenizer, self.spec.vocab_size, sorted(self.engine.eos_token_ids)
                )
            return self._compiler

    def default_params(self) -> SamplingParams:
        """The parameters of the model's generation_config.json, or SamplingParams() without one.

        Raises UserError naming file and key.
        """
        found = read_recommended(self.config.model.model_name_or_path)
        for note in found.note if found else ():
            LOG.warning(note)
        return SamplingParams() if found is None else found.params

    def chat_prompt(self, messages: Conversation) -> list[int]:
        """Token ids of a conversation behind which the model answers. Raises UserError."""
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            raise UserError(
                "chat needs a tokenizer with a chat template, and this model has none; give one "
                "with chat_template (a .jinja or .json file), or use generate"
            )
        text = self.tokenizer.chat_template.render(conversation_messages(list(messages), ""))
        return self.tokenizer.encode_prompt(text, templated=True)

    def generate(
        self,
        prompts: Prompt | Sequence[PromptOrError],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_output: Callable[[int, RequestOutput], None] | None = None,
        on_step: Callable[[int, int], None] | None = None,
        skip: Container[int] = (),
    ) -> list[RequestOutput]:
        """Outputs in the prompts' order; of one prompt, given without a list, a list of one.

        A prompt is a text, or token ids, or the error of a tokenizer that failed on it.
        sampling_params: for all, or one for each; None: default_params().
        on_output(index, output) is called the moment all answers to a prompt are finished, in any
        order. on_step(prompt_tokens, output_tokens) is called after each step and its outputs, with
        the tokens of prompts that it took in and of outputs that came: of a beam search at its end.
        skip: indices of prompts that are not run, and have no output; the others sample as if they
        were.
        Raises UserError or ValueError, with nothing queued, when a prompt can never run. An answer
        that fails, in whatever stage, has finish_reason "error" and says why, and the others are
        given. When the engine fails (EngineError) or is interrupted, the unfinished requests are
        aborted.
        """
        groups = self._groups(prompts, sampling_params)
        by_request = {each.request_id: group for group in groups for each in group.requests}
        outputs: list[RequestOutput | None] = [None] * len(groups)
        try:
            running = [group for group in groups if group.prompt_index not in skip]
            self.queue(running)
            failed = [group for group in running if group.is_finished]
            stats = self.engine.scheduler.stats
            while True:
                before = stats.num_prompt_tokens, stats.num_output_tokens
                batch, finished = self.step(running)
                ended = [by_request[request.request_id] for request in finished] + failed
                failed = []
                for group in ended:
                    index = group.prompt_index
                    if group.is_finished and outputs[index] is None:
                        output = outputs[index] = group.output()
                        if on_output:
                            on_output(index, output)
                if batch is None:
                    break
                if on_step:
                    on_step(
                        stats.num_prompt_tokens - before[0], stats.num_output_tokens - before[1]
                    )
        finally:
            self.abort(groups)
        return [output for output in outputs if output is not None]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """The answers to one conversation, or to each of several; see `generate`.

        A conversation is a list of {"role": ..., "content": ...}; the model's chat template makes
        the prompt. Raises UserError without one, and for a conversation that it refuses.
        """
        several = not all(isinstance(message, dict) for message in messages)
        conversations = messages if several else [messages]
        prompts: list[PromptOrError] = []
        for conversation in conversations:
            try:
                prompts.append(self.chat_prompt(conversation))  # type: ignore[arg-type]
            except TokenizerError as error:
                prompts.append(error)
        return self.generate(prompts, sampling_params)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], pooling: Pooling = "last", normalize: bool = True
    ) -> npt.NDArray[np.float32]:
        """Vectors [prompts, hidden size] of texts or token ids: hidden states behind the last norm.

        pooling: "last", the last token's, or "mean", over all tokens. normalize: to length 1. Runs
        to its end, without sampling. Raises UserError for a prompt that cannot run, for a model
        with a prefix (prefix_path), and for an exported program, which has no hidden states.
        """
        check_pooling(pooling)
        if "" in self.prefixes:
            raise UserError("embed takes no tuned prefix; load the model without prefix_path")
        several = cast("Sequence[Prompt]", as_several(prompts))
        token_ids = [self._token_ids(prompt) for prompt in several]
        self.platform.make_current()
        return embed(self.engine, token_ids, pooling, normalize)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[StreamOutput, None, None]:
        """Yields the answers to one prompt, or to several, as they grow.

        Joined texts equal `generate`'s; text that may yet become a stop string waits, and the
        answers of a beam search come whole, at its end. Leaving the iterator early aborts the
        requests. An answer that fails ends with a piece that says so. Where all answers to a prompt
        fail, ValueError is raised once all others have ended.
        """
        groups = self._groups(prompts, sampling_params, streamed=True)
        try:
            self.queue(groups)
            while not all(group.is_finished for group in groups):
                self.step(groups)
                for group in groups:
                    yield from group.pieces()
            for group in groups:
                yield from group.pieces()
            for group in groups:
                if group.error is not None:
                    raise ValueError(group.error)
        finally:
            self.abort(groups)

    def _groups(
        self,
        prompts: Prompt | Sequence[PromptOrError],
        params: SamplingParams | Sequence[SamplingParams] | None,
        streamed: bool = False,
    ) -> list[Samples]:
        several = as_several(prompts)
        params = self.default_params() if params is None else params
        each = params if isinstance(params, Sequence) else [params] * len(several)
        if len(each) != len(several):
            raise UserError(
                f"{len(each)} sampling_params for {len(several)} prompts (allowed: a "
                "SamplingParams for all prompts, or a list with one for each)"
            )
        if streamed:
            for param in each:
                check_streamed(param)
        groups: list[Samples] = []
        for index, (prompt, param) in enumerate(zip(several, each, strict=True)):
            try:
                if isinstance(prompt, TokenizerError):
                    raise prompt
                groups.append(self.samples(prompt, param, index, streamed))
            except TokenizerError as error:
                message = f"prompt {index} failed in stage tokenize: {error}"
                groups.append(FailedPrompt(next(self._ids), index, message))
        return groups

    def queue(self, groups: Sequence[Samples]) -> None:
        """Adds the groups' requests to the engine; raises UserError with none of them queued.

        Waits until their guides are compiled; requests with a wrong guide fail.
        """
        try:
            for group in groups:
                if group.settle_guide():
                    for request in group.requests:
                        self.engine.add(request)
        except ValueError:
            self.abort(groups)
            raise

    def abort(self, groups: Sequence[Samples]) -> None:
        """Ends their unfinished requests."""
        for group in groups:
            for request in group.requests:
                self.engine.abort(request.request_id)

    def step(self, waiting: Iterable[Samples] = ()) -> tuple[ScheduledBatch | None, list[Request]]:
        """Runs a step of what is queued; see Engine.step.

        Raises EngineError where nothing runs any more and one of `waiting` has not ended.
        """
        self.platform.make_current()
        batch, finished = self.engine.step()
        if batch is None and not finished:
            num_waiting = sum(not group.is_finished for group in waiting)
            if num_waiting:
                raise EngineError(f"nothing runs, and {num_waiting} answers have not ended")
        return batch, finished

    def stats(self) -> EngineStats:
        """Counts so far."""
        scheduler = self.engine.scheduler
        pool = None if self.adapters is None else self.adapters.pool
        drafts, masks = self.engine.draft_stats, self.engine.sampler.masks.stats
        return EngineStats(
            num_steps=scheduler.stats.num_steps,
            num_prompt_tokens=scheduler.stats.num_prompt_tokens,
            num_output_tokens=scheduler.stats.num_output_tokens,
            num_prefix_hit_tokens=scheduler.stats.num_prefix_hit_tokens,
            num_preemptions=scheduler.stats.num_preemptions,
            num_draft_tokens=drafts.num_drafts,
            num_accepted_draft_tokens=drafts.num_accepted,
            num_draft_spans=drafts.num_spans,
            num_cache_blocks=scheduler.config.num_blocks,
            num_used_blocks=scheduler.block_manager.num_used_blocks,
            peak_memory_bytes=devices.peak_bytes(self.platform.device),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_mask_steps=masks.num_steps,
            mask_seconds=masks.seconds,
            num_forced_tokens=drafts.num_forced,
            num_adapters=0 if self.adapters is None else len(self.adapters.names),
            num_adapter_pages=0 if pool is None else pool.num_pages,
            num_used_adapter_pages=0 if pool is None else pool.num_used_pages,
            num_adapters_written=0 if pool is None else pool.num_written,
            num_prefixes=len(self.prefixes),
            num_prefix_blocks=scheduler.num_pinned_blocks,
        )

    def __repr__(self) -> str:
        model = self.config.model
        return f"LLM({model.model_name_or_path!r}, {model.dtype}, {model.mode})"
