"""Quantized weights on the CPU: packing, and products of every candidate against NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from predict import LLM, EngineConfig
from predict.bench.cost import linear_bytes
from predict.device.library import Library
from tests.support import tiny
from tests.support.cpu_kernels import (
    DTYPES,
    Array,
    Wide,
    int32,
    normal,
    normed,
    numpy32,
    rounded,
    tensor,
    threads,
)
from tests.support.quantized_weights import (
    BY_TOKEN,
    WEIGHT_ONLY,
    Weight,
    is_int4,
    linear,
    make_weight,
)
from tests.support.tolerances import assert_close

OPERATOR = "linear"  # whose candidates the fixture `candidate` goes through

# rows, inputs, outputs: one to several tiles of rows, ends that fill no block, vector or panel.
SHAPES = (
    *((1, 64, 32), (1, 33, 65), (2, 1, 1), (3, 256, 40), (5, 1056, 33), (8, 300, 96), (13, 96, 31)),
    *((25, 523, 70), (100, 320, 64), (257, 65, 34)),
)


def rounded_by_block(x: Array) -> Wide:
    """Rows as the kernels round them: int8 in blocks of 32, the largest magnitude at 127."""
    rows, width = x.shape
    blocks = np.zeros((rows, -(-width // 32), 32), np.float32)
    blocks.reshape(rows, -1)[:, :width] = x
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 1e-30, np.float32(127) / largest, np.float32(0))
    codes = np.rint(blocks * inverse).astype(np.float64)
    return (codes * (largest / np.float32(127))).reshape(rows, -1)[:, :width]


def rounded_by_row(x: Array, static_scale: float = 0.0) -> Wide:
    """Rows as a8w8 rounds them: int8 with one scale each, or all with the static one."""
    scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    if static_scale:
        scale = np.full_like(scale, static_scale)
    scale = np.where(scale > 0, scale, np.float32(1))
    codes = np.clip(np.rint(x / scale), -127, 127)
    return codes.astype(np.float64) * scale


def rounded_for(
    scheme: str, x: Array, dtype: str, keeps: bool = False, candidate: str = ""
) -> Wide:
    """The activations that the kernels of a scheme multiply."""
    if scheme in BY_TOKEN:
        return rounded_by_row(x)
    keeps = keeps or dtype == "float32" or (candidate.startswith("amx") and dtype == "bfloat16")
    return x.astype(np.float64) if keeps else rounded_by_block(x)


def unpacked(weight: Weight, stored: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Codes [N, K] read back from the documented layout."""
    num_outputs, num_inputs = weight.codes.shape
    panels = stored.astype(np.int64)
    if is_int4(weight.scheme):  # byte j of a column: k = j low, k = 4 + j high
        panels = np.stack([panels & 15, panels >> 4], axis=2)
        panels = panels.reshape(panels.shape[0], -1, 32, 4)
    else:
        panels = panels - 128
    rows = panels.transpose(0, 2, 1, 3).reshape(panels.shape[0] * 32, -1)
    return rows[:num_outputs, :num_inputs]


