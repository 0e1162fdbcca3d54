"""Rounding float matrices to codes, blocks of rows at a time on all cores."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.schemes._e4m3 import E4M3_MAX, encode

Array = npt.NDArray[Any]
BLOCK_ELEMENTS = 1 << 17  # float32: half a megabyte, so that the passes over a block meet in L2
INT8_MAX = 127
INT4_ZERO = 8  # of codes 0..15
# Shares of a group's largest magnitude that become its largest code. Least squares picks one: most
# groups gain by clipping their outlier a little.
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8)


def for_row_blocks(num_rows: int, num_columns: int, work: Callable[[slice], None]) -> None:
    """Calls work(rows) for blocks that cover all rows; NumPy lets the threads run side by side."""
    size = max(1, BLOCK_ELEMENTS // max(1, num_columns))
    blocks = [slice(start, start + size) for start in range(0, num_rows, size)]
    with ThreadPoolExecutor(min(len(blocks), os.cpu_count() or 1) or 1) as pool:
        list(pool.map(work, blocks))


def num_groups(in_features: int, group_size: int) -> int:
    """Groups of columns that share a scale; -1 is one group."""
    if group_size != -1 and in_features % group_size:
        raise ValueError(f"group size {group_size} does not divide {in_features} columns")
    return 1 if group_size == -1 else in_features // group_size


def round_int8(weight: Array, group_size: int) -> tuple[Array, Array]:
    """Codes int8 [N, K] in -127..127 and scale float32 [N, G]: absmax / 127 of each group.

    weight: float32 [N, K], or bfloat16 as uint16.
    """
    num_rows, num_columns = weight.shape
    groups = num_groups(num_columns, group_size)
    codes = np.empty((num_rows, num_columns), np.int8)
    scale = np.empty((num_rows, groups), np.float32)

    def work(rows: slice) -> None:
        grouped = as_groups(weight[rows], groups)
        scale[rows] = positive(np.abs(grouped).max(axis=2)) / np.float32(INT8_MAX)
        np.rint(grouped / scale[rows, :, None], out=grouped)
        codes[rows] = grouped.reshape(-1, num_columns)

    for_row_blocks(num_rows, num_columns, work)
    return codes, scale


def round_int4(weight: Array, group_size: int) -> tuple[Array, Array]:
    """Codes int8 [N, K] in 0..15 around 8 and scale float32 [N, G], least squares over `CLIPS`.

    Each clip is tried with codes 1..15 (the largest magnitude at 7), and once with the largest
    value at -8, which is 1/8 finer.
    """
    num_rows, num_columns = weight.shape
    groups = num_groups(num_columns, group_size)
    codes = np.empty((num_rows, num_columns), np.int8)
    scale = np.empty((num_rows, groups), np.float32)

    def work(rows: slice) -> None:
        grouped = as_groups(weight[rows], groups)
        largest = positive(np.abs(grouped).max(axis=2))
        peak = np.take_along_axis(grouped, np.abs(grouped).argmax(axis=2)[:, :, None], 2)[:, :, 0]
        candidates = [clip * largest / np.float32(7) for clip in CLIPS]
        candidates.append(np.where(peak == 0, largest, peak) / np.float32(-8))
        best_error = np.full(largest.shape, np.inf, np.float32)
        best_scale = np.empty_like(largest)
        rounded = np.empty_like(grouped)
        for candidate in candidates:
            np.multiply(grouped, (1 / candidate)[:, :, None], out=rounded)
            np.rint(rounded, out=rounded)
            np.clip(rounded, -8, 7, out=rounded)
            rounded *= candidate[:, :, None]
            rounded -= grouped
            error = np.einsum("ngk,ngk->ng", rounded, rounded)
            better = error < best_error
            best_error[better] = error[better]
            best_scale[better] = candidate[better]
        scale[rows] = best_scale
        np.divide(grouped, best_scale[:, :, None], out=rounded)
        np.rint(rounded, out=rounded)
        np.clip(rounded, -8, 7, out=rounded)
        rounded += INT4_ZERO
        codes[rows] = rounded.reshape(-1, num_columns)

    for_row_blocks(num_rows, num_columns, work)
    return codes, scale


def round_e4m3(weight: Array, block_size: int) -> tuple[Array, Array]:
    """Bits uint8 [N, K] of e4m3 codes, and scale float32: absmax / 448 of what shares it.

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
    return codes, scale[:, 0] if block_size == -1 else scale


def as_groups(weight: Array, groups: int) -> Array:
    """A float32 copy of weight [n, K] as [n, groups, K / groups]."""
    from predict.device.place import to_float32

    copy = np.array(to_float32(weight), np.float32)
    return copy.reshape(len(weight), groups, -1)


def positive(largest: Array) -> Array:
    """The magnitudes, 1 where all of a group is zero: its codes are zero with any scale."""
    return np.where(largest > 0, largest, np.float32(1))
