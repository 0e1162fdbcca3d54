"""Rotary tables. The methods' numbers are held against HF transformers by the golden tests."""

import dataclasses

import numpy as np
import pytest

from predict.nn.blocks import Positions
from predict.nn.kinds.attention import AttentionBlock
from predict.nn.rope import METHODS, attention_factor, rope_table, step_of
from predict.nn.spec import RopeSpec
from tests.support.records import llama_spec


@pytest.mark.parametrize(("num_positions", "factor"), [(32, 1.25), (33, 1.5)])
def test_longest_context_chooses_the_factor_of_angles(num_positions: int, factor: float) -> None:
    same = RopeSpec(
        method="longrope", original_max_position=32, short_factor=(1.0,) * 4, long_factor=(1.0,) * 4
    )
    scaled = dataclasses.replace(same, short_attention_factor=1.25, long_attention_factor=1.5)
    tables = [rope_table(rope, 8, num_positions, 64) for rope in (same, scaled)]
    np.testing.assert_allclose(tables[1], factor * tables[0], rtol=1e-6)


def test_rows_grow_with_the_logarithm_of_how_often_training_fits() -> None:
    rope = RopeSpec(original_max_position=16)
    plain, grown = (
        rope_table(each, 8, 64, 64) for each in (rope, dataclasses.replace(rope, log_growth=0.5))
    )
    factors = 1 + 0.5 * np.log([1, 2, 3, 4])
    np.testing.assert_allclose(grown, np.repeat(factors, 16)[:, None] * plain, rtol=1e-6)


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
    rope = RopeSpec(
        method=method,
        factor=4.0,
        original_max_position=32,
        rotary_dim=16,
        short_factor=(1.0,) * 8,
        long_factor=(2.0,) * 8,
    )
    table = rope_table(rope, 32, 100, 128)
    assert table.shape == (300 if method == "dynamic_steps" else 100, 16)
    assert table.dtype == np.float32
    assert np.isfinite(table).all()


@pytest.mark.parametrize(("num_positions", "factors"), [(32, (1.0, 2.0)), (33, (4.0, 8.0))])
def test_longest_context_chooses_the_factors_of_longrope(
    num_positions: int, factors: tuple[float, float]
) -> None:
    rope = RopeSpec(
        theta=100.0,
        method="longrope",
        original_max_position=32,
        short_factor=(1.0, 2.0),
        long_factor=(4.0, 8.0),
    )
    table = rope_table(rope, 4, num_positions, 128)
    angles = np.outer(np.arange(num_positions), np.array([1.0, 0.1]) / factors)
    np.testing.assert_allclose(table, np.hstack([np.cos(angles), np.sin(angles)]), atol=1e-5)


def test_tables_of_the_first_qwen_lie_behind_each_other() -> None:
    """One for each time that a prompt may double the original length."""
    rope = RopeSpec(method="dynamic_steps", original_max_position=16, log_scale_from=16)
    tables = rope_table(rope, 8, 64, 64).reshape(3, 64, 8)
    for table, grown in zip(tables, (1, 3, 7), strict=True):
        theta = 10000.0 * grown ** (8 / 6)
        same = rope_table(RopeSpec(theta=theta, log_scale_from=16), 8, 64, 64)
        np.testing.assert_allclose(table, same, atol=1e-6)


@pytest.mark.parametrize(
    ("prompt_len", "step"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (48, 2), (64, 2), (65, 3)]
)
def test_base_of_the_first_qwen_grows_when_the_prompt_doubles(prompt_len: int, step: int) -> None:
    assert step_of(RopeSpec(original_max_position=16), prompt_len) == step


def test_rows_past_a_length_are_multiplied_by_the_logarithm_to_its_base() -> None:
    plain = rope_table(RopeSpec(), 8, 64, 64)
    scaled = rope_table(RopeSpec(log_scale_from=8), 8, 64, 64)
    np.testing.assert_array_equal(scaled[:8], plain[:8])
    np.testing.assert_allclose(scaled[63], 2 * plain[63], atol=1e-6)


def test_only_yarn_and_longrope_scale_the_attention() -> None:
    longrope = RopeSpec(method="longrope", factor=16.0, original_max_position=4)
    assert attention_factor(longrope) == pytest.approx(3.0**0.5)
    assert attention_factor(RopeSpec(method="linear", factor=4.0)) == 1.0
    assert attention_factor(RopeSpec(method="yarn", factor=4.0)) == pytest.approx(1.13863)


def test_each_table_is_as_wide_as_the_heads_that_it_rotates() -> None:
    sizes = {"vocab_size": 9, "hidden_size": 64, "intermediate_size": 8, "max_position": 16}
    spec = llama_spec(**sizes, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32)

    def wider(layer: int, block: AttentionBlock, table: int) -> AttentionBlock:
        wide = dataclasses.replace(block, head_dim=64, positions=Positions(table=table))
        return wide if layer else block

    ropes = RopeSpec(), RopeSpec(theta=9.0), RopeSpec(rotary_dim=8)
    several = dataclasses.replace(spec, ropes=ropes)
    several = several.with_blocks(AttentionBlock, lambda i, b: wider(i, b, 1))
    assert several.rotary_dims == (32, 64, 8)
    with pytest.raises(ValueError, match=r"rotary table 0 is for heads of \[32, 64\] dims"):
        spec.with_blocks(AttentionBlock, lambda i, b: wider(i, b, 0))
