"""Packing, linear, norm, activation, MLP and logits operators, every candidate against float64."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from predict.device.library import Library
from predict.nn.blocks import Norm, NormKind, NormWeights
from predict.ops import compiled as ops
from predict.ops import plain
from tests.support.cpu_kernels import (
    DTYPES,
    Array,
    force,
    normal,
    normed,
    numpy32,
    packed,
    rounded,
    tensor,
)
from tests.support.tolerances import assert_close

OPERATOR = "linear"  # whose candidates the fixture `candidate` goes through


# rows, inputs, outputs: one to several tiles of rows and blocks of k; ends that fill no vector.
SHAPES = (
    *((1, 64, 32), (1, 33, 65), (2, 1, 1), (3, 256, 40), (7, 127, 100), (13, 96, 31)),
    *((25, 523, 70), (257, 65, 34)),
)


def sigmoid(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return 1.0 / (1.0 + np.exp(-x))


def linear(library: Library, x: Any, weight: Any, bias: Any, num_outputs: int) -> Any:
    return library.op("regatta_linear")(x, [weight], bias, "dense", num_outputs)[0]


def panels(weight: Array, dtype: str) -> Array:
    """The documented layout of weight [N, K], in NumPy."""
    num_outputs, num_inputs = weight.shape
    step = 2 if dtype == "bfloat16" else 1
    rows = -(-num_outputs // 32) * 32
    columns = -(-num_inputs // step) * step
    full = np.zeros((rows, columns), np.float32)
    full[:num_outputs, :num_inputs] = weight
    result = full.reshape(-1, 32, columns // step, step).transpose(0, 2, 1, 3)
    return result if step == 2 else result[..., 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("shape", [(32, 64), (65, 33), (1, 1), (40, 127)])
def test_pack_dense_makes_zero_padded_panels(
    compiled: Library, candidate: str, shape: tuple[int, int], source: str, dtype: str
) -> None:
    weight = rounded(normal(np.random.default_rng(0), *shape), source)
    pack = compiled.op("regatta_pack_dense")
    expected = panels(rounded(weight, dtype), dtype)
    got = numpy32(pack(tensor(weight, source), True, dtype)[0])
    np.testing.assert_array_equal(got, expected)
    got = numpy32(pack(tensor(np.ascontiguousarray(weight.T), source), False, dtype)[0])
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_is_a_matrix_product(
    compiled: Library, candidate: str, shape: tuple[int, int, int], dtype: str
) -> None:
    rows, inputs, outputs = shape
    rng = np.random.default_rng(rows)
    x = rounded(normal(rng, rows, inputs), dtype)
    weight = rounded(normal(rng, outputs, inputs), dtype)
    bias = rounded(normal(rng, outputs), dtype)
    operands = tensor(x, dtype), packed(compiled, weight, dtype)
    expected = x.astype(np.float64) @ weight.T
    got = linear(compiled, *operands, None, outputs)
    assert_close(numpy32(got), expected, dtype)
    got = linear(compiled, *operands, tensor(bias, dtype), outputs)
    assert_close(numpy32(got), expected + bias, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_a_row_does_not_depend_on_the_batch(
    compiled: Library, candidate: str, dtype: str
) -> None:
    rng = np.random.default_rng(1)
    x = normal(rng, 45, 601)
    weight = packed(compiled, normal(rng, 130, 601), dtype)
    together = numpy32(linear(compiled, tensor(x, dtype), weight, None, 130))
    for rows in (1, 2, 6, 7, 12, 20):
        part = numpy32(linear(compiled, tensor(x[-rows:], dtype), weight, None, 130))
        np.testing.assert_array_equal(part, together[-rows:])


def test_linear_does_not_depend_on_the_number_of_threads(compiled: Library) -> None:
    rng = np.random.default_rng(2)
    x = tensor(normal(rng, 30, 300), "float32")
    weight = packed(compiled, normal(rng, 1000, 300), "float32")
    results = []
    for num_threads in (1, 2, 3):
        compiled.set_num_threads(num_threads)
        results.append(numpy32(linear(compiled, x, weight, None, 1000)))
    compiled.handle.regatta_set_num_threads(0)
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(results[2], results[0])


def test_operators_may_be_called_from_several_threads_at_once(compiled: Library) -> None:
    rng = np.random.default_rng(11)
    weight = packed(compiled, normal(rng, 700, 300), "float32")
    inputs = [tensor(normal(rng, rows, 300), "float32") for rows in (1, 5, 40, 200)]
    expected = [numpy32(linear(compiled, x, weight, None, 700)) for x in inputs]

    def work(index: int) -> bool:
        results = [linear(compiled, inputs[index], weight, None, 700) for _ in range(20)]
        return all(np.array_equal(numpy32(result), expected[index]) for result in results)

    with ThreadPoolExecutor(len(inputs)) as pool:
        assert all(pool.map(work, range(len(inputs))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_of_odd_rows_is_not_read_from_old_scratch(
    compiled: Library, candidate: str, dtype: str
) -> None:
    rng = np.random.default_rng(3)
    weight = packed(compiled, normal(rng, 64, 64), dtype)
    linear(compiled, tensor(np.full((40, 64), np.nan), dtype), weight, None, 64)
    x, odd = rounded(normal(rng, 40, 63), dtype), rounded(normal(rng, 64, 63), dtype)
    got = linear(compiled, tensor(x, dtype), packed(compiled, odd, dtype), None, 64)
    assert_close(numpy32(got), x.astype(np.float64) @ odd.T, dtype)


def test_strided_views_are_read_as_their_values(compiled: Library) -> None:
    rng = np.random.default_rng(12)
    x, weight = normal(rng, 9, 40), normal(rng, 33, 40)
    operand = packed(compiled, weight, "float32")
    view = tensor(x.T, "float32").t()[2:7]
    got = linear(compiled, view, operand, None, 33)
    assert_close(numpy32(got), x[2:7].astype(np.float64) @ weight.T, "float32")


def test_linear_of_no_rows_is_empty(compiled: Library) -> None:
    weight = packed(compiled, np.ones((40, 8), np.float32), "float32")
    x = tensor(np.zeros((0, 8)), "float32")
    assert linear(compiled, x, weight, None, 40).shape == [0, 40]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", [64, 33])
def test_embedding_returns_rows_of_the_table_or_of_the_packed_head(
    compiled: Library, candidate: str, hidden_size: int, dtype: str
) -> None:
    import paddle

    table = rounded(normal(np.random.default_rng(4), 70, hidden_size), dtype)
    ids = np.array([0, 69, 31, 32, 5, 5], np.int32)
    embedding = compiled.op("regatta_embedding")
    tables = (tensor(table, dtype), False), (packed(compiled, table, dtype), True)
    for weight, is_packed in tables:
        sizes = is_packed, hidden_size
        got = embedding(paddle.to_tensor(ids), weight, *(None,) * 4, *sizes, 1.0)[0]
        np.testing.assert_array_equal(numpy32(got), table[ids])
        rows = np.array([-1, 2, -1, 0, 2, -1], np.int32)  # of pictures, which no scale changes
        pictures = rounded(normal(np.random.default_rng(5), 3, hidden_size), dtype)
        seen = tensor(pictures, dtype), paddle.to_tensor(rows)
        got = embedding(paddle.to_tensor(ids), weight, None, None, *seen, *sizes, 2.0)[0]
        wanted = np.where(rows[:, None] < 0, 2 * table[ids], pictures[rows])
        np.testing.assert_array_equal(numpy32(got), wanted)
        with pytest.raises(ValueError, match=r"image_rows\[1\] is 2 \(allowed: -1 \.\. 1\)"):
            embedding(paddle.to_tensor(ids), weight, None, None, seen[0][:2], seen[1], *sizes, 1.0)


def test_embedding_names_a_token_outside_the_table(compiled: Library) -> None:
    import paddle

    ids = paddle.to_tensor(np.array([1, 7], np.int32))
    table = tensor(np.zeros((7, 4)), "float32")
    with pytest.raises(ValueError, match=r"token_ids\[1\] is 7 \(allowed: 0 \.\. 6\)"):
        compiled.op("regatta_embedding")(ids, table, *(None,) * 4, False, 4, 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 896), (5, 33), (40, 7)])
def test_rms_norm_normalises_the_sum_with_the_residual(
    compiled: Library, candidate: str, shape: tuple[int, int], dtype: str
) -> None:
    rng = np.random.default_rng(5)
    x, residual = (rounded(3 * normal(rng, *shape), dtype) for _ in range(2))
    weight = rounded(1 + normal(rng, shape[1]) / 4, dtype)
    norm = compiled.op("regatta_norm")
    out, total = norm(
        *(tensor(x, dtype), tensor(weight, dtype), None, tensor(residual, dtype)), 0, 1e-5, False
    )
    added = rounded(x + residual, dtype)
    np.testing.assert_array_equal(numpy32(total), added)
    assert_close(numpy32(out), normed(added, weight, 1e-5), dtype)
    out, total = norm(tensor(x, dtype), tensor(weight, dtype), None, None, 0, 1e-5, False)
    np.testing.assert_array_equal(numpy32(total), x)
    assert_close(numpy32(out), normed(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(("rows", "parts", "num_weights", "size"), [(1, 6, 4, 64), (7, 5, 5, 33)])
def test_heads_with_a_factor_each_are_normed_and_the_others_stay(
    compiled: Library,
    candidate: str,
    rows: int,
    parts: int,
    num_weights: int,
    size: int,
    kind: NormKind,
    dtype: str,
) -> None:
    rng = np.random.default_rng(9)
    x = rounded(2 + 3 * normal(rng, rows, parts * size), dtype)
    weight = rounded(1 + normal(rng, num_weights, size) / 4, dtype)
    settings = Norm(kind, 1e-5)
    got = numpy32(ops.norm(tensor(x, dtype), NormWeights(tensor(weight, dtype)), settings))
    wanted = plain.norm(tensor(x, "float32"), NormWeights(tensor(weight, "float32")), settings)
    assert_close(got, numpy32(wanted), dtype)
    heads = x.reshape(rows, parts, size)
    np.testing.assert_array_equal(got.reshape(heads.shape)[:, num_weights:], heads[:, num_weights:])
    for head in range(num_weights):
        alone = plain.norm(
            tensor(heads[:, head], "float32"),
            NormWeights(tensor(weight[head], "float32")),
            settings,
        )
        assert_close(got.reshape(heads.shape)[:, head], numpy32(alone), dtype)


@pytest.mark.parametrize(("num_weights", "size"), [(3, 10), (4, 8)])
def test_factors_of_heads_that_do_not_fit_the_rows_are_refused(
    compiled: Library, num_weights: int, size: int
) -> None:
    x, weight = (tensor(np.zeros(shape), "float32") for shape in ((2, 24), (num_weights, size)))
    with pytest.raises(ValueError, match=rf"weight is \[{num_weights}, {size}\], and rows of x"):
        ops.norm(x, NormWeights(weight), Norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 33), (50, 7)])
def test_silu_mul_gates_the_second_half(
    compiled: Library, candidate: str, shape: tuple[int, int], dtype: str
) -> None:
    rng = np.random.default_rng(6)
    gate = rounded(4 * normal(rng, *shape), dtype)
    up = rounded(normal(rng, *shape), dtype)
    gate[0, :4] = (-200.0, 200.0, 0.0, -89.0)  # exp overflows, underflows
    got = compiled.op("regatta_activate")(
        tensor(np.concatenate([gate, up], 1), dtype), 0, True, 0.0, 1.0, 0.0
    )[0]
    wide = gate.astype(np.float64)
    assert_close(numpy32(got), wide * sigmoid(wide) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("indices", [[0], [3, 3, 0], list(range(30))])
def test_logits_are_float32_products_of_the_chosen_rows(
    compiled: Library, candidate: str, indices: list[int], dtype: str
) -> None:
    import paddle

    rng = np.random.default_rng(9)
    hidden = rounded(normal(rng, 30, 65), dtype)
    norm = rounded(1 + normal(rng, 65) / 4, dtype)
    head = rounded(normal(rng, 101, 65), dtype)
    got = compiled.op("regatta_logits")(
        tensor(hidden, dtype),
        tensor(norm, dtype),
        [packed(compiled, head, dtype)],
        None,
        paddle.to_tensor(np.array(indices, np.int32)),
        *("dense", 101, 1e-6, 1.0, 0.0),
    )[0]
    assert got.dtype == paddle.float32
    assert_close(got.numpy(), normed(hidden[indices], norm, 1e-6) @ head.T, dtype)


def test_logits_name_an_index_outside_the_batch(compiled: Library) -> None:
    import paddle

    ones = np.ones((4, 4), np.float32)
    with pytest.raises(ValueError, match=r"logit_indices\[0\] is 4 \(allowed: 0 \.\. 3\)"):
        compiled.op("regatta_logits")(
            tensor(ones, "float32"),
            tensor(ones[0], "float32"),
            [packed(compiled, ones, "float32")],
            None,
            paddle.to_tensor(np.array([4], np.int32)),
            *("dense", 4, 1e-6, 1.0, 0.0),
        )


BAD_LINEARS: dict[str, tuple[Callable[[Library], tuple[Any, ...]], str]] = {
    "scheme": (
        lambda lib: (tensor(np.ones((1, 8)), "float32"), [], None, "int3", 8),
        r"scheme 'int3' is not known \(known: .*dense",
    ),
    "no weight": (
        lambda lib: (tensor(np.ones((1, 8)), "float32"), [], None, "dense", 8),
        "takes 1 weight tensor, got 0",
    ),
    "weight shape": (
        lambda lib: (
            tensor(np.ones((1, 9)), "float32"),
            [packed(lib, np.ones((8, 8), np.float32), "float32")],
            None,
            "dense",
            8,
        ),
        r"shape \[1, 8, 32\], expected \[1, 9, 32\]",
    ),
    "weight dtype": (
        lambda lib: (
            tensor(np.ones((1, 8)), "float32"),
            [packed(lib, np.ones((8, 8), np.float32), "bfloat16")],
            None,
            "dense",
            8,
        ),
        "weight is bfloat16 but the activations are float32",
    ),
    "activation dtype": (
        lambda lib: (tensor(np.ones((1, 8)), "int32"), [], None, "dense", 8),
        r"x is int32 \(allowed: float32, bfloat16, float16\)",
    ),
    "bias shape": (
        lambda lib: (
            tensor(np.ones((1, 8)), "float32"),
            [packed(lib, np.ones((8, 8), np.float32), "float32")],
            tensor(np.ones(7), "float32"),
            "dense",
            8,
        ),
        r"bias has shape \[7\], expected \[8\]",
    ),
}


@pytest.mark.parametrize("case", BAD_LINEARS)
def test_linear_says_what_does_not_fit(compiled: Library, case: str) -> None:
    arguments, message = BAD_LINEARS[case]
    with pytest.raises(ValueError, match=message):
        compiled.op("regatta_linear")(*arguments(compiled))


def test_forcing_an_unknown_candidate_lists_the_known_ones(compiled: Library) -> None:
    assert force(compiled, "activate=neon") is None
    x = tensor(np.ones((1, 8)), "float32")
    try:
        with pytest.raises(ValueError, match=r"activate fits the forced name 'neon'.*scalar \("):
            compiled.op("regatta_activate")(x, 0, True, 0.0, 1.0, 0.0)
        norm = compiled.op("regatta_norm")  # others are not forced
        norm(x, x.reshape([8]), None, None, 0, 1e-6, False)
    finally:
        force(compiled, "")


def test_forcing_an_unknown_operator_lists_the_known_ones(compiled: Library) -> None:
    assert "known: " in (force(compiled, "lineal=avx2") or "")
