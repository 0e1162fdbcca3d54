"""The one table of quantized weights: what the schemes are called, hold and run on.

How each rounds and multiplies is a module of `predict.schemes`; the operators' own table is
csrc/include/regatta/scheme.h. Code asks a row for what it has, and `find` for a name. Imports no
Paddle.
"""

from __future__ import annotations

from dataclasses import dataclass

from predict.errors import UserError

GROUP_SIZES = (-1, 32, 64, 128)  # input features per scale; -1 is all of them
FP8_BLOCK = (128, 128)

# Compute capabilities:
TURING = (7, 5)  # the first of all
FIRST_BFLOAT16 = (8, 0)
ADA = (8, 9)  # the first with float8 units
HOPPER = (9, 0)

# Input features of a linear of 8-bit activations, on a GPU: the kernels read 16 codes at a time.
GPU_CODES_MULTIPLE = 16


@dataclass(frozen=True, kw_only=True)
class Support:
    """Where a scheme runs. Plain Paddle (--inference_model false) runs all of them."""

    cpu: bool  # by the compiled operators
    gpu: tuple[int, int]  # from this compute capability on
    gpu_last: tuple[int, int] | None = None  # up to this one; None: all later ones
    gpu_dtypes: tuple[str, ...] = ("bfloat16", "float16")
    # Input features per scale that CUDA kernels read, Hopper's own and those of every GPU, -1 all
    # of them; the CPU's take every size.
    hopper_groups: tuple[int, ...] = GROUP_SIZES
    mma_groups: tuple[int, ...] = GROUP_SIZES
    instead: str = "an unquantized model"  # where it does not run


@dataclass(frozen=True, kw_only=True)
class SchemeInfo:
    """One row: a scheme's name, what its weights and activations are, and where it runs."""

    name: str
    aliases: tuple[str, ...] = ()  # other spellings, of PaddleNLP's tools and of the field
    codes: str | None  # int4 | int8 | e2m1 | e4m3; None: weights in the model's dtype
    bits: int = 8  # of a stored code, where there are codes
    activations: str | None = None  # int8 | e4m3: as codes too; None: in the model's dtype
    has_groups: bool = False  # of input features, with a scale each
    group_size: int | None = None  # the only one that its groups have; None: as flags ask
    has_blocks: bool = False  # of FP8_BLOCK, with a scale each
    has_static_scales: bool = False  # of activations, from calibration; else found at run time
    has_smooth: bool = False  # inputs may be shifted and smoothed before they become codes
    folded: str = ""  # its name for operators where norms are in the matrices; "": they never are
    support: Support

    @property
    def is_weight_only(self) -> bool:
        """Whether weights alone are codes."""
        return self.codes is not None and self.activations is None

    @property
    def may_round_activations(self) -> bool:
        """Whether a CPU's products may make 16-bit activations int8 (--weight_only_activations)."""
        return self.is_weight_only and self.codes in ("int8", "int4")


