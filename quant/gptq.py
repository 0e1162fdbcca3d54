"""GPTQ (Frantar et al. 2022): rounds column by column; later columns compensate the errors.

Minimises |X (W - Q)^T|^2 over calibration inputs X through the Hessian H = X^T X. Ours differs from
the paper's code in working on NumPy float64 factors and in `static_groups`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from predict.errors import UserError
from quant.grids import Array, QuantizedWeight, WeightGrid

BLOCK = 128  # columns whose errors are spread at once over those behind them


@dataclass(frozen=True)
class GptqConfig:
    """Settings of the method.

    damping: share of the Hessian's mean diagonal that is added to it. act_order: columns with large
    inputs first. static_groups: groups are of neighbouring columns, with scales fixed beforehand,
    also under act_order; else groups follow the order, and readers must gather columns by it.
    """

    damping: float = 0.1
    act_order: bool = True
    static_groups: bool = True


class Hessian:
    """The sum of x x^T over inputs x, [K, K], and how many there were."""

    def __init__(self, in_features: int) -> None:
        self.sum = np.zeros((in_features, in_features), np.float32)
        self.num_rows = 0

    def update(self, inputs: Array) -> None:
        """Adds inputs [T, K]."""
        with np.errstate(over="ignore", invalid="ignore"):  # `mean` says what happened
            self.sum += inputs.T @ inputs
        self.num_rows += len(inputs)

    def mean(self) -> Array:
        """The mean over inputs; raises UserError when there were none or one was not finite."""
        if self.num_rows == 0:
            raise UserError("no calibration batch has been observed; give more calibration data")
        if not np.isfinite(self.sum).all():
            raise UserError("the inputs hold NaN or infinity, or their squares overflow")
        mean: Array = self.sum / np.float32(self.num_rows)
        return mean


def inverse_factor(hessian: Array, damping: float) -> Array:
    """Upper U with U^T U = inverse of the damped hessian [K, K], float64, which is overwritten.

    Row i of U over its diagonal: the change of the columns behind i for an error in column i.
    Raises UserError when the matrix is not positive definite even so.
    """
    diagonal = np.einsum("kk->k", hessian)  # a view
    diagonal += damping * diagonal.mean()
    try:
        # Factored from the last column up, H = V V^T with V upper, so that U is V's inverse:
        # the inverse of H, which loses digits, is never formed.
        flipped = np.linalg.cholesky(hessian[::-1, ::-1])
    except np.linalg.LinAlgError:
        raise UserError(
            f"the Hessian of a linear is not positive definite with a damping of {damping}; raise "
            "--gptq_percdamp or give more calibration data"
        ) from None
    upper = flipped[::-1, ::-1]
    _invert_upper(upper)
    return upper


def _invert_upper(matrix: Array) -> None:
    """Inverts an upper triangular matrix in place, by halves: nearly all work is products."""
    if len(matrix) <= BLOCK:
        matrix[...] = np.triu(np.linalg.inv(matrix))
        return
    half = len(matrix) // 2
    left, right = matrix[:half, :half], matrix[half:, half:]
    _invert_upper(left)
    _invert_upper(right)
    matrix[:half, half:] = -(left @ (matrix[:half, half:] @ right))


def gptq(
    weight: Array, hessian: Array, grid: WeightGrid, config: GptqConfig | None = None
) -> QuantizedWeight:
    """Quantizes weight [N, K] for inputs with hessian [K, K]."""
    config = config or GptqConfig()
    rows, columns = weight.shape
    width = grid.width(columns)
    work = weight.astype(np.float32).copy()
    importance = np.diag(hessian)
    order = np.arange(columns)
    if config.act_order:
        order = np.argsort(-importance, kind="stable")
    ordered = hessian[np.ix_(order, order)].astype(np.float64)
    # Columns of inputs that are always 0 are rounded without compensation.
    dead = np.flatnonzero(importance[order] <= 0)
    ordered[dead, dead] = 1.0
    follow_order = config.act_order and not config.static_groups and width < columns
    group_of_position = (np.arange(columns) if follow_order else order) // width
    work = np.ascontiguousarray(work[:, order])
    factor = inverse_factor(ordered, config.damping).astype(np.float32)

    num_groups = columns // width
    scale = np.ones((rows, num_groups), np.float32)
    zero = np.full((rows, num_groups), grid.middle, np.float32)
    # With static groups the scales come from the untouched weight, else when a group begins.
    known = np.zeros(num_groups, bool)
    if config.static_groups and config.act_order:
        grouped = weight.reshape(rows, num_groups, width)
        scale, zero = grid.scales(grouped)
        known[:] = True

    codes = np.empty((rows, columns), np.uint8)
    for begin in range(0, columns, BLOCK):
        end = min(begin + BLOCK, columns)
        errors = np.empty((rows, end - begin), np.float32)
        for column in range(begin, end):
            group = group_of_position[column]
            if not known[group]:
                # Columns of this group beyond the block still lack this block's corrections.
                members = work[:, column : column + width]
                if column + width > end:
                    tail = slice(end, column + width)
                    done = errors[:, : column - begin] @ factor[begin:column, tail]
                    members = np.concatenate([work[:, column:end], work[:, tail] - done], axis=1)
                scale[:, group], zero[:, group] = grid.scales(members)
                known[group] = True
            values = work[:, column]
            found = grid.codes(values, scale[:, group], zero[:, group])
            codes[:, order[column]] = found
            error = (values - (found - zero[:, group]) * scale[:, group]) / factor[column, column]
            errors[:, column - begin] = error
            work[:, column + 1 : end] -= np.outer(error, factor[column, column + 1 : end])
        work[:, end:] -= errors @ factor[begin:end, end:]
    group_of = None
    if follow_order:
        group_of = np.empty(columns, np.int32)
        group_of[order] = group_of_position
    return QuantizedWeight(codes, scale, zero, group_of)
