"""Which quantization a run asks for: PaddleNLP's names, and the one table of what goes together.

Imports no Paddle.
"""

from __future__ import annotations

from dataclasses import dataclass

from predict.errors import UserError, one_of

SCHEMES = ("weight_only_int8", "weight_only_int4", "a8w8", "a8w8_fp8", "w4a8")
# Other spellings, of PaddleNLP's tools and of the field.
ALIASES = {
    "wint8": "weight_only_int8",
    "w8a16": "weight_only_int8",
    "wint4": "weight_only_int4",
    "w4a16": "weight_only_int4",
    "w8a8": "a8w8",
    "w8a8_fp8": "a8w8_fp8",
    "fp8": "a8w8_fp8",
    "a8w4": "w4a8",
}
CACHE_TYPES = ("dynamic", "static", "fp8", "int4")  # of --cachekv_int8_type
KV_FORMATS = {
    None: "dense",
    "static": "int8_static",
    "dynamic": "int8_dynamic",
    "fp8": "fp8",
    "int4": "int4",
}
GROUP_SIZES = (-1, 32, 64, 128)  # input features per scale; -1 is all of them
GROUPED = ("weight_only_int8", "weight_only_int4", "w4a8")
FP8_BLOCK = (128, 128)


@dataclass(frozen=True)
class QuantType:
    """What a quant_type names: the scheme of the linears, and the cache type it brings along."""

    scheme: str
    cache_type: str | None = None


def parse_quant_type(name: str) -> QuantType:
    """The quant_type of that name, in any of its spellings, upper or lower case.

    c8 in a name is PaddleNLP's static int8 cache (a8w8c8, a8w8c8_fp8), c16 is none.
    Raises UserError naming the known ones.
    """
    word = name.lower()
    if word == "a8w8_fp8_wint4":
        raise UserError(
            "quant_type a8w8_fp8_wint4 stores expert weights in 4 bits, and models with experts "
            "are not available in this release; use --quant_type a8w8_fp8"
        )
    cache_type = "static" if "c8" in word else None
    plain = word.replace("c8", "").replace("c16", "")
    plain = ALIASES.get(plain, plain)
    if plain not in SCHEMES:
        raise one_of("quant_type", name, (*SCHEMES, "a8w8c8", "a8w8c8_fp8"))
    return QuantType(plain, cache_type)


@dataclass(frozen=True)
class QuantSettings:
    """How linears are quantized while they are read, from flags."""

    scheme: str | None = None  # None: not at all
    group_size: int = -1  # input features per scale of weight-only schemes; -1: all
    block_size: int = -1  # rows and columns per scale of a8w8_fp8; -1: a row
    head_scheme: str | None = None  # of the LM head; None: it stays dense
    skip: tuple[str, ...] = ()  # linears whose names contain one of these stay dense


@dataclass(frozen=True)
class Support:
    """One row: where a scheme runs. "reference" is plain Paddle, on the CPU."""

    reference: bool
    cpu: bool  # the compiled operators
    gpu: bool
    instead: str  # what to use where it does not run


# dtype: every scheme takes activations in float32, bfloat16 and float16. mode: static as dynamic.
# Caches: every format with every scheme. What is left to say is the device.
SUPPORT: dict[str, Support] = {
    "dense": Support(True, True, True, ""),
    "weight_only_int8": Support(True, True, True, ""),
    "weight_only_int4": Support(True, True, True, ""),
    "a8w8": Support(True, True, True, ""),
    "a8w8_fp8": Support(
        True, False, True, "--quant_type a8w8 (int8), or --inference_model false to measure quality"
    ),
    "w4a8": Support(True, True, True, ""),
}


def check_support(scheme: str, device: str, compiled: bool) -> None:
    """Raises UserError where `scheme` does not run there. device: cpu, gpu or gpu:N."""
    row = SUPPORT[scheme]
    kind = device.partition(":")[0]
    if not compiled and kind == "cpu":
        runs, place = row.reference, "the plain-Paddle operators"
    elif kind == "cpu":
        runs, place = row.cpu, "the compiled operators of this CPU"
    else:
        runs, place = row.gpu, "the GPU"
    if not runs:
        raise UserError(f"quant_type {scheme} does not run on {place}; use {row.instead}")
