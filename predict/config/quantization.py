"""Which quantization a run asks for: PaddleNLP's names, and the one table of what goes together.

Imports no Paddle.
"""

from __future__ import annotations

from dataclasses import dataclass

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
# Quantized weights have kernels of Hopper's own (csrc/cuda/gemm*_sm90.cu) and kernels for every GPU
# from sm_75 on (csrc/cuda/gemm_mma.cuh), which have run on an H200 alone.
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

    device: cpu, gpu or gpu:N. capability: of the GPU, where it is known. group_size: input features
    per scale, 128 for blocks of 128 x 128, -1 for all. in_features: of the linear, where known.
    """
    row = SUPPORT[scheme]
    if device == "cpu":
        if compiled and not row.cpu:
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
