"""How linears lie in checkpoints, one module per layout, and which of them a directory has.

A layout is recognised from config.json alone. `online` rounds a dense checkpoint while it is read.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from predict.config.engine import EngineConfig
from predict.config.quantization import QuantSettings, expert_scheme, parse_quant_type
from predict.config.schemes import scheme_info
from predict.errors import UserError
from predict.gguf.files import gguf_of
from predict.loading.checkpoint import Checkpoint
from predict.loading.layouts._target import Target
from predict.loading.sources import WeightSource
from predict.nn.hf_config import ConfigReader
from predict.nn.plans import LinearPlan, WeightPlan
from predict.schemes import Quantized
from predict.system.files import read_json_object
from predict.system.settings import refuse_unread

__all__ = ["Layout", "cache_scheme", "layout_of", "with_stored_cache"]


class Layout(Protocol):
    """Where the linears of one checkpoint come from."""

    ignored: tuple[str, ...]  # parts of names of tensors that need no reading
    is_rounded: bool  # as flags ask: the checkpoint holds floats, or codes that stand for some

    def scheme(self, plan: LinearPlan) -> str:
        """The name of the linear's scheme; raises UserError where its parts do not agree."""

    def group_size(self, plan: LinearPlan) -> int:
        """Input features of the linear that share a scale; -1: all of them."""

    def expected(self, plan: LinearPlan) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the linear's tensors in the checkpoint, biases apart."""

    def read(self, plan: LinearPlan) -> Quantized:
        """The linear's weight, all parts stacked; of a dense one the codes are the values."""

    def bias(self, plan: LinearPlan) -> Any:
        """[out_features], or None."""

    def stored_bytes(self, plan: LinearPlan) -> int:
        """Bytes of a value that lies on a GPU before it is rounded; 0 where codes are stored."""


class StoredLayout(Layout, Protocol):
    """A layout of a checkpoint that is quantized already."""

    schemes: frozenset[str]  # of its quantized linears
    reorders: bool  # it reads codes whose rows change places


# By config.json's quant_method: module, class.
STORED = {
    "gptq": ("gptq", "Gptq"),
    "awq": ("awq", "Awq"),
    "compressed-tensors": ("compressed_tensors", "CompressedTensors"),
    "fp8": ("fp8", "Fp8"),
    "fbgemm_fp8": ("fp8", "Fp8"),
    "mxfp4": ("mxfp4", "Mxfp4"),
}
PADDLENLP = ("paddlenlp", "PaddleNlp")
PADDLENLP_READ = "quant_type moe_quant_type"
# Of shift and smooth the tensors say; the others are of training, or say how scales were found.
PADDLENLP_UNREAD = """
    shift smooth shift_smooth_all_linears weight_quantize_algo quant_round_type llm_int8_threshold
    weight_blocksize weight_double_quant_block_size weight_quant_method act_quant_method dtype"""
# Files of tools that quantize, read where config.json has no quantization_config: their method.
SIDE_CARS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def layout_of(
    reader: ConfigReader,
    checkpoint: Checkpoint,
    source: WeightSource,
    settings: QuantSettings,
    plan: WeightPlan,
    target: Target | None = None,
) -> Layout:
    """The layout that config.json announces, else a dense one, rounded where `settings` ask for it.

    target: what the weights are for; codes of a GGUF file, and of MXFP4, are kept where that can
    hold them. Raises UserError where config.json names an unknown layout, or contradicts the
    settings.
    """
    target = target or Target()
    from predict.loading.layouts.online import Online

    if gguf_of(checkpoint.directory) is not None:
        from predict.loading.layouts import gguf

        return gguf.Gguf(checkpoint, source, settings, plan, target)
    config = quantization_config(reader)
    if config is None:
        return Online(source, settings, plan)
    where = f"{reader.path}: quantization_config"
    method = config.get("quant_method")
    if method is None and config.get("quant_type") is not None:
        refuse_unread(config, PADDLENLP_READ, PADDLENLP_UNREAD, where)
        if stored_method(reader, checkpoint) is None:
            kind, own = str(config["quant_type"]), config.get("moe_quant_type")
            scheme = parse_quant_type(kind).scheme
            experts = expert_scheme(kind, str(own) if own else None)  # PaddleNLP's "" is none
            _check_same(settings, frozenset({scheme, experts or scheme}), where)
            return Online(source, replace(settings, scheme=scheme, expert_scheme=experts), plan)
        module, name = PADDLENLP
    elif isinstance(method, str) and method in STORED:
        module, name = STORED[method]
    else:
        raise UserError(
            f"{where} has quant_method {str(method)[:80]!r}, which is not supported (known: "
            f"{', '.join(STORED)}, and PaddleNLP's quant_type); use an unquantized checkpoint and "
            "--quant_type"
        )
    made = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    layout: StoredLayout = made(config, where, checkpoint, source, settings, plan, target)
    if not layout.is_rounded:
        _check_same(settings, layout.schemes, where)
    if not layout.reorders:
        _check_stored_as_used(layout, plan, where)
    return layout


