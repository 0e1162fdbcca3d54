"""Products by AMX's tiles: the twin's bits, those of vectors, and the same in every batch."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest

from predict.device.library import Library
from tests.support.cpu_kernels import (
    Array,
    force,
    int32,
    normal,
    numpy32,
    packed,
    refusal,
    rounded,
    tensor,
)
from tests.support.quantized_weights import BY_TOKEN, WEIGHT_ONLY, linear, make_weight
from tests.support.tiles import TINY, flushed, tile_product

# rows, inputs, outputs: part of a tile of rows and one to several; blocks of rows and slabs of k;
# ends that fill no step of k and no panel.
SHAPES = (
    (1, 64, 32),
    (1, 523, 40),
    (1, 1, 97),
    (2, 1, 1),
    (5, 33, 65),
    (16, 96, 64),
    (17, 523, 40),
    (33, 62, 31),
    (64, 1120, 96),
    (150, 607, 70),
    (300, 65, 33),
)


@pytest.fixture
def amx(compiled: Library) -> Iterator[Library]:
    """The operators, by tiles."""
    if reason := refusal(compiled, "linear", "amx"):
        pytest.skip(reason)
    assert force(compiled, "amx") is None
    yield compiled
    force(compiled, "")


@pytest.fixture
def halves(compiled: Library) -> Iterator[Library]:
    """The operators, with float16 by tiles too."""
    if reason := refusal(compiled, "linear", "amx_fp16"):
        pytest.skip(reason)
    assert force(compiled, "amx_fp16") is None
    yield compiled
    force(compiled, "")


def logits(library: Library, x: Array, weight: Array, dtype: str = "bfloat16") -> Array:
    """Products as float32, which the operator of the LM head returns."""
    return numpy32(
        library.op("regatta_logits")(
            tensor(x, dtype),
            None,
            [packed(library, weight, dtype)],
            None,
            int32(range(len(x))),
            *("dense", len(weight), 0.0, 1.0, 0.0),
        )[0]
    )


def bfloats(rng: np.random.Generator, rows: int, columns: int) -> Array:
    return rounded(normal(rng, rows, columns), "bfloat16")


def test_the_twin_is_a_matrix_product() -> None:
    rng = np.random.default_rng(0)
    x, weight = bfloats(rng, 3, 70), bfloats(rng, 5, 70)
    np.testing.assert_allclose(tile_product(x, weight), x @ weight.T, rtol=1e-5, atol=1e-5)


def test_the_twin_takes_denormals_for_zeros_and_makes_none() -> None:
    one, half = np.ones((1, 1), np.float32), np.full((1, 1), 0.5, np.float32)
    tiny = np.full((1, 1), TINY, np.float32)
    np.testing.assert_array_equal(tile_product(tiny, one), tiny)
    np.testing.assert_array_equal(tile_product(tiny, half), 0)
    np.testing.assert_array_equal(tile_product(tiny * half, one), 0)
    assert np.signbit(flushed(-tiny / 2)).all()


def test_the_twin_keeps_denormals_of_float16() -> None:
    least = np.full((1, 1), 2.0**-24, np.float32)
    np.testing.assert_array_equal(tile_product(least, least), np.float32(2.0**-48))


def test_the_twin_adds_even_and_odd_values_apart() -> None:
    big = np.float32(2**24)  # to which 1 cannot be added, but 2 can
    row = np.array([[big, 1, 0, 1, -big, 0]], np.float32)
    np.testing.assert_array_equal(tile_product(row, np.ones((1, 6), np.float32)), 2)


@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_the_twin_s_bits(amx: Library, shape: tuple[int, int, int]) -> None:
    rows, inputs, outputs = shape
    rng = np.random.default_rng(inputs)
    x, weight = bfloats(rng, rows, inputs), bfloats(rng, outputs, inputs)
    np.testing.assert_array_equal(logits(amx, x, weight), tile_product(x, weight))


@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_float16_are_the_twin_s_bits(
    halves: Library, shape: tuple[int, int, int]
) -> None:
    rows, inputs, outputs = shape
    rng = np.random.default_rng(inputs)
    x = rounded(normal(rng, rows, inputs), "float16")
    weight = rounded(normal(rng, outputs, inputs) * np.float32(2.0**-14), "float16")  # denormals
    got = logits(halves, x, weight, "float16")
    np.testing.assert_array_equal(got, tile_product(x, weight))
    np.testing.assert_array_equal(logits(halves, x[-1:], weight, "float16"), got[-1:])


def test_float16_goes_through_tiles_where_it_is_asked_for_alone(compiled: Library) -> None:
    names = [row["name"] for row in compiled.info()["kernels"]["linear"]]
    assert names.index("amx_fp16") > names.index("scalar")  # which always fits
    assert compiled.info()["instruction_set"] != "amx_fp16"
    if reason := refusal(compiled, "linear", "amx_fp16"):
        force(compiled, "amx_fp16")
        with pytest.raises(ValueError, match=re.escape(f"amx_fp16 ({reason})")):
            logits(compiled, np.ones((1, 4), np.float32), np.ones((3, 4), np.float32), "float16")
        force(compiled, "")


def test_denormals_are_the_twin_s(amx: Library) -> None:
    rng = np.random.default_rng(1)
    scale = np.float32(2.0) ** rng.integers(-75, -55, (20, 1)).astype(np.float32)
    x = rounded(normal(rng, 20, 90) * scale, "bfloat16")
    x[::3] = rounded(normal(rng, 7, 90) * TINY, "bfloat16")
    weight = rounded(normal(rng, 40, 90) * scale.mean(), "bfloat16")
    expected = tile_product(x, weight)
    np.testing.assert_array_equal(logits(amx, x, weight), expected)
    for row in range(20):
        np.testing.assert_array_equal(logits(amx, x[[row]], weight), expected[[row]])


# scheme, values of k in a group (0: all), with zero points.
CODES = (
    *(("a8w8", 0, False), ("w4a8", 0, False), ("w4a8", 32, False), ("w4a8", 96, False)),
    *((scheme, group, bool(group % 64)) for scheme in WEIGHT_ONLY for group in (0, 32, 96, 128)),
    *((scheme, 1024, True) for scheme in WEIGHT_ONLY),
)


@pytest.mark.parametrize("isa", ["amx", "avx512_bf16"])
def test_a_row_has_the_same_bits_in_batches_of_1_to_64(compiled: Library, isa: str) -> None:
    if reason := refusal(compiled, "logits", isa):
        pytest.skip(reason)
    force(compiled, isa)
    rng = np.random.default_rng(2)
    x, weight = bfloats(rng, 64, 301), bfloats(rng, 140, 301)
    x[::3] *= np.float32(2.0**-126)  # to products that are denormals
    together = logits(compiled, x, weight)
    for rows in range(1, 65):
        np.testing.assert_array_equal(logits(compiled, x[-rows:], weight), together[-rows:])
    force(compiled, "")


@pytest.mark.parametrize(("scheme", "group", "zeros"), CODES)
def test_a_row_times_codes_has_the_same_bits_in_batches_of_1_to_64(
    amx: Library, scheme: str, group: int, zeros: bool
) -> None:
    rng = np.random.default_rng(group)
    inputs = 570 if not group else 288 if group == 96 else 2 * group + 40
    operand = make_weight(rng, scheme, 70, inputs, group, zeros).operand(amx, "bfloat16")
    x = tensor(normal(rng, 200, inputs), "bfloat16")
    together = numpy32(linear(amx, scheme, x, operand, 70))
    for rows in (*range(1, 65), 100):
        part = numpy32(linear(amx, scheme, x[-rows:], operand, 70))
        np.testing.assert_array_equal(part, together[-rows:])


@pytest.mark.parametrize(("scheme", "group", "zeros"), CODES[4:])
def test_products_with_codes_are_the_twin_s_sums_times_scales(
    amx: Library, scheme: str, group: int, zeros: bool
) -> None:
    rng = np.random.default_rng(group)
    inputs = 570 if not group else 288 if group == 96 else 2 * group + 40
    weight = make_weight(rng, scheme, 70, inputs, group, zeros)
    usual = 8 * (scheme == "weight_only_int4")
    codes = (weight.codes.astype(np.float32) - (0 if zeros else usual)).astype(np.float32)
    if zeros and scheme == "weight_only_int8":
        codes += 128  # as they are stored
    for rows in (1, 20, 40):
        x = bfloats(rng, rows, inputs)
        expected = np.zeros((rows, 70), np.float32)
        for index, begin in enumerate(range(0, inputs, weight.group)):
            part = slice(begin, begin + weight.group)
            sums = tile_product(x[:, part], codes[:, part]).astype(np.float64)
            expected = (sums * weight.scale[:, index] + expected).astype(np.float32)
            if weight.zero is not None:
                zero = weight.zero[:, index] + (128 if scheme == "weight_only_int8" else 0)
                offset = (weight.scale[:, index] * zero).astype(np.float64)
                value_sum = x[:, part].astype(np.float64).sum(1, keepdims=True)
                expected = (expected - value_sum * offset).astype(np.float32)
        operand = weight.operand(amx, "bfloat16")
        got = numpy32(linear(amx, scheme, tensor(x, "bfloat16"), operand, 70))
        if zeros:  # the sum of a row's values is made in another order
            np.testing.assert_allclose(got, expected, rtol=8e-3, atol=0.02)
        else:
            np.testing.assert_array_equal(got, rounded(expected, "bfloat16"))


@pytest.mark.parametrize("group", [0, 32, 64, 96, 128, 1024])
@pytest.mark.parametrize("scheme", BY_TOKEN)
def test_integer_products_have_the_bits_of_vectors(amx: Library, scheme: str, group: int) -> None:
    if scheme == "a8w8" and group:
        pytest.skip("no groups")
    rng = np.random.default_rng(group)
    inputs = 3 * group + (group == 0) * 1100
    for rows in (9, 40, 100, 150):
        weight = make_weight(rng, scheme, 66, inputs, group)
        x = tensor(normal(rng, rows, inputs), "bfloat16")
        operand = weight.operand(amx, "bfloat16")
        got = numpy32(linear(amx, scheme, x, operand, 66))
        force(amx, "avx512_bf16")
        expected = numpy32(linear(amx, scheme, x, operand, 66))
        force(amx, "amx")
        np.testing.assert_array_equal(got, expected)
