"""GPTQ, AWQ, SmoothQuant and grids on plain matrices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from predict.errors import UserError
from quant.awq import output_error, search_clip, search_scale
from quant.config import QuantConfig
from quant.gptq import GptqConfig, Hessian, gptq, inverse_factor
from quant.grids import QuantizedWeight, WeightGrid, round_int8, round_to_nearest
from quant.smooth import (
    PiecewiseSearch,
    a8w8_error,
    piecewise_search,
    shift_of,
    smooth_scale,
)

ROWS, COLUMNS, TOKENS = 24, 256, 700


@pytest.fixture(scope="module")
def weight() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.05, (ROWS, COLUMNS)).astype(np.float32)


@pytest.fixture(scope="module")
def inputs() -> np.ndarray:
    """Correlated, with a few channels much larger than the others, as in language models."""
    generator = np.random.default_rng(1)
    mixing = generator.normal(0, 1, (COLUMNS, COLUMNS)) / 16 + np.eye(COLUMNS)
    values = generator.normal(0, 1, (TOKENS, COLUMNS)) @ mixing
    values[:, ::37] *= 12.0
    return values.astype(np.float32)


@pytest.fixture(scope="module")
def hessian(inputs: np.ndarray) -> np.ndarray:
    collected = Hessian(COLUMNS)
    for part in np.array_split(inputs, 3):
        collected.update(part)
    return collected.mean()


def textbook_gptq(
    weight: np.ndarray, hessian: np.ndarray, grid: WeightGrid, config: GptqConfig
) -> np.ndarray:
    """The optimal brain quantizer's update with an explicit inverse, one column after another.

    Returns the dequantized matrix. After a column is fixed, its row and column are eliminated from
    the inverse: no Cholesky factor and no blocks.
    """
    columns = weight.shape[1]
    width = grid.width(columns)
    work = weight.astype(np.float64)
    damped = hessian.astype(np.float64) + config.damping * np.mean(np.diag(hessian)) * np.eye(
        columns
    )
    inverse = np.linalg.inv(damped)
    importance = -np.diag(hessian) if config.act_order else np.arange(columns)
    order = np.argsort(importance, kind="stable").tolist()
    static = config.act_order and config.static_groups
    scales: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    result = np.zeros_like(work)
    left = list(order)
    for position, column in enumerate(order):
        group = column // width if static or not config.act_order else position // width
        if group not in scales:
            if static:
                members = weight[:, group * width : (group + 1) * width]
            else:
                members = work[:, order[position : position + width]]
            scales[group] = grid.scales(members.astype(np.float32))
        scale, zero = scales[group]
        rounded = grid.round(work[:, column].astype(np.float32), scale, zero)
        result[:, column] = rounded
        error = (work[:, column] - rounded) / inverse[column, column]
        left.remove(column)
        work[:, left] -= np.outer(error, inverse[column, left])
        inverse = inverse - np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return result


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("static_groups", [False, True])
@pytest.mark.parametrize("group_size", [-1, 64, 96])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq_equals_the_textbook(
    weight: np.ndarray,
    hessian: np.ndarray,
    act_order: bool,
    static_groups: bool,
    group_size: int,
    symmetric: bool,
) -> None:
    # 96 does not divide the blocks of 128 columns, so that groups cross their borders.
    columns = 192
    weight, hessian = weight[:, :columns], hessian[:columns, :columns]
    grid = WeightGrid(4, group_size, symmetric, search=False)
    config = GptqConfig(0.05, act_order, static_groups)
    expected = textbook_gptq(weight, hessian, grid, config)
    found = gptq(weight, hessian, grid, config).plain()
    # float32 sums tip a value over a rounding border now and then, and what follows with it.
    assert np.mean(np.isclose(found, expected, atol=1e-5)) > 0.97
    loss, textbook = (output_error(x - weight, hessian) for x in (found, expected))
    assert loss == pytest.approx(textbook, rel=0.02)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [-1, 64])
def test_gptq_beats_rounding(
    weight: np.ndarray, hessian: np.ndarray, bits: int, group_size: int
) -> None:
    grid = WeightGrid(bits, group_size)
    nearest = output_error(round_to_nearest(weight, grid).plain() - weight, hessian)
    for act_order in (False, True):
        found = gptq(weight, hessian, grid, GptqConfig(0.01, act_order)).plain()
        assert output_error(found - weight, hessian) < 0.8 * nearest


def test_act_order_groups_say_which_columns_share_a_scale(
    weight: np.ndarray, hessian: np.ndarray
) -> None:
    found = gptq(weight, hessian, WeightGrid(4, 64), GptqConfig(0.01, True, static_groups=False))
    assert found.group_of is not None
    assert np.array_equal(np.bincount(found.group_of), [64, 64, 64, 64])
    # The first group holds the columns with the largest inputs.
    largest = np.argsort(-np.diag(hessian))[:64]
    assert set(np.flatnonzero(found.group_of == 0)) == set(largest)


def test_the_inverse_factor_is_upper_and_squares_to_the_inverse(hessian: np.ndarray) -> None:
    for size in (5, 128, 129, 256):
        matrix = hessian[:size, :size].astype(np.float64)
        damped = matrix + 0.1 * np.mean(np.diag(matrix)) * np.eye(size)
        factor = inverse_factor(matrix, 0.1)
        assert np.array_equal(factor, np.triu(factor))
        assert np.allclose(factor.T @ factor @ damped, np.eye(size), atol=1e-9)


def test_a_hessian_that_is_not_positive_is_refused() -> None:
    with pytest.raises(UserError, match="raise --gptq_percdamp"):
        inverse_factor(np.diag([1.0, -5.0, 1.0]), 0.01)


def test_an_input_that_is_always_zero_changes_nothing(
    weight: np.ndarray, hessian: np.ndarray
) -> None:
    silent = hessian.copy()
    silent[5] = silent[:, 5] = 0
    found = gptq(weight, silent, WeightGrid(4, 64))
    assert np.isfinite(found.plain()).all()


def test_a_hessian_of_nan_is_refused() -> None:
    collected = Hessian(4)
    collected.update(np.full((2, 4), 1e30, np.float32))
    with pytest.raises(UserError, match="NaN or infinity"):
        collected.mean()
    with pytest.raises(UserError, match="no calibration batch"):
        Hessian(4).mean()


def test_output_error_is_the_mean_squared_output(
    weight: np.ndarray, inputs: np.ndarray, hessian: np.ndarray
) -> None:
    error = np.random.default_rng(2).normal(0, 0.01, weight.shape).astype(np.float32)
    expected = np.mean(np.sum((inputs @ error.T) ** 2, axis=1))
    assert output_error(error, hessian) == pytest.approx(expected, rel=1e-4)


def test_awq_scales_beat_rounding_and_keep_the_function(
    weight: np.ndarray, inputs: np.ndarray, hessian: np.ndarray
) -> None:
    grid = WeightGrid(4, 64, symmetric=False)
    mean_abs = np.abs(inputs).mean(axis=0)
    scale, loss, plain_loss = search_scale(weight, hessian, mean_abs, grid)
    assert loss < 0.8 * plain_loss
    rounded = round_to_nearest(weight * scale, grid).plain()
    outputs = (inputs / scale) @ rounded.T - inputs @ weight.T
    assert np.mean(np.sum(outputs**2, axis=1)) == pytest.approx(loss, rel=1e-3)
    # Channels with large inputs are protected.
    assert scale[::37].mean() > 2 * np.median(scale)


def test_channels_that_share_a_scale_get_one(
    weight: np.ndarray, inputs: np.ndarray, hessian: np.ndarray
) -> None:
    sharing = np.arange(COLUMNS) % (COLUMNS // 2)
    grid = WeightGrid(4, 64)
    absmax, largest = np.abs(inputs).max(axis=0), np.abs(weight).max(axis=0)
    search = PiecewiseSearch(num_pieces=2)
    scales = (
        search_scale(weight, hessian, np.abs(inputs).mean(axis=0), grid, sharing)[0],
        smooth_scale(absmax, weight, sharing=sharing),
        piecewise_search([(inputs[:64], weight)], absmax, largest, search, sharing)[0],
    )
    for scale in scales:
        assert np.array_equal(scale[: COLUMNS // 2], scale[COLUMNS // 2 :])


def test_clip_search_beats_rounding(weight: np.ndarray, hessian: np.ndarray) -> None:
    heavy = weight.copy()
    heavy[:, ::50] *= 6  # outliers among the weights
    grid = WeightGrid(4, 64, search=False)
    blocks = np.zeros_like(hessian)
    for at in range(0, COLUMNS, 64):
        part = slice(at, at + 64)
        blocks[part, part] = hessian[part, part]
    clipped = round_to_nearest(search_clip(heavy, hessian, grid), grid).plain()
    nearest = round_to_nearest(heavy, grid).plain()
    assert output_error(clipped - heavy, blocks) < output_error(nearest - heavy, blocks)


def test_smooth_scale_is_the_papers(weight: np.ndarray, inputs: np.ndarray) -> None:
    act = np.abs(inputs).max(axis=0)
    largest = np.abs(weight).max(axis=0)
    assert np.allclose(smooth_scale(act, weight, 0.75), act**0.75 / largest**0.25, rtol=1e-5)
    scale = smooth_scale(act, weight)
    assert np.allclose(act / scale, largest * scale, rtol=1e-4)


def test_smooth_makes_int8_better_and_the_search_better_still(
    weight: np.ndarray, inputs: np.ndarray
) -> None:
    act = np.abs(inputs).max(axis=0)
    plain = a8w8_error(inputs, weight, np.ones(COLUMNS, np.float32))
    smoothed = a8w8_error(inputs, weight, smooth_scale(act, weight))
    search = PiecewiseSearch(num_pieces=3, search_piece=True)
    _, searched = piecewise_search([(inputs, weight)], act, np.abs(weight).max(axis=0), search)
    assert smoothed < plain
    assert searched <= smoothed


def test_shift_centres_every_range() -> None:
    low, high = np.array([-1.0, 2.0, -6.0]), np.array([3.0, 4.0, -2.0])
    assert np.allclose(shift_of(low, high), [-1.0, -3.0, 4.0])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"smooth_k_piece": 0}, "smooth_k_piece 0"),
        ({"search_alpha_min": 0.9}, "--search_alpha_min 0.9"),
        ({"search_scale_min": 0.0}, "search_scale_min 0.0"),
        ({"search_scale_min": 6.0}, "--search_scale_min 6.0"),
    ],
)
def test_a_search_without_a_range_is_refused(changes: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        QuantConfig(model_name_or_path="model", output_path=Path("out"), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_no_value_is_further_than_half_a_step_from_its_code(
    weight: np.ndarray, symmetric: bool, search: bool, bits: int
) -> None:
    grid = WeightGrid(bits, 64, symmetric, search)
    rounded = round_to_nearest(weight, grid)
    assert rounded.codes.max() <= grid.max_code
    error = np.abs(rounded.plain() - weight).reshape(ROWS, -1, 64)
    inside = (rounded.codes > grid.min_code) & (rounded.codes < grid.max_code)
    half = np.abs(rounded.scale)[:, :, None] * 0.5001
    assert (error <= half)[inside.reshape(error.shape)].all()


def test_a_search_for_scales_loses_less() -> None:
    values = np.random.default_rng(5).standard_t(4, (8, 128)).astype(np.float32)
    for symmetric in (False, True):
        loss = [
            np.sum(
                (round_to_nearest(values, WeightGrid(4, 32, symmetric, s)).plain() - values) ** 2
            )
            for s in (False, True)
        ]
        assert loss[1] < loss[0]


def test_a_group_of_zeros_stays_zero() -> None:
    values = np.zeros((2, 64), np.float32)
    for symmetric in (False, True):
        rounded = round_to_nearest(values, WeightGrid(4, 32, symmetric))
        assert np.array_equal(rounded.plain(), values)
        assert (rounded.scale != 0).all()


def test_int8_rounding_matches_the_number_convention() -> None:
    values = np.array([-10.0, 0.5, 127.0, 300.0])
    assert np.array_equal(round_int8(values, 127.0), [-10.0, 0.0, 127.0, 127.0])


def test_group_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="group size 96 does not divide the 256 input features"):
        WeightGrid(4, 96).width(256)
    with pytest.raises(UserError, match="5 bits"):
        WeightGrid(5)


def test_codes_without_group_of_are_neighbouring_groups() -> None:
    codes = np.array([[0, 15, 8, 9]], np.uint8)
    scale = np.array([[2.0, 3.0]], np.float32)
    zero = np.array([[8.0, 7.0]], np.float32)
    assert np.array_equal(QuantizedWeight(codes, scale, zero).plain(), [[-16, 14, 3, 6]])
