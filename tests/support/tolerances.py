"""How far a kernel may be from the same arithmetic in float64: one table by dtype for all tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Tolerance:
    """|got - want| <= relative * |want| + absolute * (root mean square of want)."""

    relative: float
    absolute: float


# Sums are float32 in every dtype; the rest is the rounding of the result (half a unit in the last
# place is 2^-9 in bfloat16, 2^-12 in float16) and of one intermediate result.
TOLERANCES = {
    "float32": Tolerance(relative=1e-5, absolute=1e-5),
    "bfloat16": Tolerance(relative=8e-3, absolute=8e-3),
    "float16": Tolerance(relative=1e-3, absolute=1e-3),
}


# A block op rounds the results of its norm, its first GEMM and its middle besides its own.
BLOCK_ROUNDINGS = 4


def assert_close(
    got: npt.NDArray[np.float32],
    want: npt.ArrayLike,
    dtype: str,
    roundings: int = 1,
    size: npt.NDArray[np.float32] | None = None,
) -> None:
    """Raises AssertionError with the worst element unless `got` is within `dtype`'s tolerance.

    roundings: how many results on the way to `got`, itself included, were rounded to `dtype`.
    size: in place of the root mean square, of one element or of all; shaped to go with `got`.
    """
    tolerance = TOLERANCES[dtype]
    expected = np.asarray(want, dtype=np.float64)
    assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
    if expected.size == 0:
        return
    assert np.isfinite(got).all(), f"{np.count_nonzero(~np.isfinite(got))} values are not finite"
    allowed = tolerance.relative * np.abs(expected)
    allowed += tolerance.absolute * (np.sqrt(np.mean(expected**2)) if size is None else size)
    allowed *= roundings
    excess = np.abs(got - expected) - allowed
    if excess.max() <= 0:
        return
    worst = np.unravel_index(excess.argmax(), excess.shape)
    raise AssertionError(
        f"{np.count_nonzero(excess > 0)} of {got.size} values differ; worst at {worst}: "
        f"{got[worst]}, expected {expected[worst]} within {allowed[worst]}"
    )
