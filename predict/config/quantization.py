"""Which quantization a run asks for, in PaddleNLP's names.

Imports no Paddle.
"""

from __future__ import annotations

from dataclasses import dataclass

from predict.config.schemes import FP8_BLOCK, GROUP_SIZES, SCHEMES, find
from predict.errors import UserError, one_of
from predict.system.options import Checked, option

FP8_WINT4 = "a8w8_fp8_wint4"
# What a CPU's products of integer weight-only codes do with 16-bit activations.
ACTIVATIONS = ("int8", "float")
DEFAULT_ACTIVATIONS = "int8"
_KNOWN = (*SCHEMES, "a8w8c8", "a8w8c8_fp8", FP8_WINT4)
# PaddleNLP's names, the short ones of its tools, and w4a8.
QUANT_TYPES = (*_KNOWN, *(alias for row in SCHEMES.values() for alias in row.aliases))


@dataclass(frozen=True)
class QuantType:
    """What a quant_type names: the schemes of the linears, and the type of the cache."""

    scheme: str
    cache_type: str | None = None
    expert_scheme: str | None = None  # of experts' linears; None: as the others


def parse_quant_type(name: str) -> QuantType:
    """The quant_type of that name, in any of its spellings, upper or lower case.

    c8 in a name is PaddleNLP's static int8 cache (a8w8c8, a8w8c8_fp8), c16 is none; _wint4 behind
    a8w8_fp8 has experts in 4 bits. Raises UserError naming the known ones.
    """
    word = name.lower()
    cache_type = "static" if "c8" in word else None
    plain = word.replace("c8", "").replace("c16", "")
    if plain == FP8_WINT4:
        return QuantType(find("e4m3", "e4m3").name, cache_type, find("int4").name)
    for row in SCHEMES.values():
        if plain in (row.name, *row.aliases):
            return QuantType(row.name, cache_type)
    raise one_of("quant_type", name, _KNOWN)


def expert_scheme(quant_type: str | None, moe_quant_type: str | None) -> str | None:
    """The scheme that experts have of their own, None for that of the others.

    Raises UserError for an unknown type, and for a moe_quant_type with a cache.
    """
    if moe_quant_type is None:
        return None if quant_type is None else parse_quant_type(quant_type).expert_scheme
    kind = parse_quant_type(moe_quant_type)
    if kind.cache_type is not None:
        raise UserError(
            f"moe_quant_type {moe_quant_type} has a {kind.cache_type} cache, and experts "
            "have none; leave c8 out of it, and set --cachekv_int8_type"
        )
    return kind.expert_scheme or kind.scheme


@dataclass(frozen=True)
class QuantSettings:
    """How linears are quantized while they are read, from flags."""

    scheme: str | None = None  # None: not at all
    expert_scheme: str | None = None  # of experts' linears; None: as the others
    group_size: int = -1  # input features per scale of weight-only schemes; -1: all
    block_size: int = -1  # rows and columns per scale of a8w8_fp8; -1: a row
    head_scheme: str | None = None  # of the LM head; None: it stays dense
    skip: tuple[str, ...] = ()  # linears whose names contain one of these stay dense
    activations: str | None = None  # of ACTIVATIONS; None: the default
    fake: bool = False  # scales that a calibrated checkpoint lacks are made up

    @property
    def keeps_activations(self) -> bool:
        """Whether a CPU's products of weight-only codes leave activations in floating point."""
        return (self.activations or DEFAULT_ACTIVATIONS) == "float"

    @property
    def types(self) -> str:
        """What a benchmark's record says: "none" where weights stay as they are."""
        name, own = self.scheme or "none", self.expert_scheme
        return name if own in (None, self.scheme) else f"{name}, experts {own}"


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig(Checked):
    """How linears are rounded while they are read. Raises UserError for other values."""

    # fmt: off
    quant_type: str | None = option(None,
        "Round the weights of a checkpoint while it is read, without calibration; a quantized "
        "checkpoint says its own type. c8 in a name adds the static int8 cache; _wint4 has experts "
        "in 4 bits.",
        group="Quantization", choices=QUANT_TYPES)
    weightonly_group_size: int = option(-1,
        "Input features per scale of weight-only types (32, 64 or 128); -1 is one group. "
        "weight_only_mxfp4 has 32 always.",
        allowed=GROUP_SIZES)
    weight_block_size: tuple[int, ...] | None = option(None,
        "128,128: a scale per block of a8w8_fp8; when not given, per output feature.",
        allowed=(FP8_BLOCK,))
    lm_head_quant_type: str | None = option(None,
        "Round the LM head too; when not given, it stays in --dtype.",
        choices=tuple(SCHEMES))
    skip_list_names: tuple[str, ...] = option((),
        "Linears with one of these in their name stay in --dtype.")
    weight_only_activations: str | None = option(None,
        "Activations of weight_only_int8 and weight_only_int4 on a CPU, files of such codes "
        f"included: int8, in blocks of 32, or float, as --dtype has them; when not given, "
        f"{DEFAULT_ACTIVATIONS}. AMX takes bfloat16 as it is.",
        allowed=ACTIVATIONS)
    moe_quant_type: str | None = option(None,
        "Round experts to another type; when not given, --quant_type is theirs too.",
        choices=tuple(name for name in QUANT_TYPES if "c8" not in name))
    use_fake_parameter: bool = option(False,
        "To measure speed: scales that a calibrated checkpoint, or --cachekv_int8_type static, "
        "would read from files and does not find are made up. Answers mean nothing then.")
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        types = (self.quant_type, self.moe_quant_type, self.lm_head_quant_type)
        if all(name is None for name in types):
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
        self.settings  # noqa: B018  (its own checks)

    @property
    def settings(self) -> QuantSettings:
        """What the loader reads of it. Raises UserError on an unknown type."""

        def scheme(name: str | None) -> str | None:
            return None if name is None else parse_quant_type(name).scheme

        return QuantSettings(
            scheme=scheme(self.quant_type),
            expert_scheme=expert_scheme(self.quant_type, self.moe_quant_type),
            group_size=self.weightonly_group_size,
            block_size=-1 if self.weight_block_size is None else self.weight_block_size[0],
            head_scheme=scheme(self.lm_head_quant_type),
            skip=self.skip_list_names,
            activations=self.weight_only_activations,
            fake=self.use_fake_parameter,
        )

    @property
    def cache_type(self) -> str | None:
        """The cachekv_int8_type that quant_type implies (PaddleNLP's c8), or None."""
        return None if self.quant_type is None else parse_quant_type(self.quant_type).cache_type
