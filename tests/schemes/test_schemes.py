"""Schemes: rounding errors, products, and whole models that answer in each of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from export.export_model import export_model
from predict import LLM, EngineConfig, SamplingParams
from predict.config.quantization import QuantType, parse_quant_type
from predict.config.schemes import (
    DENSE,
    SCHEMES,
    check_support,
    find,
    gpu_kernels,
    scheme_info,
    unfolded,
)
from predict.errors import UserError
from predict.loading.manifest import load_manifest
from predict.schemes import Quantized, known_schemes, scheme_of
from predict.schemes._e4m3 import VALUES, encode
from predict.schemes.weight_only_mxfp4 import TWICE, encoded
from tests.support import tiny
from tests.support.schemes import SETTINGS, answer, logits_of, normal, on_this_cpu, relative_error

# Scheme, group size, largest relative error (root mean square) of a product of normal numbers.
CASES = [
    ("weight_only_int8", -1, 0.008),
    ("weight_only_int8", 64, 0.007),
    ("weight_only_int4", -1, 0.12),
    ("weight_only_int4", 32, 0.10),
    ("weight_only_int4", 128, 0.12),
    ("weight_only_mxfp4", 32, 0.13),
    ("a8w8", -1, 0.012),
    ("a8w8_fp8", -1, 0.045),
    ("a8w8_fp8", 128, 0.045),
    ("w4a8", 64, 0.11),
]
SHAPES = [(1, 128), (33, 384), (256, 256)]


def product(name: str, weight: Quantized, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    import paddle

    scheme = scheme_of(name)
    result: npt.NDArray[np.float32] = scheme.product(
        paddle.to_tensor(x), scheme.tensors(weight, "float32", compiled=None)
    ).numpy()
    return result


def plain(name: str, weight: Quantized) -> npt.NDArray[np.float32]:
    scheme = scheme_of(name)
    values: npt.NDArray[np.float32] = scheme.plain(
        scheme.tensors(weight, "float32", compiled=None)
    ).numpy()
    return values


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "group_size", "bound"), CASES)
def test_rounded_product_is_near_the_float_one(
    name: str, group_size: int, bound: float, shape: tuple[int, int]
) -> None:
    weight, x = normal(shape), normal((7, shape[1]), seed=1)
    rounded = scheme_of(name).quantize(weight, group_size)
    assert relative_error(product(name, rounded, x), x @ weight.T) < 1.2 * bound
    assert relative_error(plain(name, rounded), weight) < bound


@pytest.mark.parametrize(("name", "group_size", "bound"), CASES)
def test_bfloat16_weights_are_rounded_as_their_values(
    name: str, group_size: int, bound: float
) -> None:
    bits = (normal((16, 256)).view(np.uint32) >> 16).astype(np.uint16)
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    got, want = (scheme_of(name).quantize(w, group_size) for w in (bits, values))
    np.testing.assert_array_equal(got.codes, want.codes)
    np.testing.assert_array_equal(got.scale, want.scale)


@pytest.mark.parametrize(("name", "group_size", "bound"), CASES)
def test_rows_and_groups_of_zeros_stay_zero(name: str, group_size: int, bound: float) -> None:
    weight = normal((4, 256))
    weight[1] = 0
    weight[2, :128] = 0
    values = plain(name, scheme_of(name).quantize(weight, group_size))
    assert not values[1].any()
    assert not values[2, :128].any()


def test_int8_codes_are_absmax_over_127() -> None:
    weight = normal((5, 64))
    rounded = scheme_of("weight_only_int8").quantize(weight, -1)
    np.testing.assert_array_equal(rounded.scale, np.abs(weight).max(axis=1) / np.float32(127))
    np.testing.assert_array_equal(rounded.codes, np.rint(weight / rounded.scale[:, None]))
    assert rounded.codes.max() <= 127
    assert rounded.codes.min() >= -127


def test_clipping_never_makes_int4_worse_than_absmax() -> None:
    weight = normal((64, 256)) ** 3  # outliers
    grouped = weight.reshape(64, 2, 128)
    scale = np.abs(grouped).max(axis=2, keepdims=True) / 7
    absmax = (np.rint(grouped / scale) * scale).reshape(weight.shape)
    values = plain("weight_only_int4", scheme_of("weight_only_int4").quantize(weight, 128))
    assert relative_error(values, weight) < relative_error(absmax, weight)


def test_e2m1_rounds_to_the_nearest_even() -> None:
    values = TWICE / np.float32(2)
    finite = np.sort(values)
    numbers = np.linspace(-8, 8, 4097, dtype=np.float32)
    got = values[encoded(numbers)]
    nearest = np.abs(finite[:, None] - np.clip(numbers, -6, 6)).min(axis=0)
    np.testing.assert_array_equal(np.abs(got - np.clip(numbers, -6, 6)), nearest)
    middles = (finite[1:] + finite[:-1]) / 2
    assert not (encoded(middles[middles != 0]) & 1).any()  # the mantissa
    assert encoded(np.array([np.nan, np.inf, -np.inf], np.float32)).tolist() == [0, 7, 15]


def test_values_of_mxfp4_are_kept() -> None:
    """Scales are the largest that keep a group's largest value: 4 or 6 times one."""
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 16, (24, 128)).astype(np.int8)
    codes[:, ::32] = 7
    scale = np.ldexp(np.float32(1), rng.integers(-20, 20, (24, 4)))
    values = TWICE[codes] / np.float32(2) * np.repeat(scale, 32, axis=1)
    made = scheme_of("weight_only_mxfp4").quantize(values, 32)
    np.testing.assert_array_equal(made.scale, scale)
    np.testing.assert_array_equal(plain("weight_only_mxfp4", made), values)


