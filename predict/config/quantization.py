"""Which quantization a run asks for: PaddleNLP's names, and the one table of what goes together.

Imports no Paddle.
"""

from __future__ import annotations

from dataclasses import dataclass

from predict.config.checks import check_fields
from predict.errors import UserError, one_of

SCHEMES = ("weight_only_int8", "weight_only_int4", "a8w8", "a8w8_fp8", "w4a8")
CODES_OF_ACTIVATIONS = ("a8w8", "a8w8_fp8", "w4a8")  # whose products are of 8 bits
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


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """How linears are rounded while they are read. Raises UserError for other values."""

    quant_type: str | None = None  # None: as the checkpoint has it; else rounded while it is read
    weightonly_group_size: int = -1  # input features per scale of weight-only types; -1: all
    weight_block_size: tuple[int, ...] | None = None  # of a8w8_fp8: (128, 128); None: rows
    lm_head_quant_type: str | None = None  # None: the LM head stays dense
    skip_list_names: tuple[str, ...] = ()  # linears with one of these in their name stay dense

    def __post_init__(self) -> None:
        check_fields(self, choices={})
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
        if self.quant_type is None and self.lm_head_quant_type is None:
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
            group_size=self.weightonly_group_size,
            block_size=-1 if self.weight_block_size is None else self.weight_block_size[0],
            head_scheme=scheme(self.lm_head_quant_type),
            skip=self.skip_list_names,
        )

    @property
    def cache_type(self) -> str | None:
        """The cachekv_int8_type that quant_type brings along (PaddleNLP's c8), or None."""
        return None if self.quant_type is None else parse_quant_type(self.quant_type).cache_type


@dataclass(frozen=True)
class Support:
    """One row: where a scheme runs. Plain Paddle (--inference_model false) runs all of them."""

    cpu: bool  # by the compiled operators
    gpu: tuple[int, int]  # from this compute capability on
    gpu_last: tuple[int, int] | None = None  # up to this one; None: all later ones
    gpu_dtypes: tuple[str, ...] = ("bfloat16", "float16")
    instead: str = "--quant_type weight_only_int8"  # where it does not run


# Compute capabilities:
TURING = (7, 5)  # the first of all
FIRST_BFLOAT16 = (8, 0)
ADA = (8, 9)  # the first with float8 units
HOPPER = (9, 0)

DENSE = "an unquantized model"
# Quantized weights have kernels of Hopper's own (csrc/cuda/gemm/) and kernels for every GPU from
# sm_75 on (csrc/cuda/gemm/portable/), which have run on an H200 alone.
# Not in the table because it makes no difference: --mode (an exported program calls the same
# operators) and, on the CPU, --dtype. --cachekv_int8_type goes with every scheme; which GPUs
# unpack a cache format is a column of predict.nn.cache_formats.FORMATS.
SUPPORT = {
    "dense": Support(cpu=True, gpu=TURING, gpu_dtypes=("float32", "bfloat16", "float16")),
    "weight_only_int8": Support(cpu=True, gpu=TURING, instead=DENSE),
    "weight_only_int4": Support(cpu=True, gpu=TURING, instead=DENSE),
    "a8w8": Support(cpu=True, gpu=TURING, instead=DENSE),
    "a8w8_fp8": Support(cpu=False, gpu=ADA, instead="--quant_type a8w8 (int8)"),
    "w4a8": Support(cpu=True, gpu=HOPPER, gpu_last=HOPPER, instead=DENSE),
}


def gpu_kernels(capability: tuple[int, int]) -> dict[str, str]:
    """The quant_types that a GPU runs, and the kernels that do: sm90, Hopper's own, or mma."""
    kernels = "sm90" if capability == HOPPER else "mma"
    return {
        scheme: kernels
        for scheme, row in SUPPORT.items()
        if scheme != "dense" and row.gpu <= capability <= (row.gpu_last or capability)
    }


# Input features per scale that CUDA kernels read, Hopper's own and those of every GPU, -1 all of
# them; the CPU's take every size.
GPU_GROUP_SIZES: dict[str, tuple[int, ...]] = {
    "weight_only_int8": (-1, 64, 128),
    "weight_only_int4": (-1, 32, 64, 128),
    "a8w8_fp8": (-1, 128),
    "w4a8": (-1, 64, 128),
}
MMA_GROUP_SIZES: dict[str, tuple[int, ...]] = {
    "weight_only_int8": (-1,),
    "weight_only_int4": (-1, 64, 128),
    "a8w8_fp8": (-1, 128),
}

# Input features of a linear of 8-bit activations, on a GPU: the kernels read 16 codes at a time.
GPU_CODES_MULTIPLE = 16


def check_support(
    scheme: str,
    device: str,
    compiled: bool,
    dtype: str | None = None,
    capability: tuple[int, int] | None = None,
    group_size: int = -1,
    in_features: int | None = None,
) -> None:
    """Raises UserError where `scheme` does not run there.

    device: as ModelConfig has it. capability: of the GPU, where known. group_size: input features
    per scale, 128 for blocks of 128 x 128, -1 for all. in_features: of the linear, where known.
    """
    if not compiled:
        return
    row = SUPPORT[scheme]
    if device == "cpu":
        if not row.cpu:
            raise UserError(
                f"quant_type {scheme} does not run on the compiled operators of this CPU; use "
                f"{row.instead}, or --inference_model false to measure quality"
            )
        return
    if capability is not None and not row.gpu <= capability <= (row.gpu_last or capability):
        have, need = (f"sm_{major}{minor}" for major, minor in (capability, row.gpu))
        later = " or later" if row.gpu_last is None else ""
        raise UserError(
            f"quant_type {scheme} needs a GPU of {need}{later}, and this one is {have}; use "
            f"{row.instead}"
        )
    if dtype == "bfloat16" and capability is not None and capability < FIRST_BFLOAT16:
        raise UserError(
            f"dtype bfloat16 does not run on a GPU of sm_{capability[0]}{capability[1]}, which has "
            "no bfloat16; set --dtype float16"
        )
    if dtype is not None and dtype not in row.gpu_dtypes:
        raise UserError(
            f"quant_type {scheme} takes activations in {' or '.join(row.gpu_dtypes)} on a GPU; set "
            "--dtype to one of these"
        )
    table = GPU_GROUP_SIZES if capability in (None, HOPPER) else MMA_GROUP_SIZES
    sizes = table.get(scheme, GROUP_SIZES)
    if group_size not in sizes:
        shown = ", ".join("-1 (one for each output feature)" if n == -1 else str(n) for n in sizes)
        where = "GPUs" if capability is None else f"sm_{capability[0]}{capability[1]}"
        raise UserError(
            f"quant_type {scheme} with a scale for every {group_size} input features does not run "
            f"on {where} (there: {shown}); quantize with one of these, or use --device cpu"
        )
    codes = scheme in CODES_OF_ACTIVATIONS
    if codes and in_features is not None and in_features % GPU_CODES_MULTIPLE != 0:
        raise UserError(
            f"quant_type {scheme} on a GPU takes linears whose input features are a multiple of "
            f"{GPU_CODES_MULTIPLE}, and one here has {in_features}; use an unquantized model, or "
            "name these linears in --skip_list_names"
        )
