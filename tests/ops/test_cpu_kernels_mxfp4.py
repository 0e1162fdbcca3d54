"""MXFP4 weights on the CPU: packing, and products that round sums alone, against NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from predict.device.library import Library
from predict.ops import compiled as ops
from predict.schemes import Quantized, scheme_of
from predict.schemes.weight_only_mxfp4 import NAME, TWICE
from tests.support.cpu_kernels import DTYPES, Wide, int32, normal, numpy32, rounded, tensor, threads
from tests.support.expert_blocks import FORMS, experts_of, hidden_of, twin
from tests.support.tolerances import BLOCK_ROUNDINGS, assert_close

OPERATOR = "linear"  # whose candidates the fixture `candidate` goes through

# rows, inputs, outputs: one to several tiles of rows, ends that fill no block, vector or panel.
SHAPES = (
    *((1, 64, 32), (1, 33, 65), (2, 1, 1), (3, 256, 40), (4, 2880, 64), (5, 1056, 33)),
    *((13, 95, 31), (25, 523, 70), (100, 1344, 64)),
)


def random_weight(rng: np.random.Generator, outputs: int, inputs: int) -> Quantized:
    codes = rng.integers(0, 16, (outputs, inputs)).astype(np.int8)
    exponents = rng.integers(-9, 3, (outputs, -(-inputs // 32)))
    return Quantized(codes, np.ldexp(np.float32(1), exponents))


def wide(weight: Quantized) -> Wide:
    values = TWICE[weight.codes] / np.float64(2)
    return values * np.repeat(weight.scale, 32, axis=1)[:, : values.shape[1]]


def operand(library: Library, weight: Quantized, dtype: str) -> list[Any]:
    return list(scheme_of(NAME).tensors(weight, dtype, ops))


def linear(library: Library, x: Any, weights: list[Any], num_outputs: int) -> Any:
    return numpy32(library.op("regatta_linear")(x, weights, None, NAME, num_outputs)[0])


def test_pairs_along_the_inputs_lie_16_bits_apart(compiled: Library) -> None:
    weight = random_weight(np.random.default_rng(0), 40, 70)
    stored, scales = (each.numpy() for each in operand(compiled, weight, "bfloat16")[:2])
    assert stored.shape == (2, 12, 32, 4)
    assert scales.shape == (2, 3, 32)
    lanes = stored.view("<u4")[..., 0]  # [panels, steps, 32]
    nibbles = lanes[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15
    in_order = nibbles.reshape(*nibbles.shape[:-1], 2, 4).swapaxes(-1, -2)  # [.., 4, 2]: k
    codes = in_order.reshape(2, 12, 32, 8).transpose(0, 2, 1, 3).reshape(64, -1)
    np.testing.assert_array_equal(codes[:40, :70], weight.codes)
    assert not codes[40:].any()
    assert not codes[:, 70:].any()
    np.testing.assert_array_equal(scales.transpose(0, 2, 1).reshape(64, 3)[:40], weight.scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_values_that_codes_stand_for(
    compiled: Library, candidate: str, shape: tuple[int, int, int], dtype: str
) -> None:
    rows, inputs, outputs = shape
    rng = np.random.default_rng(rows)
    x = rounded(normal(rng, rows, inputs), dtype)
    weight = random_weight(rng, outputs, inputs)
    got = linear(compiled, tensor(x, dtype), operand(compiled, weight, dtype), outputs)
    assert_close(got, x.astype(np.float64) @ wide(weight).T, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_that_are_exact_come_out_exact(compiled: Library, candidate: str, dtype: str) -> None:
    """Every code in every place of a group, times one value of x at a time."""
    codes = (np.arange(16)[:, None] + np.arange(64)).astype(np.int8) % 16
    scale = np.ldexp(np.float32(1), np.arange(32).reshape(16, 2) % 5 - 2)
    weight = Quantized(codes, scale)
    x = np.eye(64, dtype=np.float32) * 3
    got = linear(compiled, tensor(x, dtype), operand(compiled, weight, dtype), 16)
    np.testing.assert_array_equal(got, 3 * wide(weight).T)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_depend_on_the_batch_or_the_threads(
    compiled: Library, candidate: str, dtype: str
) -> None:
    rng = np.random.default_rng(3)
    x = tensor(normal(rng, 45, 1312), dtype)
    weights = operand(compiled, random_weight(rng, 130, 1312), dtype)
    together = linear(compiled, x, weights, 130)
    for rows in (1, 2, 5, 7, 12, 20):
        for num_threads in (1, 3):
            with threads(compiled, num_threads):
                part = linear(compiled, x[-rows:], weights, 130)
            np.testing.assert_array_equal(part, together[-rows:])


def test_act_order_gathers_the_inputs(compiled: Library, candidate: str) -> None:
    rng = np.random.default_rng(4)
    weight, x = random_weight(rng, 40, 96), normal(rng, 7, 96)
    perm = rng.permutation(96).astype(np.int32)
    weights = [*operand(compiled, weight, "float32")[:3], int32(perm)]
    got = linear(compiled, tensor(x, "float32"), weights, 40)
    assert_close(got, x[:, perm].astype(np.float64) @ wide(weight).T, "float32")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_nan_among_the_activations_reaches_its_row_only(
    compiled: Library, candidate: str, value: float
) -> None:
    rng = np.random.default_rng(8)
    x = normal(rng, 3, 70)
    x[1, 68] = value
    weights = operand(compiled, random_weight(rng, 40, 70), "bfloat16")
    got = linear(compiled, tensor(x, "bfloat16"), weights, 40)
    assert not np.isfinite(got[1]).any()
    assert np.isfinite(got[[0, 2]]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["gpt_oss", "qwen2_moe"])
def test_expert_blocks_equal_their_plain_twins(
    compiled: Library, candidate: str, form: str, dtype: str
) -> None:
    block = replace(FORMS[form], intermediate_size=64)
    packed, weights = experts_of(block, 96, dtype, (NAME, NAME))
    for num_rows in (1, 3, 50):
        hidden = rounded(hidden_of(num_rows, 96), dtype)
        got = numpy32(ops.block(tensor(hidden, dtype), packed)[0])
        assert_close(got, twin(weights, hidden, dtype), dtype, BLOCK_ROUNDINGS)


@pytest.mark.parametrize(
    ("scale", "zero", "message"),
    [
        (np.ones((32, 1), np.float32), None, "a scale for each 32 inputs .*got 1 groups for 64"),
        (np.ones((32, 2), np.float32), np.zeros((32, 2), np.float32), "inputs and zero points"),
        (np.full((32, 2), np.nan, np.float32), None, r"scale\[0, 0\] is nan"),
    ],
)
def test_packing_names_what_it_cannot_take(
    compiled: Library, scale: Any, zero: Any, message: str
) -> None:
    weight = Quantized(np.zeros((32, 64), np.int8), scale, zero)
    with pytest.raises(ValueError, match=message):
        operand(compiled, weight, "float32")


def test_scales_that_do_not_fit_are_named(compiled: Library) -> None:
    rng = np.random.default_rng(12)
    weights = operand(compiled, random_weight(rng, 32, 64), "float32")
    weights[1] = tensor(np.ones((1, 1, 32)), "float32")
    with pytest.raises(ValueError, match="expected one for each 32 of 64 inputs"):
        linear(compiled, tensor(normal(rng, 2, 64), "float32"), weights, 32)


def test_the_plain_twin_multiplies_the_same_values() -> None:
    rng = np.random.default_rng(13)
    weight, x = random_weight(rng, 40, 96), normal(rng, 7, 96)
    scheme = scheme_of(NAME)
    tensors = scheme.tensors(weight, "float32", None)
    np.testing.assert_array_equal(scheme.plain(tensors).numpy(), wide(weight))
    got = scheme.product(tensor(x, "float32"), tensors).numpy()
    assert_close(got, x.astype(np.float64) @ wide(weight).T, "float32")