def test_e4m3_rounds_to_the_nearest_even() -> None:
    finite = np.sort(VALUES[~np.isnan(VALUES)])
    middles = (finite[1:] + finite[:-1]) / 2
    numbers = np.concatenate([finite, middles, np.nextafter(middles, 1e9), [1e9, -1e9]])
    got = VALUES[encode(numbers.astype(np.float32))]
    distance = np.abs(got - np.clip(numbers, -448, 448))
    nearest = np.abs(finite[:, None] - np.clip(numbers, -448, 448)).min(axis=0)
    np.testing.assert_allclose(distance, nearest, atol=1e-12)
    ties = encode(middles.astype(np.float32))
    assert not (ties & 1).any()  # the last mantissa bit


def test_act_order_gathers_columns() -> None:
    rounded = scheme_of("weight_only_int4").quantize(normal((16, 128)), 32)
    perm = np.random.default_rng(3).permutation(128).astype(np.int32)
    ordered = Quantized(rounded.codes, rounded.scale, rounded.zero, perm=perm)
    x = normal((3, 128), seed=5)
    want = product("weight_only_int4", rounded, x[:, perm])
    np.testing.assert_allclose(product("weight_only_int4", ordered, x), want, rtol=1e-5)
    np.testing.assert_array_equal(
        plain("weight_only_int4", ordered)[:, perm], plain("weight_only_int4", rounded)
    )


def test_static_int8_activations_saturate_and_round_half_to_even() -> None:
    codes = np.eye(4, 8, dtype=np.int8)
    weight = Quantized(codes, np.ones(4, np.float32), act_scale=1.0)
    x = np.array([[0.5, 1.5, -2.5, 300.0, 9, 9, 9, 9]], np.float32)
    assert product("a8w8", weight, x).tolist() == [[0.0, 2.0, -2.0, 127.0]]


def test_shift_comes_before_smooth() -> None:
    codes = np.eye(2, dtype=np.int8)
    shift, smooth = np.array([1.0, -2.0], np.float32), np.array([3.0, 5.0], np.float32)
    weight = Quantized(codes, np.ones(2, np.float32), act_scale=1.0, shift=shift, smooth=smooth)
    x = np.array([[1.0, 4.0]], np.float32)
    assert product("a8w8", weight, x).tolist() == [[6.0, 10.0]]