DENSE = SchemeInfo(
    name="dense",
    codes=None,
    folded="dense_folded",
    support=Support(cpu=True, gpu=TURING, gpu_dtypes=("float32", "bfloat16", "float16")),
)
# Quantized weights have kernels of Hopper's own (csrc/cuda/gemm/) and kernels for every GPU from
# sm_75 on (csrc/cuda/gemm/portable/), which have run on an H200 alone.
# Not in the table because it makes no difference: --mode (an exported program calls the same
# operators) and, on the CPU, --dtype. --cachekv_int8_type goes with every scheme; which GPUs
# unpack a cache format is a column of predict.nn.cache_formats.FORMATS.
_ROWS = (
    SchemeInfo(
        name="weight_only_int8",
        aliases=("wint8", "w8a16"),
        codes="int8",
        has_groups=True,
        support=Support(cpu=True, gpu=TURING, hopper_groups=(-1, 64, 128), mma_groups=(-1,)),
    ),
    SchemeInfo(
        name="weight_only_int4",
        aliases=("wint4", "w4a16"),
        codes="int4",
        bits=4,
        has_groups=True,
        support=Support(cpu=True, gpu=TURING, mma_groups=(-1, 64, 128)),
    ),
    SchemeInfo(
        name="weight_only_mxfp4",
        aliases=("mxfp4",),
        codes="e2m1",
        bits=4,
        has_groups=True,
        group_size=32,
        support=Support(
            cpu=True,
            gpu=HOPPER,
            gpu_last=HOPPER,
            hopper_groups=(-1, 32),
            instead="--quant_type weight_only_int8 or weight_only_int4",
        ),
    ),
    SchemeInfo(
        name="a8w8",
        aliases=("w8a8",),
        codes="int8",
        activations="int8",
        has_static_scales=True,
        has_smooth=True,
        support=Support(cpu=True, gpu=TURING),
    ),
    SchemeInfo(
        name="a8w8_fp8",
        aliases=("w8a8_fp8", "fp8"),
        codes="e4m3",
        activations="e4m3",
        has_blocks=True,
        has_static_scales=True,
        support=Support(
            cpu=False,
            gpu=ADA,
            hopper_groups=(-1, 128),
            mma_groups=(-1, 128),
            instead="--quant_type a8w8 (int8)",
        ),
    ),
    SchemeInfo(
        name="w4a8",
        aliases=("a8w4",),
        codes="int4",
        bits=4,
        activations="int8",
        has_groups=True,
        support=Support(cpu=True, gpu=HOPPER, gpu_last=HOPPER, hopper_groups=(-1, 64, 128)),
    ),
)
SCHEMES: dict[str, SchemeInfo] = {row.name: row for row in _ROWS}  # all but "dense"
_FOLDED = {row.folded: row.name for row in (DENSE, *_ROWS) if row.folded}


def unfolded(name: str) -> str:
    """The scheme that operators know by `name`, with norms in its matrices or without."""
    return _FOLDED.get(name, name)


def scheme_info(name: str) -> SchemeInfo:
    """The row of that name, "dense" included; raises UserError naming the known ones."""
    row = DENSE if name == DENSE.name else SCHEMES.get(name)
    if row is None:
        raise UserError(
            f"scheme {name!r} is not known (known: {', '.join((DENSE.name, *SCHEMES))})"
        )
    return row


def find(codes: str, activations: str | None = None) -> SchemeInfo:
    """The scheme of such weights and activations; raises UserError naming the known ones."""
    for row in SCHEMES.values():
        if (row.codes, row.activations) == (codes, activations):
            return row
    known = "; ".join(f"{row.codes} with {row.activations or 'float'}" for row in SCHEMES.values())
    raise UserError(
        f"no scheme has {codes} weights and {activations or 'float'} activations (known: {known})"
    )


def gpu_kernels(capability: tuple[int, int]) -> dict[str, str]:
    """The quant_types that a GPU runs, and the kernels that do: sm90, Hopper's own, or mma."""
    kernels = "sm90" if capability == HOPPER else "mma"
    return {name: kernels for name, row in SCHEMES.items() if _has_kernels(row.support, capability)}


def _has_kernels(row: Support, capability: tuple[int, int]) -> bool:
    return row.gpu <= capability <= (row.gpu_last or capability)


class NotCompiledError(UserError):
    """A scheme that the CPU's compiled operators lack; its plain ones have all."""


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
    info = scheme_info(scheme)
    row = info.support
    if device == "cpu":
        if not row.cpu:
            raise NotCompiledError(
                f"quant_type {scheme} does not run on the compiled operators of this CPU; use "
                f"{row.instead}, or --inference_model false to measure quality"
            )
        return
    if capability is not None and not _has_kernels(row, capability):
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
    sizes = row.hopper_groups if capability in (None, HOPPER) else row.mma_groups
    if group_size not in sizes:
        shown = ", ".join("-1 (one for each output feature)" if n == -1 else str(n) for n in sizes)
        where = "GPUs" if capability is None else f"sm_{capability[0]}{capability[1]}"
        raise UserError(
            f"quant_type {scheme} with a scale for every {group_size} input features does not run "
            f"on {where} (there: {shown}); quantize with one of these, or use --device cpu"
        )
    is_odd = in_features is not None and in_features % GPU_CODES_MULTIPLE != 0
    if info.activations is not None and is_odd:
        raise UserError(
            f"quant_type {scheme} on a GPU takes linears whose input features are a multiple of "
            f"{GPU_CODES_MULTIPLE}, and one here has {in_features}; use an unquantized model, or "
            "name these linears in --skip_list_names"
        )