@pytest.mark.parametrize("scheme", [*WEIGHT_ONLY, *BY_TOKEN])
@pytest.mark.parametrize("shape", [(32, 64), (65, 33), (1, 1), (40, 127)])
def test_pack_quantized_makes_panels_of_codes_and_scales(
    compiled: Library, scheme: str, shape: tuple[int, int]
) -> None:
    weight = make_weight(np.random.default_rng(0), scheme, *shape)
    stored, scales = (value.numpy() for value in weight.packed(compiled, "bfloat16"))
    assert stored.shape[0] == -(-shape[0] // 32)
    np.testing.assert_array_equal(unpacked(weight, stored), weight.codes)
    assert scales.shape == (stored.shape[0], 1, 32)
    flat = scales.transpose(0, 2, 1).reshape(-1, 1)
    np.testing.assert_array_equal(flat[: shape[0]], weight.scale)
    np.testing.assert_array_equal(flat[shape[0] :], 0)


def test_pack_quantized_stores_zero_points_only_where_they_are_not_the_usual(
    compiled: Library,
) -> None:
    rng = np.random.default_rng(1)
    for scheme, usual in (("weight_only_int8", 0.0), ("weight_only_int4", 8.0)):
        plain = make_weight(rng, scheme, 40, 128, 32)
        shape = plain.scale.shape
        same = Weight(scheme, plain.codes, plain.scale, np.full(shape, usual, np.float32), 32)
        for left, right in zip(
            plain.packed(compiled, "float32"), same.packed(compiled, "float32"), strict=True
        ):
            np.testing.assert_array_equal(left.numpy(), right.numpy())
        other = make_weight(rng, scheme, 40, 128, 32, with_zeros=True)
        assert other.packed(compiled, "float32")[1].shape == [2, 4, 2, 32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", [*WEIGHT_ONLY, *BY_TOKEN])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_multiplies_by_the_dequantized_matrix(
    compiled: Library, candidate: str, shape: tuple[int, int, int], scheme: str, dtype: str
) -> None:
    rows, inputs, outputs = shape
    rng = np.random.default_rng(rows)
    x = rounded(normal(rng, rows, inputs), dtype)
    weight = make_weight(rng, scheme, outputs, inputs)
    got = linear(compiled, scheme, tensor(x, dtype), weight.operand(compiled, dtype), outputs)
    assert_close(
        numpy32(got), rounded_for(scheme, x, dtype, candidate=candidate) @ weight.wide().T, dtype
    )


@pytest.mark.parametrize("keeps", [False, True], ids=["int8", "float"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64, 96, 128, 1024])
@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
def test_linear_with_groups_and_zero_points(
    compiled: Library,
    candidate: str,
    scheme: str,
    group: int,
    with_zeros: bool,
    dtype: str,
    keeps: bool,
) -> None:
    rng = np.random.default_rng(group)
    inputs = 3 * group if group == 96 else 2048 + group
    for rows in (1, 2, 4, 7, 40):
        x = rounded(normal(rng, rows, inputs), dtype)
        weight = make_weight(rng, scheme, 66, inputs, group, with_zeros)
        operand = weight.operand(compiled, dtype, tensor([keeps], "float32"))
        got = linear(compiled, scheme, tensor(x, dtype), operand, 66)
        assert_close(
            numpy32(got), rounded_for(scheme, x, dtype, keeps, candidate) @ weight.wide().T, dtype
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
def test_activations_may_stay_floats_in_any_shape(
    compiled: Library, candidate: str, scheme: str, dtype: str
) -> None:
    rng = np.random.default_rng(11)
    for rows, inputs, outputs in SHAPES:
        x = rounded(normal(rng, rows, inputs), dtype)
        weight = make_weight(rng, scheme, outputs, inputs, with_zeros=bool(rows % 2))
        operand = weight.operand(compiled, dtype, tensor([1], "float32"))
        got = linear(compiled, scheme, tensor(x, dtype), operand, outputs)
        assert_close(numpy32(got), x.astype(np.float64) @ weight.wide().T, dtype)


@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
def test_every_code_comes_out_exact_beside_floats(
    compiled: Library, candidate: str, scheme: str
) -> None:
    low, high = (0, 16) if is_int4(scheme) else (-128, 128)
    codes = np.resize(np.arange(low, high), (16, 64)).astype(np.int8)
    scale = np.ldexp(np.float32(1), np.arange(32).reshape(16, 2) % 5 - 2)
    weight = Weight(scheme, codes, scale, None, 32)
    for dtype in DTYPES:
        operand = weight.operand(compiled, dtype, tensor([1], "float32"))
        got = linear(compiled, scheme, tensor(np.eye(64), dtype), operand, 16)
        np.testing.assert_array_equal(numpy32(got), rounded(weight.wide().T, dtype))


@pytest.mark.parametrize("group", [32, 128])
def test_w4a8_takes_groups(compiled: Library, candidate: str, group: int) -> None:
    rng = np.random.default_rng(group)
    for rows in (1, 5, 30):
        x = normal(rng, rows, 384)
        weight = make_weight(rng, "w4a8", 50, 384, group)
        operand = weight.operand(compiled, "float32")
        got = linear(compiled, "w4a8", tensor(x, "float32"), operand, 50)
        assert_close(numpy32(got), rounded_by_row(x) @ weight.wide().T, "float32")


def test_the_last_group_may_be_shorter(compiled: Library, candidate: str) -> None:
    rng = np.random.default_rng(2)
    weight = make_weight(rng, "weight_only_int4", 40, 300, 128, with_zeros=True)
    for dtype in DTYPES:
        x = rounded(normal(rng, 9, 300), dtype)
        operand = weight.operand(compiled, dtype)
        got = linear(compiled, weight.scheme, tensor(x, dtype), operand, 40)
        assert_close(
            numpy32(got),
            rounded_for(weight.scheme, x, dtype, candidate=candidate) @ weight.wide().T,
            dtype,
        )


@pytest.mark.parametrize("scheme", [*WEIGHT_ONLY, *BY_TOKEN])
def test_random_shapes_agree_with_the_reference(
    compiled: Library, candidate: str, scheme: str
) -> None:
    rng = np.random.default_rng(20)
    for _ in range(25):
        rows, inputs, outputs = (int(rng.integers(1, limit)) for limit in (40, 700, 200))
        grouped = scheme != "a8w8" and bool(rng.integers(2))
        group = int(rng.choice([32, 64, 128])) if grouped else 0
        inputs = inputs if not group else -(-inputs // group) * group
        zeros = scheme in WEIGHT_ONLY and bool(rng.integers(2))
        dtype = str(rng.choice(DTYPES))
        # Values of very different size: blocks and rows have scales of their own.
        x = rounded(normal(rng, rows, inputs) * 10 ** rng.uniform(-3, 3, (rows, 1)), dtype)
        x[:, :: int(rng.integers(2, 50))] *= 30
        x = rounded(x, dtype)
        weight = make_weight(rng, scheme, outputs, inputs, group, zeros)
        with threads(compiled, int(rng.integers(1, 4))):
            got = linear(
                compiled, scheme, tensor(x, dtype), weight.operand(compiled, dtype), outputs
            )
        # float16 results overflow where a row is large: compare what both can hold.
        expected = rounded_for(scheme, x, dtype, candidate=candidate) @ weight.wide().T
        size = np.abs(expected).max(axis=1, keepdims=True)
        keep = (size < 60000).ravel()
        assert_close((numpy32(got) / size).astype(np.float32)[keep], (expected / size)[keep], dtype)


@pytest.mark.parametrize(
    ("scheme", "act"),
    [*((name, 0) for name in (*WEIGHT_ONLY, *BY_TOKEN)), *((name, 1) for name in WEIGHT_ONLY)],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_depend_on_the_batch_or_the_threads(
    compiled: Library, candidate: str, dtype: str, scheme: str, act: int
) -> None:
    rng = np.random.default_rng(3)
    x = normal(rng, 45, 640)
    group = 0 if scheme in ("a8w8", "weight_only_int8") else 64
    made = make_weight(rng, scheme, 130, 640, group, with_zeros=act == 1)
    weight = made.operand(compiled, dtype, tensor([act], "float32"))
    together = numpy32(linear(compiled, scheme, tensor(x, dtype), weight, 130))
    for rows in (1, 2, 6, 7, 12, 20):
        for num_threads in (1, 3):
            with threads(compiled, num_threads):
                part = numpy32(linear(compiled, scheme, tensor(x[-rows:], dtype), weight, 130))
            np.testing.assert_array_equal(part, together[-rows:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ["weight_only_int4", "w4a8"])
def test_act_order_gathers_the_inputs(
    compiled: Library, candidate: str, scheme: str, dtype: str
) -> None:
    rng = np.random.default_rng(4)
    perm = rng.permutation(192).astype(np.int32)
    weight = make_weight(rng, scheme, 40, 192, 64)
    x = rounded(normal(rng, 7, 192), dtype)
    operand = weight.operand(compiled, dtype, tensor([0], "float32"), int32(perm))
    got = linear(compiled, scheme, tensor(x, dtype), operand, 40)
    expected = rounded_for(scheme, x[:, perm], dtype, candidate=candidate) @ weight.wide().T
    assert_close(numpy32(got), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("static_scale", [0.0, 0.03])
def test_a8w8_shifts_smooths_and_takes_a_static_scale(
    compiled: Library, candidate: str, static_scale: float, dtype: str
) -> None:
    rng = np.random.default_rng(5)
    weight = make_weight(rng, "a8w8", 40, 130)
    x = rounded(2 * normal(rng, 9, 130), dtype)
    shift, smooth = normal(rng, 130), rng.uniform(0.2, 2, 130).astype(np.float32)
    extra = (tensor(values, "float32") for values in ([static_scale], smooth, shift))
    operand = weight.operand(compiled, dtype, *extra)
    got = linear(compiled, "a8w8", tensor(x, dtype), operand, 40)
    expected = rounded_by_row((x + shift) * smooth, static_scale) @ weight.wide().T
    assert_close(numpy32(got), expected, dtype)


@pytest.mark.parametrize("scheme", [*WEIGHT_ONLY, "a8w8"])
def test_logits_take_a_quantized_head(compiled: Library, candidate: str, scheme: str) -> None:
    rng = np.random.default_rng(7)
    weight = make_weight(rng, scheme, 70, 96)
    hidden, norm = normal(rng, 5, 96), 1 + normal(rng, 96) / 4
    got = compiled.op("regatta_logits")(
        tensor(hidden, "float32"),
        tensor(norm, "float32"),
        weight.operand(compiled, "float32"),
        None,
        int32([4, 0]),
        *(scheme, 70, 1e-5, 1.0, 0.0),
    )[0]
    x = normed(hidden, norm, 1e-5)[[4, 0]].astype(np.float32)
    expected = rounded_for(scheme, x, "float32") @ weight.wide().T
    error = np.abs(numpy32(got) - expected).max() / np.sqrt(np.mean(expected**2))
    assert error < (1e-4 if scheme in WEIGHT_ONLY else 0.02)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_nan_among_the_activations_reaches_its_row_only(
    compiled: Library, candidate: str, value: float
) -> None:
    rng = np.random.default_rng(8)
    x = normal(rng, 3, 96)
    x[1, 40] = value
    for scheme in (*WEIGHT_ONLY, *BY_TOKEN):
        weight = make_weight(rng, scheme, 40, 96)
        operand = weight.operand(compiled, "bfloat16")
        got = numpy32(linear(compiled, scheme, tensor(x, "bfloat16"), operand, 40))
        assert not np.isfinite(got[1]).any()
        assert np.isfinite(got[[0, 2]]).all()


def test_rows_of_zeros_give_zeros(compiled: Library, candidate: str) -> None:
    rng = np.random.default_rng(9)
    for scheme in (*WEIGHT_ONLY, *BY_TOKEN):
        operand = make_weight(rng, scheme, 40, 96).operand(compiled, "bfloat16")
        got = linear(compiled, scheme, tensor(np.zeros((2, 96)), "bfloat16"), operand, 40)
        np.testing.assert_array_equal(numpy32(got), 0)


def test_activations_in_blocks_of_int8_cost_half_a_percent(compiled: Library) -> None:
    """What rounding 16-bit activations costs, beside exact products of the same weights."""
    rng = np.random.default_rng(10)
    x = rounded(normal(rng, 64, 1024), "bfloat16")
    weight = make_weight(rng, "weight_only_int8", 256, 1024)
    operand = weight.operand(compiled, "bfloat16")
    got = numpy32(linear(compiled, weight.scheme, tensor(x, "bfloat16"), operand, 256))
    exact = x.astype(np.float64) @ weight.wide().T
    error = np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2))
    assert error < 0.007  # of it 0.0017 is the result's own rounding


def bad(rng: np.random.Generator, **changes: Any) -> Weight:
    weight = make_weight(rng, "weight_only_int4", 32, 64, 32)
    return Weight(**{**weight.__dict__, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheme": "int3"}, "scheme 'int3' is not known .known: dense, "),
        (
            {"scheme": "a8w8_fp8"},
            r"not one that the CPU packs .allowed: weight_only_int8, .*weight_only_mxfp4, w4a8",
        ),
        ({"scale": np.full((32, 2), np.nan, np.float32)}, r"scale\[0, 0\] is nan"),
        ({"zero": np.full((32, 2), np.inf, np.float32)}, r"zero\[0, 0\] is inf"),
        ({"scale": np.ones((32, 5), np.float32)}, "scale has 5 groups for 64 inputs"),
        ({"scale": np.ones((31, 2), np.float32)}, r"scale has shape \[31, 2\]"),
        ({"codes": np.full((32, 64), 16, np.int8)}, "codes hold values outside 0 .. 15"),
        ({"scheme": "a8w8"}, "one scale per output channel, got 2 groups"),
        ({"scheme": "w4a8", "zero": np.zeros((32, 2), np.float32)}, "takes symmetric weights"),
    ],
)
def test_pack_quantized_names_what_it_cannot_take(
    compiled: Library, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        bad(np.random.default_rng(11), **changes).packed(compiled, "float32")


def test_linear_names_tensors_that_do_not_fit(compiled: Library) -> None:
    rng = np.random.default_rng(12)
    weight = make_weight(rng, "weight_only_int8", 32, 64)
    operand = weight.operand(compiled, "float32")
    x = tensor(normal(rng, 2, 64), "float32")
    with pytest.raises(ValueError, match="'weight_only_int8' takes 4 weight tensors, got 2"):
        linear(compiled, weight.scheme, x, operand[:2], 32)
    with pytest.raises(ValueError, match=r"packed weight_only_int8 weight is uint8 \[1, 16, 32, 4"):
        linear(compiled, weight.scheme, x, operand, 64)
    with pytest.raises(ValueError, match=r"perm of the weight_only_int8 weight is int32 \[3\]"):
        linear(compiled, weight.scheme, x, [*operand[:3], int32([0, 1, 2])], 32)
    with pytest.raises(ValueError, match=r"scheme .int3. is not known .known: .*a8w8"):
        linear(compiled, "int3", x, operand, 32)


def test_bytes_of_a_decode_step_are_those_of_the_stored_weights(
    compiled: Library, tmp_path: Path
) -> None:
    source = tiny.write(tmp_path, {"intermediate_size": 128, "vocab_size": 256})
    sizes = []
    quantized: dict[str, Any] = {"quant_type": "a8w8", "lm_head_quant_type": "weight_only_int4"}
    for settings in ({}, quantized):
        llm = LLM(
            EngineConfig(
                model_name_or_path=str(source),
                max_length=64,
                inference_model=True,
                dtype="bfloat16",
                **settings,
            )
        )
        assert llm.decoder is not None
        sizes.append(linear_bytes(llm.decoder))
    # Per layer: qkv 256 x 64, out 64 x 128, gate and up 256 x 64, down 64 x 128.
    outputs, matrices, head = 256 + 64 + 256 + 64, 2 * 256 * 64 + 2 * 64 * 128, 256 * 64
    assert sizes[0] == 2 * (2 * matrices + head)
    none = 12  # act, smooth and shift: one float each
    assert sizes[1] == 2 * (matrices + 4 * outputs + 4 * none) + head // 2 + 4 * 256 + 8