def test_rows_beyond_a_limit_saturate_and_keep_the_precision_of_the_rest() -> None:
    weight = scheme_of("a8w8_fp8").quantize(normal((64, 96)), -1)
    x = normal((3, 96), 1)
    x[0, 5] = 3000.0
    clipped = np.clip(x, -1200.0, 1200.0)
    limited = replace(weight, act_limit=1200.0)
    np.testing.assert_array_equal(
        product("a8w8_fp8", limited, x), product("a8w8_fp8", weight, clipped)
    )
    assert not np.array_equal(product("a8w8_fp8", weight, x), product("a8w8_fp8", limited, x))


def test_fp8_blocks_have_a_scale_per_token_and_128_columns() -> None:
    """A large feature costs its neighbours within 128 columns nothing but themselves."""
    weight = scheme_of("a8w8_fp8").quantize(normal((128, 256)), 128)
    x = normal((2, 256), seed=2)
    x[:, 200] = 1e6
    with_outlier, without = x.copy(), x.copy()
    without[:, 128:] = 0
    with_outlier[:, 128:200] = 0
    with_outlier[:, 201:] = 0
    outlier_alone = with_outlier.copy()
    outlier_alone[:, :128] = 0
    got = product("a8w8_fp8", weight, with_outlier) - product("a8w8_fp8", weight, outlier_alone)
    want = product("a8w8_fp8", weight, without)
    assert relative_error(got, want) < 0.02  # float32 sums beside 1e6


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_models_answer_nearly_as_without_quantization(
    tmp_path: Path, name: str, tied: bool
) -> None:
    tiny.write(tmp_path, {"tie_word_embeddings": tied})
    want = logits_of(tmp_path)
    got = logits_of(tmp_path, **SETTINGS[name])
    four_bits = "4" in name or name in ("head", "skip")
    bound = 0.5 if four_bits else 0.15 if "fp8" in name else 0.05
    assert 0 < relative_error(got, want) < bound  # two layers of 64 features average little out


@pytest.mark.parametrize("operators", ["reference", "compiled"])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_exported_programs_give_the_same_tokens(
    tmp_path: Path, name: str, operators: str, request: pytest.FixtureRequest
) -> None:
    settings = {**SETTINGS[name], "inference_model": operators == "compiled"}
    if operators == "compiled":
        request.getfixturevalue("compiled")
        if not on_this_cpu(name):
            pytest.skip("no float8 units")
    source = tiny.write(tmp_path / "source")
    out = tmp_path / "out"
    config = EngineConfig(model_name_or_path=str(source), max_length=64, batch_size=2, **settings)
    export_model(config, out)
    assert answer(out, mode="static", **settings) == answer(source, **settings)
    manifest = load_manifest(out)
    wanted = config.quantization.settings
    assert manifest.scheme == (wanted.scheme or "dense")
    assert manifest.head_scheme == (wanted.head_scheme or "dense")


# Largest distance of the compiled operators' logits, by dtype. 16-bit activations are rounded to
# int8 in blocks of 32 before they meet integer weights.
COMPILED_DISTANCE = {"float32": 1e-5, "bfloat16": 0.06, "float16": 0.06}


@pytest.mark.parametrize("dtype", list(COMPILED_DISTANCE))
@pytest.mark.parametrize("name", [name for name in SETTINGS if on_this_cpu(name)])
def test_compiled_operators_compute_what_the_reference_computes(
    tmp_path: Path, name: str, dtype: str, compiled: object
) -> None:
    source = tiny.write(tmp_path)
    got = logits_of(source, inference_model=True, dtype=dtype, **SETTINGS[name])
    assert relative_error(got, logits_of(source, **SETTINGS[name])) < COMPILED_DISTANCE[dtype]


