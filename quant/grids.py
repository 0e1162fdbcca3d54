"""Number grids, and rounding to them.

A weight matrix is [N, K] = [out_features, in_features]; G groups of K / G columns share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.errors import UserError
from predict.schemes._e4m3 import E4M3_MAX, encode, values_of

Array = npt.NDArray[Any]  # float32, where nothing else is said
Sharing = npt.NDArray[np.int64]  # [K] channel -> number of the set that has one scale

INT8_MAX = 127.0
# Shares of the largest value that a scale search tries, besides the whole.
SEARCH_SHARES = tuple(np.arange(0.65, 1.0, 0.05).tolist())


@dataclass(frozen=True)
class WeightGrid:
    """Integer grid of a weight: w = (code - zero) * scale, one scale and zero per group and row.

    Codes run from 0 to 2^bits - 1. Symmetric: zero is 2^(bits-1), and without search the largest
    absolute value lies on the last code: 4 bits are absmax/7 as in PaddleNLP, 8 bits absmax/127.
    """

    bits: int = 4
    group_size: int = -1  # input columns per scale; -1: the whole row
    symmetric: bool = True
    search: bool = True  # take the scale with the least squared error, not the absmax

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 8):
            raise UserError(f"{self.bits} bits per weight are not supported (allowed: 2, 3, 4, 8)")
        if self.group_size != -1 and self.group_size < 1:
            raise UserError(f"group size {self.group_size} must be positive, or -1 for one group")

    @property
    def max_code(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The code of zero in a symmetric grid."""
        return 1 << (self.bits - 1)

    @property
    def min_code(self) -> int:
        """The smallest code that is used."""
        # int8 kernels take -127 to 127, so that a code and its negative both exist.
        return 1 if self.symmetric and self.bits == 8 else 0

    def width(self, in_features: int) -> int:
        """Columns per group; raises UserError where they do not divide the matrix."""
        width = in_features if self.group_size == -1 else self.group_size
        if in_features % width:
            raise UserError(
                f"group size {width} does not divide the {in_features} input features of a linear; "
                "choose a divisor of it, or -1 for one scale per output channel"
            )
        return width

    def scales(self, groups: Array) -> tuple[Array, Array]:
        """Scale and zero [...] of values [..., width]. A scale may be negative."""
        low, high = groups.min(axis=-1), groups.max(axis=-1)
        scale, zero = self._range(low, high, 1.0)
        if not self.search:
            return scale, zero
        tried = [self._range(low, high, share) for share in SEARCH_SHARES]
        if self.symmetric and self.min_code == 0:
            # The largest value on code 0, which has no opposite: a finer step for one more code.
            peak = np.where(high > -low, high, low)
            finer = np.where(peak == 0, np.float32(1.0), peak / np.float32(-self.middle))
            tried.append((finer, zero))
        best = self._loss(groups, scale, zero)
        for tried_scale, tried_zero in tried:
            loss = self._loss(groups, tried_scale, tried_zero)
            better = loss < best
            best = np.where(better, loss, best)
            scale = np.where(better, tried_scale, scale)
            zero = np.where(better, tried_zero, zero)
        return scale, zero

    def _range(self, low: Array, high: Array, share: float) -> tuple[Array, Array]:
        share = np.float32(share)
        if self.symmetric:
            top = np.maximum(np.abs(low), np.abs(high)) * share
            scale = top / np.float32(self.middle - 1)
            scale = np.where(scale > 0, scale, np.float32(1.0))
            return scale, np.full_like(scale, self.middle)
        # Zero is always on the grid: padding and pruned weights stay exact.
        low, high = np.minimum(low, 0) * share, np.maximum(high, 0) * share
        scale = (high - low) / np.float32(self.max_code)
        scale = np.where(scale > 0, scale, np.float32(1.0))
        zero = np.clip(np.rint(-low / scale), 0, self.max_code)
        return scale, zero.astype(np.float32)

    def _loss(self, groups: Array, scale: Array, zero: Array) -> Array:
        error = self.round(groups, scale[..., None], zero[..., None]) - groups
        return np.einsum("...k,...k->...", error, error)

    def codes(self, values: Array, scale: Array, zero: Array) -> Array:
        """Codes of values, as floats; scale and zero broadcast against them."""
        return np.clip(np.rint(values / scale) + zero, self.min_code, self.max_code)

    def round(self, values: Array, scale: Array, zero: Array) -> Array:
        """The nearest values on the grid."""
        return (self.codes(values, scale, zero) - zero) * scale


@dataclass(frozen=True)
class QuantizedWeight:
    """Codes and scales of one matrix [N, K]; see WeightGrid for their meaning."""

    codes: npt.NDArray[np.uint8]  # [N, K], 0 to 2^bits - 1
    scale: Array  # [N, G]
    zero: Array  # [N, G]
    group_of: npt.NDArray[np.int32] | None = None  # [K]; None: groups of neighbouring columns

    def plain(self) -> Array:
        """The dequantized matrix [N, K]."""
        columns = self.group_of
        if columns is None:
            width = self.codes.shape[1] // self.scale.shape[1]
            columns = np.arange(self.codes.shape[1], dtype=np.int32) // width
        scale, zero = self.scale[:, columns], self.zero[:, columns]
        result: Array = (self.codes.astype(np.float32) - zero) * scale
        return result


def round_to_nearest(weight: Array, grid: WeightGrid) -> QuantizedWeight:
    """The matrix [N, K] with every value at its nearest code."""
    rows, columns = weight.shape
    width = grid.width(columns)
    groups = weight.reshape(rows, columns // width, width)
    scale, zero = grid.scales(groups)
    codes = grid.codes(groups, scale[..., None], zero[..., None])
    return QuantizedWeight(codes.reshape(rows, columns).astype(np.uint8), scale, zero)


def round_int8(values: npt.NDArray[Any], absmax: npt.NDArray[Any] | float) -> Array:
    """Values after symmetric int8: round(127 x / absmax), half to even, clipped to +-127."""
    scale = np.maximum(np.asarray(absmax, np.float32), np.float32(1e-30)) / np.float32(INT8_MAX)
    codes = np.clip(np.rint(np.asarray(values, np.float32) / scale), -INT8_MAX, INT8_MAX)
    return (codes * scale).astype(np.float32)


def round_fp8(values: npt.NDArray[Any], absmax: npt.NDArray[Any] | float) -> Array:
    """Values after e4m3 with absmax at 448."""
    scale = np.maximum(np.asarray(absmax, np.float32), np.float32(1e-30)) / np.float32(E4M3_MAX)
    return values_of(encode(np.asarray(values, np.float32) / scale)) * scale
