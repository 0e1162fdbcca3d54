"""The rules of rounding as NumPy does them: order of sums, and codes of what is no number."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from predict.device import library
from predict.ops import plain
from predict.schemes import known_schemes, round_on_host, scheme_of
from predict.schemes._rounding import CLIPS, NUM_LANES, RULES, sums_of_columns, sums_of_rows
from tests.support import rounding
from tests.support.schemes import normal

paddle = library.import_paddle()
F = np.float32


def in_order(values: npt.NDArray[np.float32]) -> np.float32:
    """The sum of a row, one addition after the other."""
    lanes = [F(0)] * NUM_LANES
    for index, value in enumerate(values):
        lanes[index % NUM_LANES] += value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
    return lanes[0]


@pytest.mark.parametrize("size", [1, 3, 32, 64, 100, 127, 128, 129, 384, 1000, 4096])
def test_sums_are_added_in_the_order_that_all_devices_keep(size: int) -> None:
    values = normal((9, size)) ** 2
    wanted = [in_order(row) for row in values]
    assert sums_of_rows(values).tolist() == wanted
    if size <= NUM_LANES:
        assert sums_of_columns(np.ascontiguousarray(values.T)).tolist() == wanted


@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_int4_scales_are_those_of_least_error_in_that_order(group_size: int) -> None:
    weight = rounding.matrix((6, 384))
    _, scale, _ = round_on_host(weight, "int4", group_size)
    size = 384 if group_size == -1 else group_size
    for group, got in zip(weight.reshape(-1, size), scale.reshape(-1), strict=True):
        largest, peak = np.abs(group).max(), group[np.abs(group).argmax()]
        candidates = [F(clip) * largest / F(7) for clip in CLIPS] + [peak / F(-8)]
        errors = [
            in_order((np.clip(np.rint(group * (F(1) / c)), -8, 7) * c - group) ** 2)
            for c in candidates
        ]
        assert got == candidates[errors.index(min(errors))]


@pytest.mark.parametrize("group_size", [128, -1])
@pytest.mark.parametrize("rule", RULES)
def test_what_is_no_number_has_a_code(rule: str, group_size: int) -> None:
    weight = rounding.hard_matrix()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        codes, scale, _ = round_on_host(weight, rule, group_size)
    nan = 127 if rule == "e4m3" else 0
    assert (codes[np.isnan(weight)] == nan).all()
    if group_size == -1:
        numbers = weight[15, np.arange(256) != 3]
        largest = {"int8": 127, "int4": 7, "e4m3": 448}[rule]
        assert scale.reshape(-1)[15] == F(1) / F(largest)  # beside a NaN, the scale of ones
        wanted = np.clip(np.rint(numbers / scale.reshape(-1)[15]), -8, 7) + 8
        if rule == "int4":
            np.testing.assert_array_equal(np.delete(codes[15], 3), wanted)
    if rule == "int8":
        assert codes.min() >= -127


@pytest.mark.parametrize("scheme", known_schemes())
def test_schemes_leave_rounding_to_whom_they_are_told(scheme: str) -> None:
    asked = []

    def round_weight(weight: Any, rule: str, group_size: int) -> tuple[Any, Any, Any]:
        asked.append(rule)
        return round_on_host(normal((4, 128)), rule, group_size)

    # MXFP4's rule is its own, for the host: checkpoints bring the codes.
    weight = normal((4, 128)) if scheme == "weight_only_mxfp4" else object()
    scheme_of(scheme).quantize(weight, -1, round_weight)
    assert len(asked) == (scheme not in ("dense", "weight_only_mxfp4"))
    assert set(asked) <= set(RULES)


@pytest.mark.parametrize("dtype", rounding.DTYPES)
@pytest.mark.parametrize(("rule", "group_size"), [("int8", 64), ("int4", -1), ("e4m3", 128)])
def test_tensors_are_rounded_as_their_values(rule: str, group_size: int, dtype: str) -> None:
    tensor = paddle.to_tensor(rounding.matrix((130, 256))).astype(dtype)
    got = plain.round_weight(tensor, rule, group_size)
    wanted = round_on_host(tensor.astype("float32").numpy(), rule, group_size)
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(rounding.bits(one.numpy()), rounding.bits(other))


def test_matrices_are_turned_round() -> None:
    values = normal((5, 7))
    np.testing.assert_array_equal(plain.transposed(paddle.to_tensor(values)).numpy(), values.T)