def test_the_cpu_refuses_float8_before_it_reads_weights(
    tmp_path: Path, compiled: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write(tmp_path)
    monkeypatch.setattr("predict.loading.checkpoint.Checkpoint.read", None)
    with pytest.raises(UserError, match=r"a8w8_fp8 does not run on the compiled .*use .*a8w8 "):
        answer(tmp_path, quant_type="a8w8_fp8", inference_model=True)


def test_what_the_compiled_operators_lack_runs_on_plain_ones_unless_told_otherwise(
    tmp_path: Path, compiled: object, caplog: pytest.LogCaptureFixture
) -> None:
    source = tiny.write(tmp_path / "model")
    settings: dict[str, Any] = {"max_length": 64, "dtype": "float32", "quant_type": "a8w8_fp8"}
    llm = LLM(source, **settings)
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "a8w8_fp8 does not run on the compiled operators" in said
    assert "The plain-Paddle operators are in use" in said
    plain = LLM(source, **settings, inference_model=False)
    prompt, greedy = [5, 6, 7], SamplingParams(temperature=0.0, max_new_tokens=8)
    wanted = plain.generate(prompt, greedy)[0].token_ids
    assert llm.generate(prompt, greedy)[0].token_ids == wanted
    assert len(caplog.records) == 1
    export_model(plain.config, tmp_path / "static")
    static = LLM(tmp_path / "static", mode="static", max_length=64)  # as its manifest says
    assert static.platform.compiled is plain.platform.compiled is llm.platform.compiled is None
    assert static.generate(prompt, greedy)[0].token_ids == wanted


@pytest.mark.parametrize("name", ["weight_only_int4 group", "a8w8_fp8 blocks", "head"])
def test_dummy_weights_run_in_every_scheme(tmp_path: Path, name: str) -> None:
    tiny.write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert len(answer(tmp_path, load_format="dummy", **SETTINGS[name])[0]) == 8


def test_group_that_does_not_divide_a_linear_is_named(tmp_path: Path) -> None:
    tiny.write(tmp_path)
    with pytest.raises(UserError, match=r"group size 64 does not divide the 96 input features of "):
        LLM(
            EngineConfig(
                model_name_or_path=str(tmp_path), quant_type="wint4", weightonly_group_size=64
            )
        )


def test_groups_of_mxfp4_that_do_not_divide_a_linear_are_named(tmp_path: Path) -> None:
    tiny.write(tmp_path, {"intermediate_size": 72})
    with pytest.raises(UserError, match=r"has groups of 32 .*not divide the 72 of .*down_proj"):
        answer(tmp_path, quant_type="mxfp4")


def test_names_to_skip_that_no_linear_has_are_named(tmp_path: Path) -> None:
    tiny.write(tmp_path)
    with pytest.raises(UserError, match=r"skip_list_names dwon is in the name of no linear .*q_p"):
        answer(tmp_path, quant_type="wint8", skip_list_names=("layers.0", "dwon"))


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "said"),
    [
        ("gpu", (8, 0), "bfloat16", r"needs a GPU of sm_89 or later, .*is sm_80; use .*a8w8 \("),
        (
            "gpu",
            (7, 5),
            "float16",
            r"a8w8_fp8 needs a GPU of sm_89 or later, and this one is sm_75",
        ),
        ("gpu:1", (9, 0), "float32", r"takes activations in bfloat16 or float16 on a GPU; set --d"),
        ("cpu", None, "bfloat16", r"does not run on the compiled operators of this CPU; use --qua"),
    ],
)
def test_where_a_scheme_does_not_run_is_said_with_what_to_use(
    device: str, capability: tuple[int, int] | None, dtype: str, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        check_support("a8w8_fp8", device, True, dtype, capability)
    check_support("a8w8_fp8", "cpu", False, dtype)
    check_support("a8w8_fp8", "gpu", True, "bfloat16", (9, 0))


@pytest.mark.parametrize("scheme", ["weight_only_int8", "weight_only_int4", "a8w8"])
def test_every_gpu_has_kernels(scheme: str) -> None:
    assert gpu_kernels((9, 0))[scheme] == "sm90"
    assert gpu_kernels((8, 9))["a8w8_fp8"] == gpu_kernels((8, 6))[scheme] == "mma"
    assert "a8w8_fp8" not in gpu_kernels((8, 6))
    assert "w4a8" not in gpu_kernels((10, 0))
    check_support(scheme, "gpu", True, "float16", (7, 5))
    check_support(scheme, "gpu", True, "bfloat16", (12, 0))
    check_support("a8w8_fp8", "gpu", True, "bfloat16", (8, 9), 128)
    with pytest.raises(UserError, match=r"sm_75, which has no bfloat16; set --dtype float16"):
        check_support(scheme, "gpu", True, "bfloat16", (7, 5))
    with pytest.raises(UserError, match=r"w4a8 needs a GPU of sm_90, and this one is sm_89"):
        check_support("w4a8", "gpu", True, "bfloat16", (8, 9))


def test_groups_that_gpus_lack_are_named() -> None:
    check_support("weight_only_int8", "gpu", True, "bfloat16", (9, 0), 64)
    with pytest.raises(UserError, match=r"every 32 input features does not run on sm_90 .*64, 128"):
        check_support("weight_only_int8", "gpu", True, "bfloat16", (9, 0), 32)
    check_support("weight_only_int4", "gpu", True, "bfloat16", (9, 0), 32)
    with pytest.raises(UserError, match=r"every 32 input features does not run on sm_80 .*64, 128"):
        check_support("weight_only_int4", "gpu", True, "bfloat16", (8, 0), 32)


def test_gpus_take_codes_by_sixteens() -> None:
    check_support("a8w8_fp8", "gpu", True, "bfloat16", (9, 0), 128, in_features=4112)
    with pytest.raises(UserError, match=r"a8w8 on a GPU .*multiple of 16, and one here has 4104;"):
        check_support("a8w8", "gpu", True, "bfloat16", (9, 0), in_features=4104)
    check_support("a8w8", "cpu", True, "bfloat16", in_features=4104)


def test_every_scheme_has_a_row() -> None:
    assert {DENSE.name, *SCHEMES} == set(known_schemes())
    assert all(scheme_of(name).NAME == scheme_info(name).name == name for name in known_schemes())


def test_schemes_are_found_by_what_they_hold() -> None:
    for row in SCHEMES.values():
        assert row.codes is not None
        assert find(row.codes, row.activations) is row
    with pytest.raises(UserError, match=r"no scheme has int2 weights .*known: int8 with float; "):
        find("int2")
    with pytest.raises(UserError, match=r"scheme 'int2' is not known \(known: dense, weight_only"):
        scheme_info("int2")


def test_a_folded_norm_makes_no_scheme_of_its_own() -> None:
    assert unfolded(DENSE.folded) == DENSE.name
    assert all(unfolded(name) == name for name in (DENSE.name, *SCHEMES))
    with pytest.raises(UserError, match="is not known"):
        scheme_info(DENSE.folded)


@pytest.mark.parametrize(
    ("name", "scheme", "cache"),
    [
        ("weight_only_int8", "weight_only_int8", None),
        ("WINT4", "weight_only_int4", None),
        ("w8a8", "a8w8", None),
        ("a8w8c8", "a8w8", "static"),
        ("a8w8c16", "a8w8", None),
        ("a8w8c8_fp8", "a8w8_fp8", "static"),
        ("fp8", "a8w8_fp8", None),
    ],
)
def test_spellings_of_paddlenlp_are_known(name: str, scheme: str, cache: str | None) -> None:
    assert parse_quant_type(name) == QuantType(scheme, cache)


def test_experts_in_4_bits_beside_float8_are_known() -> None:
    assert parse_quant_type("A8W8_fp8_wint4") == QuantType("a8w8_fp8", None, "weight_only_int4")
    assert parse_quant_type("a8w8c8_fp8_wint4").cache_type == "static"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quant_type": "int3"}, r"quant_type 'int3' is not known .allowed: weight_only_int8"),
        ({"quant_type": "wint4", "weightonly_group_size": 48}, r"size 48 is not .*32, 64, 128"),
        ({"quant_type": "fp8", "weight_block_size": (64, 64)}, r"allowed: \(128, 128\)"),
        ({"weightonly_group_size": 64}, r"nothing asks for that; add --quant_type"),
        ({"skip_list_names": ("a",)}, r"nothing asks for that; add --quant_type"),
        ({"cachekv_int8_type": "int2"}, r"'int2' is not known .allowed: dynamic, static"),
        ({"quant_type": "a8w8c8", "cachekv_int8_type": "int4"}, r"has a static cache, and cachek"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        EngineConfig(model_name_or_path="x", **changes)
