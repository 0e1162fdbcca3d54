"""Matrices whose rounding is hard to get alike in two places."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.schemes import normal

# Rule, group size: what the schemes ask for.
RULES = [*product(("int8", "int4"), (-1, 32, 64, 128)), ("e4m3", -1), ("e4m3", 128)]
SHAPES = ((1, 128), (3, 384), (130, 256), (67, 1280))
ODD_SHAPES = ((1, 1), (5, 7), (33, 100), (129, 333), (4, 4099), (257, 130))  # of whole rows
DTYPES = ("float32", "bfloat16", "float16")


def matrix(shape: tuple[int, int], seed: int = 0) -> npt.NDArray[np.float32]:
    """Normal numbers with outliers, some rows small and some large."""
    values = normal(shape, seed) ** 3
    values *= np.exp2(normal((shape[0], 1), seed + 1) * 3).astype(np.float32)
    return 0.02 * values


def hard_matrix() -> npt.NDArray[np.float32]:
    """[32, 256]: zeros, ties, subnormal numbers, the largest ones, infinities and NaN."""
    values = matrix((32, 256))
    values[0] = 0
    values[1, :128] = 0
    values[2] = -0.0
    values[3] = np.arange(256) % 255 - 127  # codes of int8 as they are
    values[4] = (np.arange(256) % 254 - 127) + 0.5  # halfway between two
    values[4, 0] = 127
    values[5] = np.arange(256) % 15 - 7
    values[6] = (np.arange(256) % 15 - 7.5) * 0.25
    values[7] = -8 + (np.arange(256) % 32) * 0.5  # the peak at -8
    values[8, ::2] = -1  # as large as 1: the first one counts
    values[8, 1::2] = 1
    values[9] = np.concatenate([e4m3_ties(), -e4m3_ties()])
    values[9, 0] = 448
    values[10] = 1e-45 * (np.arange(256) % 5)
    values[11] = 1e-38 * (np.arange(256) % 7)
    values[12] = 3e38 * np.where(np.arange(256) % 3, 1, -1)
    values[13, 7] = np.inf
    values[14, 200] = -np.inf
    values[15, 3] = np.nan
    values[16] = np.nan
    values[17] = -np.inf
    values[18, 5], values[18, 6] = np.inf, np.nan
    values[19, 0] = 1e30  # all others vanish
    values[20] = 2.0 ** (np.arange(256) % 40 - 30)
    values[21, 9] = -np.nan
    return values


def e4m3_ties() -> npt.NDArray[np.float32]:
    """[128]: what lies halfway between two e4m3 numbers, and the largest one."""
    from predict.schemes._e4m3 import VALUES

    numbers = VALUES[:127]
    return np.append((numbers[1:] + numbers[:-1]) / 2, [448, 464]).astype(np.float32)


def bits(values: Any) -> npt.NDArray[Any]:
    """An array's bits, for comparing: a NaN equals itself, and 0 is not -0."""
    array = np.asarray(values)
    return array.view(np.uint32) if array.dtype == np.float32 else array.view(np.uint8)
