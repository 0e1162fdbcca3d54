"""Which kernel multiplies: products and GPUs in, names of kernels out, on a CPU.

The choice is host code without CUDA (csrc/cuda/gemm/select.cu), compiled here by the C++ compiler.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

import build
from tests.support.gemm_choices import GemmChoices

# Of a T4, an A100, an A10, an L40S and an H200: multiprocessors, KiB of a block's shared memory.
GPUS = {75: (40, 64), 80: (108, 163), 86: (72, 99), 89: (142, 99), 90: (132, 227)}
BEFORE_HOPPER = (75, 80, 86, 89)
EVERY = tuple(GPUS)

# Llama-3-8B's products, all that a step has beside the operands.
QKV = "in=4096 out=6144"
OUT = "in=4096 out=4096 residual residual_is_out"
GATE_UP = "in=4096 out=28672 gated"
DOWN = "in=14336 out=4096 residual residual_is_out"
EXPERTS = "in=2048 out=1536 groups=128"
FEW_EXPERTS = "in=4096 out=28672 groups=8"
CODED_OUT = "in=4096 out=4096 residual"  # cuBLASLt adds no residual in place

DENSE = "operands=dense blas"
DENSE16 = "operands=dense dtype=float16 blas"
FP8 = "operands=fp8 blas"
BLOCKS = "operands=fp8 scale_rows=128 blas"
INT8 = "operands=int8 blas"
PACKED8 = "operands=weight_int8 dtype=float16 blas matrix"
PACKED4 = "operands=weight_int4 dtype=float16 blas matrix"
PACKED_GROUPS = "operands=weight_int8_groups group_size=64 blas matrix"
MXFP4 = "operands=weight_mxfp4 group_size=32 blas matrix"
W4A8 = "operands=w4a8 blas matrix"


@dataclass(frozen=True)
class Case:
    """A product on some GPUs: kernel by number of rows; "" where there is none."""

    gpus: Sequence[int]
    product: str
    expected: Mapping[int, str] = field(hash=False)

    def __str__(self) -> str:
        return f"{'-'.join(map(str, self.gpus))}: {self.product}"

    def lines(self) -> list[str]:
        """One per GPU and number of rows."""
        return [question(gpu, self.product, rows) for gpu in self.gpus for rows in self.expected]


def question(gpu: int, product: str, rows: int) -> str:
    multiprocessors, shared = GPUS[gpu]
    return (
        f"arch={gpu} multiprocessors={multiprocessors} shared={shared << 10} rows={rows} {product}"
    )


VECTOR, STREAM = "gemv_stream_sm80", "gemm_stream_sm80"
SMALL, LARGE = "gemm_sm90", "gemm_tiles_sm90"
BLAS, GENERIC, MATRIX = "gemm_blas", "gemm_generic", "matrix"
CODES_VECTOR, CODES_SMALL = "gemm_stream_codes_sm90", "gemm_codes_sm90"
CODES_LARGE, CODES_BLAS = "gemm_tiles_codes_sm90", "gemm_blas_codes_sm90"
CODES_NEXT, CODES_MMA = "gemm_blas_unfolded_sm90", "gemm_codes_mma"
PACKED_VECTOR, PACKED_SMALL = "gemv_packed_sm90", "gemm_packed_sm90"
PACKED_LARGE, PACKED_MMA = "gemm_packed_tiles_sm90", "gemm_packed_mma"

CASES = [
    # 16-bit weights.
    Case((90,), f"{DENSE} {QKV}", {1: VECTOR, 2: SMALL, 128: SMALL, 129: BLAS, 8000: BLAS}),
    Case((90,), f"{DENSE} {GATE_UP}", {1: VECTOR, 2: SMALL, 128: SMALL, 129: LARGE, 8000: LARGE}),
    Case((90,), f"operands=dense {QKV}", {1: VECTOR, 128: SMALL, 129: LARGE}),
    Case((90,), f"{DENSE} {QKV} out_unaligned", {128: SMALL, 129: SMALL}),
    Case((90,), f"{DENSE} {QKV} operands_unaligned", {1: GENERIC, 129: GENERIC}),
    Case((90,), "operands=dense dtype=float32 blas in=4096 out=4096", {1: GENERIC, 512: GENERIC}),
    Case((90,), f"{DENSE} {QKV} batch_invariant", {1: SMALL, 129: SMALL, 8000: SMALL}),
    Case((80, 86, 89), f"{DENSE} {QKV}", {1: VECTOR, 2: STREAM, 32: STREAM, 33: BLAS, 8000: BLAS}),
    Case((80, 86, 89), f"{DENSE} {GATE_UP}", {1: VECTOR, 32: STREAM, 33: BLAS}),
    Case((80, 86, 89), f"operands=dense {QKV}", {1: VECTOR, 33: STREAM, 8000: STREAM}),
    Case((80, 86, 89), f"{DENSE} {QKV} sumsq_out", {8: STREAM, 9: BLAS}),
    Case((80, 86, 89), f"{DENSE} {QKV} batch_invariant", {1: STREAM, 8000: STREAM}),
    Case((75,), f"{DENSE16} {QKV}", {1: BLAS, 8000: BLAS}),
    Case((75,), f"operands=dense dtype=float16 {QKV}", {1: GENERIC, 8000: GENERIC}),
    Case((75,), f"{DENSE} {QKV}", {1: GENERIC, 8000: GENERIC}),  # bfloat16
    Case((75,), f"{DENSE16} {QKV} batch_invariant", {1: GENERIC, 8000: GENERIC}),
    # Codes. Tiles of 4,096 rows of weight fill half of an H200 with up to 256 tokens.
    Case(
        (90,),
        f"{FP8} {CODED_OUT}",
        {
            1: CODES_VECTOR,
            2: CODES_SMALL,
            128: CODES_SMALL,
            129: CODES_BLAS,
            256: CODES_BLAS,
            257: CODES_LARGE,
            2047: CODES_LARGE,
            2048: CODES_BLAS,
        },
    ),
    Case((90,), f"{FP8} {QKV}", {128: CODES_SMALL, 129: CODES_LARGE, 2048: CODES_BLAS}),
    Case((90,), f"{FP8} {OUT}", {129: CODES_LARGE, 2048: CODES_LARGE}),
    Case((90,), f"{FP8} {GATE_UP}", {1: CODES_VECTOR, 129: CODES_LARGE, 8000: CODES_LARGE}),
    Case(
        (90,),
        f"{FP8} {GATE_UP} read_as_codes",
        {128: CODES_SMALL, 129: CODES_LARGE, 2047: CODES_LARGE, 2048: CODES_NEXT},
    ),
    Case((90,), f"operands=fp8 {CODED_OUT}", {129: CODES_LARGE, 2048: CODES_LARGE}),
    Case((90,), f"{BLOCKS} {QKV}", {1: CODES_SMALL, 2048: CODES_BLAS, 2049: CODES_LARGE}),
    Case((90,), f"{INT8} {CODED_OUT}", {1: CODES_VECTOR, 128: CODES_SMALL, 8000: CODES_LARGE}),
    Case((90,), f"{FP8} {CODED_OUT} batch_invariant", {1: CODES_SMALL, 8000: CODES_SMALL}),
    Case((89,), f"{FP8} {GATE_UP} read_as_codes", {1: CODES_MMA, 8000: CODES_MMA}),
    Case((89,), f"{BLOCKS} {QKV}", {1: CODES_MMA, 2048: CODES_MMA}),
    Case((75, 80, 86), f"{FP8} {QKV}", {1: "", 8000: ""}),
    Case(BEFORE_HOPPER, f"{INT8} {QKV}", {1: CODES_MMA, 8000: CODES_MMA}),
    Case(BEFORE_HOPPER, f"{INT8} {QKV} batch_invariant", {1: CODES_MMA, 8000: CODES_MMA}),
    # Groups of rows with a weight each.
    Case(
        (90,),
        f"{DENSE} {EXPERTS}",
        {8: VECTOR, 16: VECTOR, 17: SMALL, 4096: SMALL, 4097: LARGE, 65536: LARGE},
    ),
    Case(
        (90,),
        f"{DENSE} in=768 out=2048 groups=128",
        {16: VECTOR, 17: SMALL, 4096: SMALL, 65536: LARGE},
    ),
    Case((90,), f"{DENSE} {FEW_EXPERTS} gated", {2: VECTOR, 3: VECTOR, 4: SMALL, 257: LARGE}),
    Case((90,), f"{DENSE} {EXPERTS} out_unaligned", {4097: SMALL}),
    Case((90,), f"{DENSE16} {EXPERTS} gated batch_invariant", {1: SMALL, 65536: SMALL}),
    Case((90,), f"{FP8} {EXPERTS} gated", {1: CODES_SMALL, 4096: CODES_SMALL, 4097: CODES_LARGE}),
    Case((90,), f"{BLOCKS} {EXPERTS}", {8: CODES_SMALL, 65536: CODES_LARGE}),
    Case((90,), f"{INT8} {EXPERTS} batch_invariant", {8: CODES_SMALL, 65536: CODES_SMALL}),
    Case((80, 86, 89), f"{DENSE} {EXPERTS}", {8: VECTOR, 17: STREAM, 65536: STREAM}),
    Case((80, 86, 89), f"{DENSE} {EXPERTS} batch_invariant", {8: STREAM, 65536: STREAM}),
    Case((75,), f"{DENSE16} {EXPERTS}", {8: GENERIC, 65536: GENERIC}),
    Case((90,), "operands=dense dtype=float32 in=2048 out=1536 groups=8", {8: GENERIC}),
    Case(BEFORE_HOPPER, f"{INT8} {EXPERTS} gated", {1: CODES_MMA, 65536: CODES_MMA}),
    Case((89,), f"{FP8} {EXPERTS} gated", {1: CODES_MMA, 65536: CODES_MMA}),
    Case((89,), f"{BLOCKS} {EXPERTS} batch_invariant", {8: CODES_MMA, 65536: CODES_MMA}),
    Case((75, 80, 86), f"{FP8} {EXPERTS}", {8: "", 65536: ""}),
    Case(EVERY, f"{DENSE} {EXPERTS} residual", {8: ""}),
    Case(EVERY, f"{DENSE} in=2048 out=1536 groups=513", {8: ""}),
    # Packed weights.
    Case(
        (90,),
        f"{PACKED4} {QKV}",
        {
            1: PACKED_VECTOR,
            8: PACKED_VECTOR,
            9: PACKED_SMALL,
            128: PACKED_SMALL,
            129: PACKED_LARGE,
            4095: PACKED_LARGE,
            4096: MATRIX,
        },
    ),
    Case(
        (90,),
        f"{PACKED8} {GATE_UP}",
        {8: PACKED_VECTOR, 64: PACKED_SMALL, 65: PACKED_LARGE, 4096: PACKED_LARGE},
    ),
    Case((90,), f"{PACKED8} {DOWN}", {64: PACKED_SMALL, 129: PACKED_LARGE, 4096: MATRIX}),
    Case((90,), f"{PACKED_GROUPS} {DOWN}", {8: PACKED_VECTOR, 64: PACKED_SMALL, 4096: MATRIX}),
    Case((90,), f"{W4A8} {DOWN}", {8: PACKED_VECTOR, 9: PACKED_SMALL, 8000: PACKED_SMALL}),
    Case((90,), f"operands=weight_int4 {QKV}", {4095: PACKED_LARGE, 4096: PACKED_LARGE}),
    Case((90,), f"{PACKED4} {QKV} batch_invariant", {1: PACKED_SMALL, 8000: PACKED_SMALL}),
    Case((75, 80, 86), f"{PACKED8} {QKV}", {1: PACKED_MMA, 511: PACKED_MMA, 512: MATRIX}),
    Case((75, 80, 86), f"{PACKED4} {DOWN}", {1: PACKED_MMA, 511: PACKED_MMA, 512: MATRIX}),
    Case((75, 80, 86), f"{PACKED4} {GATE_UP}", {512: PACKED_MMA, 767: PACKED_MMA, 768: MATRIX}),
    Case((89,), f"{PACKED8} {QKV}", {512: PACKED_MMA, 1023: PACKED_MMA, 1024: MATRIX}),
    Case((89,), f"{PACKED8} {GATE_UP}", {1024: PACKED_MMA, 1535: PACKED_MMA, 1536: MATRIX}),
    # Without cuBLASLt, without room, and of a matrix that no step's workspace has room for.
    Case(BEFORE_HOPPER, f"operands=weight_int8 dtype=float16 matrix {QKV}", {8000: PACKED_MMA}),
    Case(BEFORE_HOPPER, f"operands=weight_int8 dtype=float16 blas {QKV}", {8000: PACKED_MMA}),
    Case(BEFORE_HOPPER, f"{PACKED4} in=8192 out=57344 gated", {8000: PACKED_MMA}),
    Case(BEFORE_HOPPER, f"{PACKED4} {QKV} batch_invariant", {1: PACKED_MMA, 8000: PACKED_MMA}),
    Case((75,), f"operands=weight_int4 blas matrix {QKV}", {1: "", 8000: ""}),  # bfloat16
    Case(BEFORE_HOPPER, f"{PACKED_GROUPS} {QKV}", {1: "", 8000: ""}),
    Case(BEFORE_HOPPER, f"{W4A8} {QKV}", {1: "", 8000: ""}),
    # Packed weights of groups of rows.
    Case(
        (90,),
        f"{PACKED4} {EXPERTS}",
        {
            1: PACKED_VECTOR,
            16: PACKED_VECTOR,
            17: PACKED_SMALL,
            6144: PACKED_SMALL,
            6145: PACKED_LARGE,
        },
    ),
    Case((90,), f"{PACKED4} in=2056 out=1536 groups=128", {8: PACKED_SMALL}),
    Case((90,), f"{PACKED4} {FEW_EXPERTS}", {2: PACKED_VECTOR, 4: PACKED_VECTOR, 5: PACKED_SMALL}),
    Case(
        (90,),
        f"{MXFP4} in=2880 out=5760 groups=32",
        {1: PACKED_VECTOR, 8: PACKED_VECTOR, 9: PACKED_SMALL, 1537: PACKED_LARGE},
    ),
    Case(BEFORE_HOPPER, f"{MXFP4} in=2880 out=5760 groups=32", {8: "", 65536: ""}),
    Case(BEFORE_HOPPER, f"{PACKED8} {EXPERTS} gated", {1: PACKED_MMA, 65536: PACKED_MMA}),
    Case(BEFORE_HOPPER, f"{PACKED4} {EXPERTS} batch_invariant", {8: PACKED_MMA, 512: PACKED_MMA}),
    Case((75,), f"operands=weight_int4 {EXPERTS}", {8: ""}),  # bfloat16
    Case(
        (90,), f"{PACKED8} {EXPERTS} gated batch_invariant", {8: PACKED_SMALL, 65536: PACKED_SMALL}
    ),
    Case(
        (90,),
        f"{W4A8} {EXPERTS} gated",
        {8: PACKED_VECTOR, 8192: PACKED_SMALL, 65536: PACKED_SMALL},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_is_the_table_s(case: Case, gemm_choices: GemmChoices) -> None:
    got = [choice.kernel for choice in gemm_choices.ask(case.lines())]
    assert got == [kernel for _ in case.gpus for kernel in case.expected.values()]


def test_every_candidate_is_chosen_by_some_case(gemm_choices: GemmChoices) -> None:
    choices = gemm_choices.ask([line for case in CASES for line in case.lines()])
    chosen = {choice.row for choice in choices if choice.kernel}
    unused = [row for i, row in enumerate(gemm_choices.table()) if i not in chosen]
    assert not unused


# Of Qwen3-30B-A3B and Mixtral-8x7B: the product, rows, and the tile.
GROUPS_TILES = [
    ("in=2048 out=1536 groups=128 gated", 64, (8, 3, 75, 1)),
    ("in=2048 out=1536 groups=128 gated", 256, (8, 3, 75, 2)),
    ("in=768 out=2048 groups=128", 256, (8, 3, 75, 4)),
    ("in=768 out=2048 groups=128", 1024, (16, 3, 75, 4)),
    ("in=768 out=2048 groups=128", 4096, (64, 2, 112, 4)),
    ("in=14336 out=4096 groups=8", 16, (8, 3, 75, 1)),
    ("in=14336 out=4096 groups=8", 1024, (128, 1, 220, 1)),
    ("in=14336 out=4096 groups=8 batch_invariant", 1024, (32, 2, 112, 2)),
]


@pytest.mark.parametrize(("product", "rows", "tile"), GROUPS_TILES)
def test_tile_of_packed_groups_is_the_table_s(
    product: str, rows: int, tile: tuple[int, ...], gemm_choices: GemmChoices
) -> None:
    assert gemm_choices.ask_groups_tiles([question(90, f"{PACKED4} {product}", rows)]) == [tile]


@pytest.mark.parametrize("product", [QKV, GATE_UP])
@pytest.mark.parametrize("operands", [DENSE16, FP8, BLOCKS, INT8, PACKED8, PACKED4, W4A8])
def test_batch_invariant_kernel_is_one_for_any_number_of_rows(
    operands: str, product: str, gemm_choices: GemmChoices
) -> None:
    rows = (1, 2, 8, 9, 32, 33, 64, 65, 128, 129, 512, 1024, 2048, 4096, 8000)
    for gpu in EVERY:
        lines = [question(gpu, f"{operands} {product} batch_invariant", count) for count in rows]
        assert len({choice.row for choice in gemm_choices.ask(lines)}) == 1, gpu


def test_refusal_says_why_each_candidate_of_the_operands_is_out(gemm_choices: GemmChoices) -> None:
    (choice,) = gemm_choices.ask([question(80, f"{FP8} {QKV}", 8)])
    reasons = dict(re.findall(r"(\w+): ([^;]+)", choice.reasons))
    assert list(reasons) == ["stream_codes", "sm90", "blas_to_codes", "blas_codes", "tiles", "mma"]
    assert reasons.pop("mma") == "float8 needs sm_89"
    assert set(reasons.values()) == {"not for this architecture"}


def test_forced_candidate_ignores_thresholds_and_not_refusals(gemm_choices: GemmChoices) -> None:
    ask = [
        question(90, f"{PACKED4} {QKV} force=mma", 8000),
        question(90, f"{FP8} {CODED_OUT} force=blas_codes", 512),
        question(80, f"{PACKED4} {QKV} force=matrix", 300),
        question(90, f"{DENSE} {QKV} force=mma", 8),
    ]
    got = [choice.kernel for choice in gemm_choices.ask(ask)]
    assert got == [PACKED_MMA, CODES_BLAS, MATRIX, ""]


def test_gpu_with_less_shared_memory_takes_what_fits(gemm_choices: GemmChoices) -> None:
    line = question(90, f"{DENSE} {QKV}", 8)
    (choice,) = gemm_choices.ask([line.replace(f"shared={227 << 10}", f"shared={99 << 10}")])
    assert choice.kernel == STREAM


def test_the_choice_includes_no_cuda() -> None:
    folder = build.CSRC / "cuda" / "gemm"
    for name in ("select.cu", "select.h", "tiles.h"):
        headers = re.findall(r'#include ["<]([^">]+)', (folder / name).read_text(encoding="utf-8"))
        assert not [header for header in headers if header.endswith(".cuh") or "cuda_" in header]
