"""AWQ (Lin et al. 2023): scales that protect the channels with large inputs, and clipped ranges.

Where the paper's code multiplies sampled inputs, ours weighs weight errors with the Hessian of the
inputs, mean(x x^T): the same loss over every calibration token, without keeping any.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quant.grids import Array, Sharing, WeightGrid, round_to_nearest

NUM_STEPS = 20  # of the exponent, and of the clipping shares
MAX_SHRINK = 0.5  # ranges are clipped to no less than this share


def output_error(error: Array, hessian: Array) -> float:
    """Mean over inputs x of |error x|^2, for a weight error [N, K] and hessian mean(x x^T)."""
    return float(np.einsum("nk,nk->", error @ hessian, error, dtype=np.float64))


def shared(values: Array, sharing: Sharing | None) -> Array:
    """Per channel the mean over the channels that must have one scale.

    values: [K]. sharing: [K] channel -> number of its set; None: every channel alone.
    """
    if sharing is None:
        return values
    means = np.bincount(sharing, weights=values) / np.bincount(sharing)
    result: Array = means[sharing].astype(np.float32)
    return result


def candidate_scales(mean_abs: Array, sharing: Sharing | None = None) -> Array:
    """Channel scales that the search tries, [NUM_STEPS, K]; the first is 1.

    mean_abs: [K] mean of |x|. sharing: see `shared`.
    """
    importance = np.maximum(shared(mean_abs, sharing), np.float32(1e-8))
    scales = [np.ones(len(mean_abs), np.float32)]
    for step in range(1, NUM_STEPS):
        scale = importance ** np.float32(step / NUM_STEPS)
        scale = scale / np.sqrt(scale.max() * scale.min())
        scales.append(np.clip(scale, np.float32(1e-4), np.float32(1e4)))
    return np.stack(scales)


def scale_losses(
    weight: Array, hessian: Array, grid: WeightGrid, scales: Array
) -> npt.NDArray[np.float64]:
    """The loss of rounding weight [N, K] * s (inputs / s), for each s of the scales [S, K]."""
    rounded = (round_to_nearest(weight * s, grid).plain() / s for s in scales)
    return np.array([output_error(each - weight, hessian) for each in rounded])


def search_scale(
    weight: Array,
    hessian: Array,
    mean_abs: Array,
    grid: WeightGrid,
    sharing: Sharing | None = None,
) -> tuple[Array, float, float]:
    """Channel scales s [K] for which rounding weight * s (inputs / s) loses least.

    weight: [N, K], all linears that read the input. mean_abs, sharing: see `candidate_scales`.
    Returns s, its loss and the loss of s = 1; s is 1 where nothing does better.
    """
    scales = candidate_scales(mean_abs, sharing)
    losses = scale_losses(weight, hessian, grid, scales)
    best = int(losses.argmin())
    return scales[best], float(losses[best]), float(losses[0])


def search_clip(weight: Array, hessian: Array, grid: WeightGrid) -> Array:
    """Weight [N, K] with every group cut to the range whose rounding loses least.

    A group's loss counts its own inputs only, as in the paper's code.
    """
    rows, columns = weight.shape
    width = grid.width(columns)
    groups = weight.reshape(rows, columns // width, width)
    blocks = np.stack(
        [hessian[at : at + width, at : at + width] for at in range(0, columns, width)]
    )
    absmax = np.abs(groups).max(axis=-1, keepdims=True)
    best = absmax
    best_loss = np.full(groups.shape[:2], np.inf, np.float32)
    for step in range(int(MAX_SHRINK * NUM_STEPS)):
        limit = absmax * np.float32(1.0 - step / NUM_STEPS)
        clipped = np.clip(groups, -limit, limit)
        scale, zero = grid.scales(clipped)
        error = grid.round(clipped, scale[..., None], zero[..., None]) - groups
        # [G, N, width] @ [G, width, width]: one matrix product per group.
        by_group = error.transpose(1, 0, 2)
        loss = np.einsum("gnk,gnk->ng", by_group @ blocks, by_group)
        better = loss < best_loss
        best_loss = np.where(better, loss, best_loss)
        best = np.where(better[..., None], limit, best)
    clipped = np.clip(groups, -best, best)
    return np.ascontiguousarray(clipped.reshape(rows, columns))
