"""Observers against distributions whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from predict.errors import UserError
from predict.schemes._e4m3 import E4M3_MAX
from quant.grids import round_fp8, round_int8
from quant.observers import NUM_BINS, OBSERVERS, Histogram, make_observer


def observed(method: str, *batches: np.ndarray, number_format: str = "int8") -> np.ndarray:
    observer = make_observer(method, number_format)
    for batch in batches:
        observer.update(np.atleast_2d(batch).astype(np.float32))
    return observer.range()


def test_abs_max_is_the_largest_magnitude_of_all_batches() -> None:
    assert observed("abs_max", np.array([1.0, -3.0]), np.array([2.0, 0.5])) == [3.0]


def test_avg_is_the_mean_of_the_batches_largest() -> None:
    assert observed("avg", np.array([1.0, -3.0]), np.array([2.0, 0.5])) == [2.5]


def test_every_row_is_a_group_of_its_own() -> None:
    values = np.array([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [10.0, 0.0, -4.0]])
    for method in ("abs_max", "avg"):
        found = observed(method, values)
        assert found[0] == 2.0
        assert 0 < found[1] < 1e-6
        assert found[2] == 10.0


def test_percentile_of_a_uniform_distribution_is_its_quantile() -> None:
    values = np.random.default_rng(0).uniform(-4, 4, 200_000)
    assert observed("percentile", values)[0] == pytest.approx(4 * 0.9999, rel=2 / NUM_BINS)


def test_percentile_ignores_a_rare_outlier() -> None:
    values = np.random.default_rng(0).uniform(-1, 1, 200_000)
    values[7] = 50.0
    assert observed("percentile", values)[0] == pytest.approx(1.0, abs=50 / NUM_BINS)
    assert observed("abs_max", values)[0] == 50.0


@pytest.mark.parametrize("method", ["mse", "kl"])
def test_a_uniform_distribution_is_not_clipped(method: str) -> None:
    values = np.random.default_rng(0).uniform(-3, 3, 100_000)
    assert observed(method, values)[0] == pytest.approx(3.0, rel=0.02)


def test_mse_clips_where_a_search_over_the_values_themselves_does() -> None:
    values = np.random.default_rng(1).laplace(0, 1, 100_000).astype(np.float32)
    shares = np.arange(0.2, 1.0001, 0.01) * np.abs(values).max()
    losses = [np.mean((round_int8(values, limit) - values) ** 2) for limit in shares]
    best = shares[int(np.argmin(losses))]
    found = observed("mse", values[:50_000], values[50_000:])[0]
    assert found == pytest.approx(best, rel=0.05)
    assert found < 0.95 * np.abs(values).max()


def test_kl_cuts_a_tail_that_costs_resolution() -> None:
    generator = np.random.default_rng(2)
    values = generator.normal(0, 1, 100_000)
    values[:3] = [40.0, -45.0, 50.0]
    assert 3.0 < observed("kl", values)[0] < 25.0


def test_fp8_needs_less_clipping_than_int8() -> None:
    """e4m3 keeps relative precision, so a tail costs it little."""
    values = np.random.default_rng(1).laplace(0, 1, 100_000)
    assert observed("mse", values, number_format="fp8") > observed("mse", values)


@pytest.mark.parametrize("method", sorted(OBSERVERS))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused(method: str, bad: float) -> None:
    values = np.ones(100)
    values[31] = bad
    with pytest.raises(UserError, match="NaN or infinity"):
        observed(method, values)


@pytest.mark.parametrize("method", sorted(OBSERVERS))
def test_no_batch_is_an_error(method: str) -> None:
    with pytest.raises(UserError, match="no calibration batch"):
        make_observer(method).range()


def test_an_unknown_observer_names_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"abs_max.*did you mean mse"):
        make_observer("msee")


def test_a_growing_histogram_keeps_its_counts() -> None:
    generator = np.random.default_rng(3)
    batches = [generator.normal(0, size, 5000) for size in (0.1, 5.0, 1.0, 60.0)]
    histogram = Histogram()
    for batch in batches:
        histogram.update(batch[None].astype(np.float32))
    everything = np.abs(np.concatenate(batches).astype(np.float32))
    assert histogram.counts.sum() == len(everything)
    assert histogram.absmax == everything.max()
    below = np.cumsum(histogram.counts[0])
    for index in (NUM_BINS // 4, NUM_BINS // 2):
        border = (index + 1) * histogram.top[0] / NUM_BINS
        assert below[index] == pytest.approx((everything < border).sum(), abs=3)


def test_e4m3_rounding_equals_the_list_of_its_numbers() -> None:
    """Every e4m3 number maps to itself, and what lies between to the nearer neighbour."""
    denormal = [m * 2.0**-9 for m in range(8)]
    normal = [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]
    numbers = np.array(denormal + normal, np.float32)
    assert numbers[-1] == E4M3_MAX
    assert np.array_equal(round_fp8(numbers, E4M3_MAX), numbers)
    values = np.random.default_rng(4).uniform(0, 460, 20_000).astype(np.float32) ** 2 / 460
    nearest = np.abs(values[:, None] - numbers).min(axis=1)
    assert np.array_equal(np.abs(round_fp8(values, E4M3_MAX) - values), nearest)
    assert np.array_equal(round_fp8(-values, E4M3_MAX), -round_fp8(values, E4M3_MAX))
    # Halfway: to the even mantissa.
    assert round_fp8(np.array([1.0625, 1.1875]), E4M3_MAX)[0] == 1.0
    assert round_fp8(np.array([1e9]), 2.0)[0] == 2.0
