"""Loading a model: the checkpoint checked, its memory counted, the decoder built.

Every program that needs a network takes it from here: LLM, the export, quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Protocol

from predict.config.engine import EngineConfig
from predict.config.quantization import QuantSettings
from predict.config.schemes import SCHEMES, NotCompiledError
from predict.device import devices
from predict.errors import UserError
from predict.loading.adapters.model import with_adapter
from predict.loading.arrays import listed
from predict.loading.build import DecoderBuilder, expected_tensors
from predict.loading.checkpoint import Checkpoint
from predict.loading.layouts import Layout, layout_of
from predict.loading.layouts._target import Target
from predict.loading.layouts.local import Local, order_of, units
from predict.loading.layouts.online import Online
from predict.loading.losses import check_activations, say_what_groups_would_save
from predict.loading.memory import (
    check_cpu_memory,
    check_gpu_memory,
    loading_bytes,
    mib,
    weight_bytes,
)
from predict.loading.platform import Platform
from predict.loading.sources import (
    CheckpointSource,
    DeviceRandomSource,
    RandomSource,
    WeightSource,
    check_sizes,
    with_stored_head,
)
from predict.models import spec_of, weight_names, with_family
from predict.nn.cuts import linears_of_features, local_plan, local_spec
from predict.nn.decoder import Decoder
from predict.nn.hf_config import ConfigReader
from predict.nn.plans import ExpertsPlan, LinearPlan, WeightPlan, plan_weights
from predict.nn.shares import Ranks
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames
from predict.system.notes import LOG


@dataclass(frozen=True)
class Weights:
    """A checkpoint whose names, shapes and schemes were checked; it is not read yet."""

    config: EngineConfig
    plan: WeightPlan
    source: WeightSource
    layout: Layout
    platform: Platform
    names: WeightNames
    layout_as: Callable[[QuantSettings], Layout]  # the one that other flags would give
    takes_turns: bool | None = False  # see Checkpoint

    @property
    def spec(self) -> DecoderSpec:
        """The network, whose cache is counted."""
        return self.plan.spec

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights as they will lie in memory."""
        return weight_bytes(self.plan, self.layout.scheme, self.config.model.dtype)

    @property
    def loading_bytes(self) -> int:
        """Bytes of a GPU that `read` takes beside the weights, roughly."""
        return loading_bytes(self.plan, self.layout.scheme, self.layout.stored_bytes)

    def read(self, on_layer: Callable[[int], None] | None = None) -> Decoder:
        """The decoder, its weights in place. Called once. on_layer: called with each that is."""
        try:
            decoder = DecoderBuilder(
                self.plan,
                self.source,
                self.layout,
                self.config.model.dtype,
                self.platform.compiled,
                self.config.max_length,
                on_layer,
                place=self.platform.place,
                kv_format=self.config.kv_format,
                gpu=self.platform.gpu,
                keeps_activations=self.config.quantization.settings.keeps_activations,
            ).build()
        finally:
            self.source.close()
        gpu = self.platform.gpu
        if gpu is not None and gpu.is_plugin:
            devices.release_cached(gpu)  # what linears were made from is no part of the weights
        return decoder


def open_weights(
    config: EngineConfig, spec: DecoderSpec, reader: ConfigReader, platform: Platform
) -> Weights:
    """The checkpoint of `config`. Raises UserError where it does not fit the device or flags.

    For weights that the CPU's compiled operators do not compute with, its platform has the plain
    ones where `config` leaves that open.
    """
    check_positions(config, spec, reader)
    for note in dict.fromkeys(reader.notes):
        LOG.warning(note)
    try:
        weights = find_weights(config, spec, reader, platform)
        check_schemes(weights)
    except NotCompiledError as error:
        if config.model.inference_model is not None:
            raise
        LOG.warning(f"{error}. The plain-Paddle operators are in use, which are far slower")
        weights = find_weights(config, spec, reader, replace(platform, inference_model=False))
        check_schemes(weights)
    if isinstance(weights.source, CheckpointSource):
        names = weights.names
        if spec.vision is not None:  # whose tensors are read beside these
            names = replace(names, beside_text=())
        if config.speculation.speculate_method == "mtp":  # which reads them by itself
            names = replace(names, drafting=())
        say_what_is_left_out(names, weights.source.checkpoint)
    check_activations(config, weights.platform, weights.plan, weights.layout)
    say_what_groups_would_save(weights.plan, weights.layout, weights.source)
    return weights


