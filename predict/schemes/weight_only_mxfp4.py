"""weight_only_mxfp4: e2m1 codes of 4 bits, a power of two for each 32 columns; float activations.

Codes are 0..15: a sign, two bits of exponent, one of mantissa. There are no zero points. Source:
OCP Microscaling Formats (MX) 1.0, 2023, whose conversion `quantize` is.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.schemes._quantized import Quantized
from predict.schemes._rounding import (
    Array,
    RoundWeight,
    as_groups,
    for_row_blocks,
    num_groups,
    positive,
    round_on_host,
)
from predict.schemes._weight_only import plain, product, weight_only_tensors

if TYPE_CHECKING:
    from paddle import Tensor

__all__ = ["NAME", "TWICE", "plain", "product", "quantize", "tensors"]
NAME = "weight_only_mxfp4"
TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # of values
# Magnitudes from which the next code is nearer; at one of them the even code counts.
BORDERS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
LARGEST_EXPONENT = 2  # of e2m1's 6
EXPONENTS = (-127, 127)  # of scales


def quantize(weight: Any, group_size: int, round_weight: RoundWeight = round_on_host) -> Quantized:
    """See predict.schemes.Scheme. Its rule is its own, for the host: `round_weight` has none."""
    weight = weight if isinstance(weight, np.ndarray) else weight.numpy()
    rows, columns = weight.shape
    groups = num_groups(columns, group_size)
    codes = np.empty((rows, columns), np.int8)
    scale = np.empty((rows, groups), np.float32)

    def work(span: slice) -> None:
        values = as_groups(weight[span], groups)
        _, exponents = np.frexp(positive(np.abs(values).max(axis=2)))  # one more than the leading
        exponents = np.clip(exponents - 1 - LARGEST_EXPONENT, *EXPONENTS)
        scale[span] = np.ldexp(np.float32(1), exponents)
        codes[span] = encoded(values / scale[span][:, :, None]).reshape(-1, columns)

    for_row_blocks(rows, columns, work)
    return Quantized(codes, scale)


def encoded(values: Array) -> npt.NDArray[np.int8]:
    """The nearest codes; beyond the largest that one, and 0 of what is no number."""
    magnitudes = np.where(np.isnan(values), np.float32(0), np.abs(values))
    low = np.searchsorted(BORDERS, magnitudes, side="left")
    codes = np.where(low % 2 == 0, low, np.searchsorted(BORDERS, magnitudes, side="right"))
    return (codes + 8 * np.signbit(values)).astype(np.int8)


def tensors(
    weight: Quantized, dtype: str, compiled: ModuleType | None, place: Any = None
) -> tuple[Tensor, ...]:
    """See predict.schemes.Scheme. Plain Paddle's codes are twice the values."""
    if compiled is None:
        weight = replace(weight, codes=TWICE[np.asarray(weight.codes)], scale=weight.scale / 2)
    return weight_only_tensors(NAME, weight, dtype, compiled, place)
