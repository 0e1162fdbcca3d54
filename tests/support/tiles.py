"""The scalar twin of AMX's products of bfloat16 and float16 tiles (TDPBF16PS, TDPFP16PS)."""

from __future__ import annotations

import numpy as np

from tests.support.cpu_kernels import Array, Wide

TINY = np.finfo(np.float32).tiny
STEP = 32  # values of k that one instruction takes


def flushed(values: Array | Wide) -> Array:
    """Rounded to float32, denormals to zeros of their sign."""
    rounded = np.asarray(values, np.float32)
    return np.where(np.abs(rounded) < TINY, np.copysign(np.float32(0), rounded), rounded)


def tile_product(x: Array, weight: Array) -> Array:
    """x [M, K] times weight [N, K] transposed, both of bfloat16 or float16 values.

    Of each 32 values of k, the last ones filled up with zeros, the even and the odd ones are summed
    apart, k by k with one rounding each (float64 holds such a product and sum exactly enough); then
    both together, and that to the sum of the values before.
    """
    pad = -x.shape[1] % STEP
    rows, columns = (flushed(np.pad(each, ((0, 0), (0, pad)))) for each in (x, weight))
    total = np.zeros((len(x), len(weight)), np.float32)
    for begin in range(0, rows.shape[1], STEP):
        halves = []
        for first in (begin, begin + 1):
            half = np.zeros_like(total)
            for k in range(first, begin + STEP, 2):
                product = np.outer(rows[:, k].astype(np.float64), columns[:, k])
                half = flushed(product + half)
            halves.append(half)
        total = flushed(total + flushed(halves[0] + halves[1]))
    return total
