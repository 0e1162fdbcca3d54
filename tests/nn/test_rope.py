"""Rotary tables. The methods' numbers are held against HF transformers by the golden tests."""

import numpy as np
import pytest

from predict.nn.rope import METHODS, attention_factor, rope_table
from predict.nn.spec import RopeSpec


def test_default_table_is_cos_then_sin_of_position_times_frequency() -> None:
    table = rope_table(RopeSpec(theta=100.0), head_dim=4, num_positions=3, max_position=3)
    angles = np.outer([0, 1, 2], [1.0, 0.1])
    np.testing.assert_allclose(table, np.hstack([np.cos(angles), np.sin(angles)]), atol=1e-6)


def test_linear_scaling_stretches_positions() -> None:
    plain = rope_table(RopeSpec(), 8, 16, 16)
    stretched = rope_table(RopeSpec(method="linear", factor=2.0), 8, 32, 16)
    np.testing.assert_allclose(stretched[::2], plain, atol=1e-6)


def test_dynamic_scaling_starts_past_the_original_context() -> None:
    rope = RopeSpec(method="dynamic", factor=2.0)
    plain = rope_table(RopeSpec(), 8, 64, 16)
    scaled = rope_table(rope, 8, 64, 16)
    np.testing.assert_array_equal(scaled[:16], plain[:16])
    assert np.abs(scaled[40] - plain[40]).max() > 0.1


def test_dynamic_row_does_not_depend_on_the_table_length() -> None:
    rope = RopeSpec(method="dynamic", factor=4.0)
    short, long = rope_table(rope, 8, 40, 16), rope_table(rope, 8, 400, 16)
    np.testing.assert_array_equal(short, long[:40])


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_gives_finite_rows_of_rotary_dims(method: str) -> None:
    rope = RopeSpec(method=method, factor=4.0, original_max_position=32, rotary_dim=16)
    table = rope_table(rope, 32, 100, 128)
    assert table.shape == (100, 16)
    assert table.dtype == np.float32
    assert np.isfinite(table).all()


def test_only_yarn_scales_the_attention() -> None:
    assert attention_factor(RopeSpec(method="linear", factor=4.0)) == 1.0
    assert attention_factor(RopeSpec(method="yarn", factor=4.0)) == pytest.approx(1.13863)