def stored_method(reader: ConfigReader, checkpoint: Checkpoint) -> str | None:
    """What config.json says that the checkpoint is quantized by; None where it holds floats."""
    config = quantization_config(reader)
    if config is None:
        return None
    method, kind = config.get("quant_method"), config.get("quant_type")
    if method is not None or kind is None:
        return str(method)
    # PaddleNLP rounds weight-only types while it reads them, as we do.
    rounds = scheme_info(parse_quant_type(str(kind)).scheme).has_groups
    files = ("act_scales.json", "act_scales_0.json")
    is_calibrated = any((checkpoint.directory / file).exists() for file in files)
    return None if rounds and not is_calibrated else str(kind)


def _check_stored_as_used(layout: Layout, plan: WeightPlan, where: str) -> None:
    """Raises UserError for a quantized matrix whose rows or columns would have to change places."""
    from predict.loading.layouts.online import dense_tensors

    for linear in (*plan.linears(), plan.head):
        if linear.is_stored_otherwise and layout.expected(linear) != dense_tensors(linear):
            raise UserError(
                f"{where}: {linear.prefixes[0]} is quantized, and models of model_type "
                f"{plan.spec.model_type} store it in another order than it is used; use the "
                "unquantized checkpoint and --quant_type"
            )


def with_stored_cache(config: EngineConfig, reader: ConfigReader) -> EngineConfig:
    """The config, with the cache type that the checkpoint brings along.

    Raises UserError where --cachekv_int8_type asks for another one.
    """
    brings = cache_scheme(reader)
    asked = config.cache.cachekv_int8_type
    if brings is None or asked == brings:
        return config
    if asked is not None:
        raise UserError(
            f"{reader.path}: quantization_config brings a model whose cache is {brings}, and "
            f"--cachekv_int8_type asks for {asked}; leave it out"
        )
    return config.changed(cachekv_int8_type=brings)


def cache_scheme(reader: ConfigReader) -> str | None:
    """The --cachekv_int8_type that config.json brings, or None.

    By PaddleNLP's quant_type (a8w8c8), or compressed-tensors' kv_cache_scheme. Raises UserError
    where no cache here is like that one.
    """
    stored = quantization_config(reader) or {}
    if stored.get("quant_method") is None:
        kind = stored.get("quant_type")
        return None if kind is None else parse_quant_type(str(kind)).cache_type
    scheme = stored.get("kv_cache_scheme")
    if scheme is None:
        return None
    wanted = {"num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
    kinds = {"float": "fp8", "int": "static"}
    if not isinstance(scheme, Mapping):
        raise UserError(f"{reader.path}: kv_cache_scheme is {scheme!r}; it must be an object")
    given = {name: scheme.get(name, value) for name, value in wanted.items()}
    kind = scheme.get("type", "int")
    if given != wanted or kind not in kinds:
        raise UserError(
            f"{reader.path}: kv_cache_scheme {dict(scheme)} is not supported (allowed: type float "
            f"or int, {', '.join(f'{k} {v}' for k, v in wanted.items())}); remove it from "
            "config.json and choose a cache by --cachekv_int8_type"
        )
    return kinds[str(kind)]


def quantization_config(reader: ConfigReader) -> Mapping[str, Any] | None:
    """config.json's quantization_config, or that of a tool's own file beside a config.json without.

    None where the checkpoint is not quantized.
    """
    config = reader.values.get("quantization_config") or reader.values.get("compression_config")
    if config is None and reader.path.name == "config.json":
        beside = (reader.path.with_name(name) for name in SIDE_CARS)
        path = next((path for path in beside if path.exists()), None)
        if path is not None:
            return {"quant_method": SIDE_CARS[path.name], **read_json_object(path)}
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise UserError(f"{reader.path}: quantization_config is {config!r}; it must be an object")
    return config


def _check_same(settings: QuantSettings, schemes: frozenset[str], where: str) -> None:
    """Raises UserError where flags ask for something else than the checkpoint holds."""
    stored = " and ".join(sorted(schemes))
    for flag, asked in (
        ("quant_type", settings.scheme),
        ("moe_quant_type", settings.expert_scheme),
    ):
        if asked is not None and asked not in schemes:
            raise UserError(
                f"{where} says that the weights are {stored}, and --{flag} asks for {asked}; leave "
                f"--{flag} out, or use the unquantized checkpoint"
            )
    given = {
        "weightonly_group_size": settings.group_size != -1,
        "weight_block_size": settings.block_size != -1,
        "skip_list_names": bool(settings.skip),
    }
    names = [f"--{name}" for name, there in given.items() if there]
    if names:
        raise UserError(
            f"{where} says that the weights are stored as {stored}, which "
            f"{' and '.join(names)} cannot change; leave {' and '.join(names)} out"
        )
