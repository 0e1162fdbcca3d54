"""Products by AMX's tiles: the twin's bits, those of vectors, and the same in every batch."""

from __future__ import annotations

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


def logits(library: Library, x: Array, weight: Array) -> Array:
    """Products of bfloat16 as float32, which the operator of the LM head returns."""
    return numpy32(
        library.op("regatta_logits")(
            tensor(x, "bfloat16"),
            None,
            [packed(library, weight, "bfloat16")],
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


@pytest.mark.parametrize("group", [0, 32, 64, 96, 128, 1024])
@pytest.mark.parametrize("scheme", [*WEIGHT_ONLY, *BY_TOKEN])
def test_integer_products_have_the_bits_of_vectors(amx: Library, scheme: str, group: int) -> None:
    if scheme == "a8w8" and group:
        pytest.skip("no groups")
    rng = np.random.default_rng(group)
    inputs = 3 * group + (group == 0) * 1100
    for rows, zeros in ((9, False), (40, True), (100, True), (150, False)):
        weight = make_weight(rng, scheme, 66, inputs, group, zeros and scheme in WEIGHT_ONLY)
        x = tensor(normal(rng, rows, inputs), "bfloat16")
        operand = weight.operand(amx, "bfloat16")
        got = numpy32(linear(amx, scheme, x, operand, 66))
        force(amx, "avx512_bf16")
        expected = numpy32(linear(amx, scheme, x, operand, 66))
        force(amx, "amx")
        np.testing.assert_array_equal(got, expected)
