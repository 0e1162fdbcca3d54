"""Rules that turn float matrices into codes and scales, in NumPy.

A scheme names its rule, and `round_weight` runs it: here, on blocks of rows on all cores, or on the
matrix's GPU (predict.ops.compiled.round_weight). Codes, scales and zeros are the same bit for bit:
each product, sum and quotient is rounded to float32, sums have a fixed order (`sums_of_rows`), and
NaN has the code 0, of e4m3 127.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from predict.schemes._e4m3 import E4M3_MAX, encode

Array = npt.NDArray[Any]
# (weight [N, K], rule, group size) -> codes [N, K], scale, and zero or None. See round_on_host.
RoundWeight: TypeAlias = Callable[[Any, str, int], tuple[Any, Any, Any]]
BLOCK_ELEMENTS = 1 << 17  # float32: half a megabyte, so that the passes over a block meet in L2
INT8_MAX = 127
INT4_ZERO = 8  # of codes 0..15
NAN_CODE = 127  # of e4m3
# Shares of a group's largest magnitude that become its largest code. Least squares picks one: most
# groups gain by clipping their outlier a little.
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8)
NUM_LANES = 128  # partial sums of squares


def for_row_blocks(num_rows: int, num_columns: int, work: Callable[[slice], None]) -> None:
    """Calls work(rows) for blocks that cover all rows; NumPy lets the threads run side by side."""
    size = max(1, BLOCK_ELEMENTS // max(1, num_columns))
    blocks = [slice(start, start + size) for start in range(0, num_rows, size)]

    def quiet(rows: slice) -> None:
        with np.errstate(all="ignore"):  # as round_on_host; each thread has its own
            work(rows)

    with ThreadPoolExecutor(min(len(blocks), os.cpu_count() or 1) or 1) as pool:
        list(pool.map(quiet, blocks))


def num_groups(in_features: int, group_size: int) -> int:
    """Groups of columns that share a scale; -1 is one group."""
    if group_size != -1 and in_features % group_size:
        raise ValueError(f"group size {group_size} does not divide {in_features} columns")
    return 1 if group_size == -1 else in_features // group_size


def round_on_host(weight: Array, rule: str, group_size: int) -> tuple[Array, Array, Array | None]:
    """Codes, scale and zero of weight [N, K] by a rule of RULES, rounded by NumPy.

    weight: float32, float16, or bfloat16 as uint16.
    """
    # NaN, infinity and tiny weights have defined codes too.
    with np.errstate(all="ignore"):
        return RULES[rule](weight, group_size)


def _round_int8(weight: Array, group_size: int) -> tuple[Array, Array, None]:
    """Codes int8 in -127..127; scale float32 [N, G], or [N] of whole rows: absmax / 127."""
    num_rows, num_columns = weight.shape
    groups = num_groups(num_columns, group_size)
    codes = np.empty((num_rows, num_columns), np.int8)
    scale = np.empty((num_rows, groups), np.float32)

    def work(rows: slice) -> None:
        grouped = as_groups(weight[rows], groups)
        largest = np.abs(grouped).max(axis=2)
        scale[rows] = positive(largest) / np.float32(INT8_MAX)
        grouped /= scale[rows, :, None]
        np.rint(grouped, out=grouped)
        if not are_usual(largest):
            np.clip(np.nan_to_num(grouped, copy=False), -INT8_MAX, INT8_MAX, out=grouped)
        codes[rows] = grouped.reshape(-1, num_columns)

    for_row_blocks(num_rows, num_columns, work)
    return codes, scale[:, 0] if group_size == -1 else scale, None


def _round_int4(weight: Array, group_size: int) -> tuple[Array, Array, Array]:
    """Codes int8 in 0..15; scale and zero float32 [N, G]: least squares over `CLIPS`, and 8.

    Each clip is tried with codes 1..15 (the largest magnitude at 7), and once with the largest
    value at -8, which is 1/8 finer. The first of the best counts.
    """
    num_rows, num_columns = weight.shape
    groups = num_groups(num_columns, group_size)
    codes = np.empty((num_rows, num_columns), np.int8)
    scale = np.empty((num_rows, groups), np.float32)

    size = num_columns // groups
    is_short = size <= NUM_LANES

    def work(rows: slice) -> None:
        values = as_groups(weight[rows], groups).reshape(-1, size)
        magnitudes = np.abs(values)
        peak = values[np.arange(len(values)), magnitudes.argmax(axis=1)]  # the first one
        usual, largest = are_usual(np.abs(peak)), positive(np.abs(peak))
        if is_short:  # what follows runs along the groups then, and not along each of them
            values = np.ascontiguousarray(values.T)
        candidates = [clip * largest / np.float32(7) for clip in CLIPS]
        candidates.append(np.where(peak == 0, largest, peak) / np.float32(-8))
        best_error = np.full(largest.shape, np.inf, np.float32)
        best_scale = candidates[0].copy()
        rounded = np.empty_like(values)
        for candidate in candidates:
            by_value = candidate if is_short else candidate[:, None]
            np.multiply(values, 1 / by_value, out=rounded)
            np.rint(rounded, out=rounded)
            np.clip(rounded, -8, 7, out=rounded)
            rounded *= by_value
            rounded -= values
            rounded *= rounded
            error = sums_of_columns(rounded) if is_short else sums_of_rows(rounded)
            better = error < best_error
            best_error[better] = error[better]
            best_scale[better] = candidate[better]
        np.divide(values, best_scale if is_short else best_scale[:, None], out=rounded)
        np.rint(rounded, out=rounded)
        np.clip(rounded, -8, 7, out=rounded)
        rounded += INT4_ZERO
        if not usual:
            np.nan_to_num(rounded, copy=False)
        whole = rounded.astype(np.int8)
        codes[rows] = (whole.T if is_short else whole).reshape(-1, num_columns)
        scale[rows] = best_scale.reshape(-1, groups)

    for_row_blocks(num_rows, num_columns, work)
    return codes, scale, np.full_like(scale, INT4_ZERO)


def _round_e4m3(weight: Array, block_size: int) -> tuple[Array, Array, None]:
    """Bits uint8 of e4m3 codes, and scale float32: absmax / 448 of what shares it.

    block_size: -1 is a row, scale [N]; else blocks of that many rows and columns (the last ones
    may be smaller), scale [ceil(N/block), ceil(K/block)].
    """
    num_rows, num_columns = weight.shape
    tall, wide = (1, num_columns) if block_size == -1 else (block_size, block_size)
    codes = np.empty((num_rows, num_columns), np.uint8)
    scale = np.empty((-(-num_rows // tall), -(-num_columns // wide)), np.float32)
    starts = np.arange(0, num_columns, wide)
    bands = max(1, BLOCK_ELEMENTS // (tall * num_columns))
    for first in range(0, len(scale), bands):
        rows = slice(first * tall, (first + bands) * tall)
        values = as_groups(weight[rows], 1)[:, 0]
        largest = np.maximum.reduceat(np.abs(values), starts, axis=1)
        largest = np.maximum.reduceat(largest, np.arange(0, len(values), tall), axis=0)
        scale[first : first + bands] = positive(largest) / np.float32(E4M3_MAX)
        by_row = np.repeat(scale[first : first + bands], tall, axis=0)[: len(values)]
        values /= np.repeat(by_row, wide, axis=1)[:, :num_columns]
        codes[rows] = encode(values)
        if not are_usual(largest):  # Paddle clips a NaN
            codes[rows][np.isnan(values)] = NAN_CODE
    return codes, scale[:, 0] if block_size == -1 else scale, None


# Rules by name: of weight [N, K] and a group size (columns that share a scale, -1 for all) codes
# [N, K], scale and zero. Devices have the same ones: csrc/cuda/gemm/rounding.h.
RULES: dict[str, Callable[[Array, int], tuple[Array, Array, Array | None]]] = {
    "int8": _round_int8,
    "int4": _round_int4,
    "e4m3": _round_e4m3,
}


def sums_of_rows(values: Array) -> Array:
    """Sums of rows of float32 values [M, S], in the order that all devices keep.

    Value i is added to lane i % 128, one after another; then lane i to i + 64, i + 32, and so on.
    Vectors of any width and the threads of a GPU can do so; NumPy's own sums depend on the CPU.
    """
    missing = -values.shape[1] % NUM_LANES
    padded = np.pad(values, ((0, 0), (0, missing))) if missing else values
    lanes = np.add.reduce(padded.reshape(len(values), -1, NUM_LANES), axis=1)
    return sums_of_columns(np.ascontiguousarray(lanes.T))


def sums_of_columns(values: Array) -> Array:
    """The same of the columns of values [S, M], S at most 128."""
    missing = (1 << (len(values) - 1).bit_length()) - len(values)
    lanes = np.pad(values, ((0, missing), (0, 0))) if missing else values
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes[0]


def are_usual(largest: Array) -> bool:
    """Whether quotients by scales of these magnitudes are finite and within the codes' range."""
    least = 512 * np.finfo(np.float32).tiny  # its scale has all its bits
    return bool(((largest == 0) | ((largest >= least) & (largest < np.inf))).all())


def as_groups(weight: Array, groups: int) -> Array:
    """A float32 copy of weight [n, K] as [n, groups, K / groups]."""
    from predict.device.place import to_float32

    copy = np.array(to_float32(weight), np.float32)
    return copy.reshape(len(weight), groups, -1)


def positive(largest: Array) -> Array:
    """The magnitudes, 1 where all of a group is zero: its codes are zero with any scale."""
    return np.where(largest > 0, largest, np.float32(1))
