"""The frozen configs that everything is built from, and the rules by which flags become them.

Imports no Paddle.
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from predict.config.quantization import (
    CACHE_TYPES,
    FP8_BLOCK,
    GROUP_SIZES,
    KV_FORMATS,
    QuantSettings,
    parse_quant_type,
)
from predict.config.speculation import check_features, check_method
from predict.device.devices import kind_of
from predict.errors import UserError, nearest, one_of, quoted
from predict.request import SamplingParams
from predict.system.files import check_name
from predict.system.ranges import RANGES, check_range

if TYPE_CHECKING:
    pass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPES = tuple(DTYPE_BYTES)
MODES = ("dynamic", "static")
ATTENTIONS = ("reserved", "block", "append")
BLOCK_SIZES = (16, 32, 64, 128)
LOAD_FORMATS = ("auto", "dummy")


class _Type(NamedTuple):
    """Fields declared alike: what is allowed, and the value taken in, None where it is another."""

    allowed: str
    taken: Callable[[Any], Any]


def _text(value: Any) -> str | None:
    return os.fsdecode(value) if isinstance(value, (str, os.PathLike)) else None


def _texts(value: Any) -> tuple[str, ...] | None:
    fits = isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)
    return tuple(value) if fits else None


def _number(kind: type, to: type) -> Callable[[Any], Any]:
    """NumPy's numbers are taken as Python's; a boolean is none."""
    return lambda value: (
        to(value) if isinstance(value, kind) and not isinstance(value, bool) else None
    )


_TYPES: Mapping[str, _Type] = {
    "str": _Type("a text", _text),
    "bool": _Type("True or False", lambda value: value if isinstance(value, bool) else None),
    "int": _Type("a whole number", _number(numbers.Integral, int)),
    "float": _Type("a number", _number(numbers.Real, float)),
    "tuple[str, ...]": _Type("a tuple of texts", _texts),
    "tuple[int, ...]": _Type(
        "a tuple of whole numbers",
        lambda value: tuple(value) if isinstance(value, (list, tuple)) else None,
    ),
}
# Fields that name files or folders.
_PATHS = ("model_name_or_path", "model_prefix", "chat_template", "draft_model_name_or_path")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What `LLM` is built from: the model, its device, and the limits that size cache and batch.

    Raises UserError (a ValueError) when a field is outside its range.
    """

    model_name_or_path: str
    dtype: str = "float32"  # float32 | bfloat16 | float16
    device: str = "cpu"  # cpu | gpu | gpu:N
    mode: str = "dynamic"  # dynamic | static
    model_prefix: str = "model"  # stem of the exported program
    inference_model: bool = False  # compiled operators; False: plain-Paddle ones
    attention: str = "reserved"  # reserved | block (--block_attn) | append (--append_attn)
    block_size: int = 64  # tokens per cache block
    batch_size: int = 1  # sequences decoded together
    src_length: int = 1024  # tokens of the prompt
    max_length: int = 2048  # tokens of the prompt and the output together
    max_num_batched_tokens: int | None = None  # tokens per step; None: `token_budget` decides
    prefix_caching: bool = True  # only effective when attention is not reserved
    chunked_prefill: bool = True
    batch_invariant: bool = False  # on a GPU: every row's sums in an order of their own
    gpu_memory_utilization: float = 0.9  # share of the device's memory for weights and cache
    num_cache_blocks: int | None = None  # None: from the memory that is free
    load_format: str = "auto"  # auto | dummy (seeded random weights)
    quant_type: str | None = None  # None: as the checkpoint has it; else rounded while it is read
    weightonly_group_size: int = -1  # input features per scale of weight-only types; -1: all
    weight_block_size: tuple[int, ...] | None = None  # of a8w8_fp8: (128, 128); None: rows
    lm_head_quant_type: str | None = None  # None: the LM head stays dense
    skip_list_names: tuple[str, ...] = ()  # linears with one of these in their name stay dense
    cachekv_int8_type: str | None = None  # dynamic | static | fp8 | int4
    speculate_method: str | None = None  # a module of predict.speculative
    speculate_max_draft_token_num: int = 1  # drafts per sequence and step
    speculate_max_ngram_size: int = 1  # tokens
    # Either one: TopP + window verification, see predict.engine.window; neither: exact.
    speculate_verify_window: int | None = None  # drafts
    speculate_max_candidate_len: int | None = None  # tokens
    draft_model_name_or_path: str | None = None  # directory; of speculate_method draft_model
    draft_model_quant_type: str | None = None  # as quant_type
    seed: int = 0
    chat_template: str | None = None  # None: the tokenizer's own; none: off; else a file or folder

    def __post_init__(self) -> None:
        self._check_types()
        choices: tuple[tuple[str, tuple[str, ...]], ...] = (
            ("dtype", DTYPES),
            ("mode", MODES),
            ("attention", ATTENTIONS),
            ("load_format", LOAD_FORMATS),
        )
        for name, allowed in choices:
            if getattr(self, name) not in allowed:
                raise one_of(name, getattr(self, name), allowed)
        kind_of(self.device)
        if self.block_size not in BLOCK_SIZES:
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise UserError(
                f"block_size {self.block_size} is not supported (allowed: {sizes}); "
                "set --block_size to one of these"
            )
        self._check_quantization()
        self._check_speculation()

    def _check_types(self) -> None:
        """Raises UserError for a field of another type than it is declared, or out of its range."""
        for each in fields(self):
            name, value = each.name, getattr(self, each.name)
            kind, _, optional = str(each.type).partition(" | ")
            if value is None and optional:
                continue
            taken = _TYPES[kind].taken(value)
            if taken is None:
                raise UserError(
                    f"{name} {quoted(value)} is not supported (allowed: {_TYPES[kind].allowed}"
                    f"{', or None' * bool(optional)})"
                )
            object.__setattr__(self, name, taken)
            if name in RANGES:
                check_range(name, taken, name)
            if name in _PATHS:
                check_name(name, taken)

    def _check_speculation(self) -> None:
        drafts = self.speculate_method == "draft_model"
        if drafts and self.draft_model_name_or_path is None:
            raise UserError(
                "speculate_method draft_model needs --draft_model_name_or_path: the directory of a "
                "smaller model with the same tokens"
            )
        for name in ("draft_model_name_or_path", "draft_model_quant_type"):
            if not drafts and getattr(self, name) is not None:
                raise UserError(
                    f"--{name} {getattr(self, name)} is for --speculate_method draft_model, and "
                    f"speculate_method is {self.speculate_method}; leave one of the two out"
                )
        if self.draft_model_quant_type is not None:
            brings = parse_quant_type(self.draft_model_quant_type).cache_type
            if brings:
                raise UserError(
                    f"draft_model_quant_type {self.draft_model_quant_type} has a {brings} cache; "
                    "the draft model's cache is dense: use the type without c8"
                )
        for name in ("speculate_verify_window", "speculate_max_candidate_len"):
            if self.speculate_method is None and getattr(self, name) is not None:
                raise UserError(
                    f"--{name} says how drafts are verified, and there are none; add "
                    "--speculate_method, or leave it out"
                )
        if self.speculate_method is None:
            return
        check_method(self.speculate_method)
        check_features(self.speculate_method, vars(self))

    def _check_quantization(self) -> None:
        if self.cachekv_int8_type not in (None, *CACHE_TYPES):
            raise one_of("cachekv_int8_type", self.cachekv_int8_type, CACHE_TYPES)
        if self.weightonly_group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise UserError(
                f"weightonly_group_size {self.weightonly_group_size} is not supported "
                f"(allowed: {sizes}; -1 is one scale per output feature)"
            )
        if self.weight_block_size not in (None, FP8_BLOCK):
            raise UserError(
                f"weight_block_size {self.weight_block_size} is not supported (allowed: 128,128); "
                "leave it out for one scale per output feature"
            )
        if self.quant_type is not None:
            brings = parse_quant_type(self.quant_type).cache_type
            if brings and self.cachekv_int8_type not in (None, brings):
                raise UserError(
                    f"quant_type {self.quant_type} has a {brings} cache, and cachekv_int8_type is "
                    f"{self.cachekv_int8_type}; give one of the two"
                )
        elif self.lm_head_quant_type is None:
            for name, none in (
                ("weightonly_group_size", -1),
                ("weight_block_size", None),
                ("skip_list_names", ()),
            ):
                if getattr(self, name) != none:
                    raise UserError(
                        f"--{name} says how weights are rounded, and nothing asks for that; add "
                        f"--quant_type, or leave --{name} out"
                    )
        self.quantization  # noqa: B018  (its own checks)

    @property
    def quantization(self) -> QuantSettings:
        """How linears are quantized while they are read. Raises UserError on an unknown type."""

        def scheme(name: str | None) -> str | None:
            return None if name is None else parse_quant_type(name).scheme

        return QuantSettings(
            scheme=scheme(self.quant_type),
            group_size=self.weightonly_group_size,
            block_size=-1 if self.weight_block_size is None else self.weight_block_size[0],
            head_scheme=scheme(self.lm_head_quant_type),
            skip=self.skip_list_names,
        )

    @property
    def verifies_by_window(self) -> bool:
        """Whether drafts of sampled requests stand by TopP + window verification."""
        return (self.speculate_verify_window, self.speculate_max_candidate_len) != (None, None)

    @property
    def kv_format(self) -> str:
        """The row of predict.nn.cache_formats that the cache has."""
        brought = parse_quant_type(self.quant_type).cache_type if self.quant_type else None
        return KV_FORMATS[self.cachekv_int8_type or brought]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EngineConfig:
        """The config with these fields; an unknown key is a UserError naming the nearest field."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                guess = nearest(name, known)
                hint = f"; did you mean {guess}?" if guess else f" (known: {', '.join(known)})"
                raise UserError(f"EngineConfig has no field {name!r}{hint}")
        return cls(**values)

    @property
    def reserve_full(self) -> bool:
        """Whether a sequence takes its whole cache at admission (neither block nor append)."""
        return self.attention == "reserved"

    @property
    def effective_prefix_caching(self) -> bool:
        """Whether full blocks are shared between requests; a reserved cache shares nothing."""
        return self.prefix_caching and not self.reserve_full

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks that a sequence of `max_length` tokens fills."""
        return -(-self.max_length // self.block_size)

    @property
    def token_budget(self) -> int:
        """Tokens per step: every decoding sequence gets one, the rest goes to prompts.

        The default keeps GEMMs large enough to be bound by arithmetic and short enough that a
        decoding neighbour does not wait for a whole long prompt.
        """
        if self.max_num_batched_tokens is not None:
            return max(self.max_num_batched_tokens, self.batch_size)
        default = 512 if self.device == "cpu" else 8192
        return max(default, self.batch_size) if self.chunked_prefill else self.max_length


def check_params(params: SamplingParams, config: EngineConfig) -> None:
    """Raises UserError where an engine of `config` cannot do what `params` ask for."""
    if params.num_beams > config.batch_size:
        raise UserError(
            f"num_beams {params.num_beams} is more than the batch holds (allowed: 1 to "
            f"{config.batch_size}, which is batch_size: each beam is a sequence of it); lower "
            "num_beams or raise batch_size"
        )
    if config.speculate_method is not None:
        check_features(config.speculate_method, vars(config), params)