def find_weights(
    config: EngineConfig, spec: DecoderSpec, reader: ConfigReader, platform: Platform
) -> Weights:
    """See open_weights; whether their schemes run there is not checked."""
    gpu = platform.gpu
    settings = config.quantization.settings
    names = weight_names(reader)
    share = spec.share
    spec = spec if share is None else share.whole
    source: WeightSource
    turns: bool | None = False  # random weights have no order
    if config.model.load_format == "dummy":
        plan = plan_weights(spec, names)
        source = (
            RandomSource(config.model.seed)
            if gpu is None
            else DeviceRandomSource(config.model.seed, config.model.dtype, gpu)
        )

        def layout_as(settings: QuantSettings) -> Layout:
            return Online(source, settings, plan)

        layout = layout_as(settings)
        expected_tensors(plan, layout)  # whether the group size divides
    else:
        checkpoint = Checkpoint(config.model.model_name_or_path)
        names, turns = names.found_in(checkpoint.tensors), checkpoint.takes_turns
        spec = with_stored_head(spec, names, checkpoint)
        check_sizes(spec, names, checkpoint)
        plan = plan_weights(spec, names)
        if config.model.lora_path is not None:
            checkpoint, plan = with_adapter(config.model.lora_path, checkpoint, plan, names, reader)
        source = CheckpointSource(checkpoint)
        if gpu is not None:
            from predict.loading.upload import DeviceCheckpointSource

            source = DeviceCheckpointSource(checkpoint, config.model.dtype, gpu)
        target = target_of(config, platform)

        def layout_as(settings: QuantSettings) -> Layout:
            return layout_of(reader, checkpoint, source, settings, plan, target)

        layout = layout_as(settings)
        checkpoint.check(expected_tensors(plan, layout), (*plan.ignored, *layout.ignored))
    whole = Weights(config, plan, source, layout, platform, names, layout_as, turns)
    return whole if share is None else _of_rank(whole, share.ranks)


def _of_rank(whole: Weights, ranks: Ranks) -> Weights:
    """A rank's weights. Raises UserError where they cannot be cut so."""
    unit = units(whole.layout, linears_of_features(whole.plan))
    spec = local_spec(
        whole.plan.spec, ranks.rank, ranks.size, unit=unit, whole_experts=ranks.whole_experts
    )
    return replace(
        whole,
        plan=local_plan(whole.plan, spec, cache(partial(order_of, whole.layout))),
        layout=Local(whole.layout),
        layout_as=lambda settings: Local(whole.layout_as(settings)),
    )


def target_of(config: EngineConfig, platform: Platform) -> Target:
    """What weights of this config are for."""
    capability = None
    if platform.gpu is not None:
        capability = devices.driver_info().gpus[platform.gpu.index].capability
    model = config.model
    return Target(model.device, platform.compiled is not None, model.dtype, capability)


def check_schemes(weights: Weights) -> None:
    """See check_linears."""
    check_linears(weights.plan, weights.layout, target_of(weights.config, weights.platform))


def check_linears(plan: WeightPlan, layout: Layout, target: Target) -> None:
    """Raises UserError for a linear whose scheme does not run where the weights go.

    Of a layer's experts all have one.
    """

    def check(linear: LinearPlan) -> str:
        name = layout.scheme(linear)
        target.check(name, layout.group_size(linear), linear.in_features)
        return name

    for block in plan.blocks():
        for slot in block.slots.values():
            if isinstance(slot, LinearPlan):
                check(slot)
            if not isinstance(slot, ExpertsPlan):
                continue
            first, *others = slot.experts
            wanted = check(first)
            for expert in others:
                if (name := check(expert)) != wanted:
                    raise UserError(
                        f"{expert.prefixes[0]} would be {name}, and {first.prefixes[0]} {wanted}; "
                        "quantize, or skip, all experts of a layer alike"
                    )
    check(plan.head)


def say_what_is_left_out(names: WeightNames, checkpoint: Checkpoint) -> None:
    """Logs which parts of a model stay unread, and why, where there are any."""
    reasons = {
        names.beside_text: "text alone goes in and comes out",
        names.drafting: "these layers draft tokens, for --speculate_method mtp",
    }
    for names_of, why in reasons.items():
        unread = {part: sum(part in tensor for tensor in checkpoint.tensors) for part in names_of}
        parts = [f"{part.strip('.')} ({count} tensors)" for part, count in unread.items() if count]
        if parts:
            LOG.info(f"{checkpoint.directory}: {' and '.join(parts)} stay unread; {why}")
    if left := checkpoint.files_left:
        LOG.info(f"{checkpoint.directory}: {listed(left)} beside the model's own stay unread")


