"""SmoothQuant (Xiao et al. 2022), its piecewise search, and the shift of Outlier Suppression+.

All work on one linear's input x [T, K] and weight [N, K]: W x = (W * s) (x / s). The scales s that
are returned multiply the weight's columns and divide the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quant.grids import Array, Sharing, round_int8

ALPHA = 0.5
ALPHA_STEP = 0.1
SCALE_STEP = 1.0
SMALLEST = np.float32(1e-5)


@dataclass(frozen=True)
class PiecewiseSearch:
    """Ranges of the search (PaddleNLP's names).

    Channels are sorted by their largest input and cut into pieces; each piece has an exponent
    alpha and a factor on its scales of its own. search_piece: also look for the number of pieces.
    """

    num_pieces: int = 3
    search_piece: bool = False
    alpha_min: float = 0.2
    alpha_max: float = 0.8
    scale_min: float = 1.0
    scale_max: float = 5.0

    @property
    def alphas(self) -> Array:
        """Exponents to try."""
        return np.arange(self.alpha_min, self.alpha_max + 1e-6, ALPHA_STEP, dtype=np.float32)

    @property
    def factors(self) -> Array:
        """Factors to try."""
        return np.arange(self.scale_min, self.scale_max + 1e-6, SCALE_STEP, dtype=np.float32)


def shared_max(values: Array, sharing: Sharing | None) -> Array:
    """Per channel the largest over the channels that must have one scale; see `awq.shared`."""
    if sharing is None:
        return values
    largest = np.zeros(int(sharing.max()) + 1, np.float32)
    np.maximum.at(largest, sharing, values)
    result: Array = largest[sharing]
    return result


def smooth_scale(
    act_absmax: Array,
    weight: Array,
    alpha: float | Array = ALPHA,
    sharing: Sharing | None = None,
) -> Array:
    """Scales [K]: act^alpha / w^(1 - alpha) of the largest inputs and weights of each channel."""
    act = np.maximum(shared_max(act_absmax, sharing), SMALLEST)
    largest = np.maximum(shared_max(np.abs(weight).max(axis=0), sharing), SMALLEST)
    scale = act**alpha / largest ** (np.float32(1.0) - alpha)
    result: Array = np.clip(scale, SMALLEST, 1 / SMALLEST).astype(np.float32)
    return result


def a8w8_error(inputs: Array, weight: Array, scale: Array) -> float:
    """Mean squared output error of int8 inputs / scale (one scale) and weight * scale (per row)."""
    smoothed = inputs / scale
    stretched = weight * scale
    rounded = round_int8(smoothed, np.abs(smoothed).max())
    rounded_weight = round_int8(stretched, np.abs(stretched).max(axis=1, keepdims=True))
    error = rounded @ rounded_weight.T - inputs @ weight.T
    return float(np.mean(np.square(error), dtype=np.float64))


def piecewise_search(
    readers: Sequence[tuple[Array, Array]],
    act_absmax: Array,
    weight_absmax: Array,
    search: PiecewiseSearch,
    sharing: Sharing | None = None,
) -> tuple[Array, float]:
    """The scales [K] with the least `a8w8_error` of all readers together, and that error.

    readers: of each linear of this input, sampled inputs [T, K] and its weight [N, K]; their errors
    count by their rows. weight_absmax: [K], of all of them. Starts from one alpha for all and
    improves piece after piece, so it is never worse than SmoothQuant's alpha 0.5.
    """
    total = sum(len(inputs) for inputs, _ in readers)

    def error_of(scale: Array) -> float:
        errors = (len(inputs) * a8w8_error(inputs, weight, scale) for inputs, weight in readers)
        return sum(errors) / total

    weight = weight_absmax[None]
    largest = shared_max(act_absmax, sharing)
    rank = np.argsort(np.argsort(largest, kind="stable"), kind="stable")
    # Channels that share a scale have to be in one piece: that of the last of them.
    rank = shared_max(rank, sharing).astype(np.int64)
    counts = range(1, search.num_pieces + 1) if search.search_piece else (search.num_pieces,)
    best = smooth_scale(act_absmax, weight, ALPHA, sharing)
    best_error = error_of(best)
    candidates = {
        float(alpha): smooth_scale(act_absmax, weight, float(alpha), sharing)
        for alpha in search.alphas
    }
    for count in counts:
        piece_of = np.minimum(rank * count // len(rank), count - 1)
        scale = best.copy()
        error = best_error
        for piece in range(count):
            members = piece_of == piece
            for candidate in candidates.values():
                # The factor only matters between pieces.
                for factor in search.factors if count > 1 else (np.float32(1.0),):
                    tried = np.where(members, candidate * factor, scale)
                    tried_error = error_of(tried)
                    if tried_error < error:
                        scale, error = tried, tried_error
        if error < best_error:
            best, best_error = scale, error
    return best, best_error


def shift_of(low: Array, high: Array) -> Array:
    """The shift [K] that centres each channel's range [low, high]: x + shift is symmetric."""
    result: Array = (-(low + high) / 2).astype(np.float32)
    return result