def check_positions(config: EngineConfig, spec: DecoderSpec, reader: ConfigReader) -> None:
    """Raises UserError where max_length is more than the rows of a table of learned positions."""
    rows, length = spec.num_learned_positions, config.max_length
    if rows is not None and length > rows:
        raise UserError(
            f"max_length is {length}, and {reader.path} has learned positions of {rows} tokens; "
            f"use --max_length {rows} or less"
        )


def load_decoder(
    config: EngineConfig,
    spec: DecoderSpec,
    reader: ConfigReader,
    platform: Platform,
    on_layer: Callable[[int], None] | None = None,
) -> tuple[Decoder, DecoderSpec]:
    """Reads the checkpoint of `config` into a decoder, once it is checked. See open_weights.

    With the network as the checkpoint has it, of a rank's spec a rank's.
    """
    weights = open_weights(config, spec, reader, platform)
    check_memory([weights], with_cache=False)
    return weights.read(on_layer), weights.plan.spec


class Opened(Protocol):
    """Weights that are not read yet: a model's, or those of what drafts for it."""

    @property
    def spec(self) -> DecoderSpec | None:
        """The network, whose cache is counted; None where it has none."""

    @property
    def num_bytes(self) -> int:
        """See Weights."""

    @property
    def loading_bytes(self) -> int:
        """See Weights."""


def check_memory(opened: Sequence[Opened], with_cache: bool = True, adapter_bytes: int = 0) -> None:
    """Raises UserError with the arithmetic where there is no room for a model and its draft's.

    opened: the model's weights, then those of its drafter where there is one. with_cache:
    whether a CPU must hold the cache too, which an export does without. adapter_bytes: of the pages
    beside the weights.
    """
    try:
        _check_memory(opened, with_cache, adapter_bytes)
    except UserError as error:
        fits = _what_fits(opened, with_cache, adapter_bytes)
        raise UserError(f"{error}{fits}") from None


def _check_memory(opened: Sequence[Opened], with_cache: bool, adapter_bytes: int) -> None:
    first, *others = opened
    assert isinstance(first, Weights)
    needed = sum(weights.num_bytes for weights in opened) + adapter_bytes
    draft = others[0].spec if others else None
    gpu = first.platform.gpu
    if gpu is None:
        free = first.platform.free_bytes()
        check_cpu_memory(first.config, first.plan.spec, free, needed, draft, with_cache)
        return
    beside = max(weights.loading_bytes for weights in opened)
    check_gpu_memory(first.config, first.plan.spec, devices.memory_info(gpu), needed, draft, beside)


def _what_fits(opened: Sequence[Opened], with_cache: bool, adapter_bytes: int) -> str:
    """The end of a message: which quant_types there is room for, where one may be chosen."""
    first, *others = opened
    assert isinstance(first, Weights)
    if not first.layout.is_rounded:
        return ""
    fitting = []
    for name in SCHEMES:
        settings = replace(first.config.quantization.settings, scheme=name, expert_scheme=None)
        try:
            weights = replace(first, layout=first.layout_as(settings))
            check_schemes(weights)
            expected_tensors(weights.plan, weights.layout)  # whether its groups divide
            _check_memory([weights, *others], with_cache, adapter_bytes)
        except UserError:
            continue
        fitting.append(f"{name} ({mib(weights.num_bytes)} MiB of weights)")
    if not fitting:
        return "; no --quant_type makes it fit"
    own = ", each without --moe_quant_type" * (first.config.quantization.moe_quant_type is not None)
    return f"; it fits with --quant_type {' or '.join(fitting)}{own}"


def plan_of(spec: DecoderSpec, reader: ConfigReader) -> tuple[WeightPlan, WeightNames]:
    """The plan and the names of a network whose checkpoint is not there: its family's."""
    names = weight_names(reader).found_in(())
    return plan_weights(spec, names), names


def read_spec(
    directory: str | Path, model_type: str | None = None
) -> tuple[DecoderSpec, ConfigReader]:
    """The network that a directory's config.json describes. model_type: where it names none."""
    reader = with_family(ConfigReader.from_dir(directory), model_type)
    return spec_of(reader), reader
