"""Quantized checkpoints: those of other libraries, what is refused, and what we write ourselves."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from export.export_model import export_model
from predict import LLM, EngineConfig
from predict.config.quantization import QuantSettings
from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading import safetensors_writer as safetensors_file
from predict.loading.cache_scales import head_scales
from predict.loading.checkpoint import Checkpoint
from predict.loading.layouts import compressed_tensors, paddlenlp
from predict.loading.layouts._stored import packed, unpacked
from predict.loading.model import open_weights, read_spec
from predict.loading.parallel_parts import paths_of_ranks
from predict.loading.platform import platform_of
from predict.nn.cache_formats import kv_format_of
from predict.nn.plans import LinearPlan
from predict.schemes import Quantized, _e4m3, scheme_of
from predict.schemes._e4m3 import encode
from tests.support import tiny
from tests.support.layouts import CASES, GOLDEN, MIXED, SCHEMES, open_layout
from tests.support.quantized_caches import write_scales
from tests.support.records import named_linears
from tests.support.schemes import answer, logits_of, relative_error
from tests.support.stored_layouts import (
    awq_tensors,
    gptq_tensors,
    rounded,
    values_of,
    with_dtypes,
)


def dequantized(layout: Any, plan: LinearPlan) -> dict[str, npt.NDArray[np.float32]]:
    """float32 matrices by part, through the scheme's own tensors."""
    scheme = scheme_of(layout.scheme(plan))
    tensors = scheme.tensors(layout.read(plan), "float32", compiled=None)
    values = scheme.plain(tensors).astype("float32").numpy()
    borders = np.cumsum(plan.part_sizes)[:-1]
    return dict(zip(plan.prefixes, np.split(values, borders), strict=True))


def rounded_bytes(values: npt.NDArray[np.float32], dtype: str) -> bytes:
    """The bytes of the values in a dtype, rounded to the nearest even."""
    import paddle

    if dtype == "float32":
        return values.tobytes()
    if dtype == "float16":
        return values.astype(np.float16).tobytes()
    return bytes(paddle.to_tensor(values).astype(dtype).view("uint16").numpy().tobytes())


def test_golden_cases_are_all_there() -> None:
    assert set(CASES) == set(SCHEMES)


@pytest.mark.parametrize("case", CASES)
def test_weights_equal_those_that_the_library_dequantizes(case: str) -> None:
    layout, plan = open_layout(GOLDEN / case)
    assert all(layout.scheme(linear) == SCHEMES[case] for linear in plan.linears())
    assert num_equal_to_golden(case) == 7 * plan.spec.num_layers


def num_equal_to_golden(case: str) -> int:
    """Matrices that the library quantized, each of them compared."""
    golden = json.loads((GOLDEN / case / "golden.json").read_text())["weights"]
    layout, plan = open_layout(GOLDEN / case)
    num_equal = 0
    for linear in plan.linears():
        for prefix, values in dequantized(layout, linear).items():
            if prefix not in golden:
                continue
            wanted = golden[prefix]
            np.testing.assert_allclose(values[:2, :3], wanted["corner"], rtol=1e-2, err_msg=prefix)
            got = hashlib.sha256(rounded_bytes(values, wanted["dtype"])).hexdigest()
            assert got == wanted["sha256"], prefix
            num_equal += 1
    return num_equal


def test_linears_that_gptqmodel_stores_in_different_ways_equal_its_own() -> None:
    layout, plan = open_layout(GOLDEN / MIXED)
    first, second = map(named_linears, plan.layers)
    kinds = {
        first.qkv: ("weight_only_int8", -1),
        first.gate_up: ("weight_only_int4", 32),
        second.qkv: ("weight_only_int8", 32),  # v_proj alone has 8 bits
        second.out: ("weight_only_int4", 32),
        second.gate_up: ("weight_only_int4", 32),
        second.down: ("dense", -1),
    }
    for linear, kind in kinds.items():
        assert (layout.scheme(linear), layout.group_size(linear)) == kind, linear.prefixes
    assert num_equal_to_golden(MIXED) == 6 * plan.spec.num_layers
    assert answer(GOLDEN / MIXED)


@pytest.mark.parametrize("case", CASES)
def test_layouts_know_their_groups(case: str) -> None:
    layout, plan = open_layout(GOLDEN / case)
    for linear in plan.linears():
        scale = layout.read(linear).scale
        by_group = scale.ndim == 2 and scale.shape[1] > 1
        size = layout.group_size(linear)
        if "block" in case:
            assert size == 128
        else:
            assert size == (linear.in_features // scale.shape[1] if by_group else -1)


@pytest.mark.parametrize("case", [case for case in CASES if SCHEMES[case] != "a8w8_fp8"])
def test_compiled_operators_read_golden_checkpoints(case: str, compiled: object) -> None:
    got = logits_of(GOLDEN / case, inference_model=True)
    assert relative_error(got, logits_of(GOLDEN / case)) < 1e-5


# Checkpoints of our own.


def write_quantized(
    directory: Path, scheme: str, group_size: int = -1, changes: dict[str, Any] | None = None
) -> Path:
    """A tiny model whose linears `predict.loading.layouts.compressed_tensors` wrote."""

    def stored(prefix: str, values: npt.NDArray[Any]) -> Any:
        weight = scheme_of(scheme).quantize(values, group_size)
        return compressed_tensors.linear_tensors(scheme, prefix, weight), None

    in_blocks = scheme == "a8w8_fp8" and group_size != -1
    size = -1 if in_blocks else group_size
    config = compressed_tensors.config(scheme, group_size=size, block=in_blocks)
    write_linears(directory, stored, config, changes)
    return directory


def write_linears(
    directory: Path,
    stored: Callable[[str, npt.NDArray[Any]], tuple[dict[str, Any], Any]],
    quantization: dict[str, Any],
    changes: dict[str, Any] | None = None,
) -> dict[str, npt.NDArray[np.float32]]:
    """A tiny model whose linears `stored` wrote, with what they then stand for, by name.

    stored: makes tensors of a linear, some with their dtypes, and that. changes: of config.json.
    """
    tiny.write(directory, changes)
    file = directory / "model.safetensors"
    made: dict[str, Any] = {}
    wanted: dict[str, Any] = {}
    for name, values in load_file(file).items():
        prefix = name.removesuffix(".weight")
        if "proj" in name:
            tensors, wanted[prefix] = stored(prefix, values)
            made |= tensors
        else:
            made[name] = values
    safetensors_file.write(file, with_dtypes(made))
    announce(directory, quantization)
    return wanted


def announce(directory: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config))


def change(directory: Path, name: str, values: npt.NDArray[Any] | None) -> None:
    """Replaces a tensor, or takes it away."""
    file = directory / "model.safetensors"
    held = load_file(file)
    if values is None:
        del held[name]
    else:
        held[name] = np.ascontiguousarray(values)
    save_file(held, file)


def load(directory: Path, **changes: Any) -> LLM:
    return LLM(
        EngineConfig(
            **{"dtype": "float32", "max_length": 64, "inference_model": False, **changes},
            model_name_or_path=directory,
        )
    )


WRITTEN = [
    ("weight_only_int8", -1),
    ("weight_only_int8", 32),
    ("weight_only_int4", -1),
    ("weight_only_int4", 32),
    ("w4a8", 32),
    ("a8w8", -1),
    ("a8w8_fp8", -1),
]


@pytest.mark.parametrize(("scheme", "group_size"), WRITTEN)
def test_what_is_written_answers_as_what_is_rounded_while_read(
    tmp_path: Path, scheme: str, group_size: int
) -> None:
    stored = write_quantized(tmp_path / "stored", scheme, group_size)
    dense = tiny.write(tmp_path / "dense")
    rounded = {"quant_type": scheme, "weightonly_group_size": group_size}
    np.testing.assert_array_equal(logits_of(stored), logits_of(dense, **rounded))
    assert answer(stored, quant_type=scheme) == answer(stored)  # the flag may say it too


def test_fp8_blocks_across_parts_that_are_no_multiple_of_128(tmp_path: Path) -> None:
    stored = write_quantized(tmp_path / "stored", "a8w8_fp8", 128)
    dense = tiny.write(tmp_path / "dense")
    assert relative_error(logits_of(stored), logits_of(dense)) < 0.2


def test_asymmetric_and_act_order_weights_survive_being_written(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    weight = Quantized(
        codes=generator.integers(0, 16, (64, 64)).astype(np.int8),
        scale=generator.random((64, 2), dtype=np.float32),
        zero=generator.integers(0, 16, (64, 2)).astype(np.float32),
        perm=generator.permutation(64).astype(np.int32),
    )
    directory = write_quantized(tmp_path, "weight_only_int4", 32, {"num_key_value_heads": 4})
    name = "model.layers.0.self_attn.o_proj"
    held = load_file(directory / "model.safetensors")
    held = {k: v for k, v in held.items() if not k.startswith(name)}
    made = compressed_tensors.linear_tensors("weight_only_int4", name, _wide(weight))
    save_file({**held, **{k: v for k, (_, v) in made.items()}}, directory / "model.safetensors")
    config = compressed_tensors.config("weight_only_int4", group_size=32)
    group = dict(config["config_groups"]["group_0"], targets=[name])
    group["weights"] = dict(group["weights"], symmetric=False)
    config["config_groups"]["group_1"] = group
    announce(directory, config)
    layout, plan = open_layout(directory)
    read = layout.read(named_linears(plan.layers[0]).out)
    want = _wide(weight)
    scheme = scheme_of("weight_only_int4")
    got, wanted = (scheme.plain(scheme.tensors(w, "float32", None)).numpy() for w in (read, want))
    np.testing.assert_array_equal(got, wanted)
    assert read.perm is not None


def _wide(weight: Quantized) -> Quantized:
    """The 64 x 64 weight beside itself: o_proj of the tiny model takes 128 features."""
    assert weight.perm is not None
    return Quantized(
        np.concatenate([weight.codes, weight.codes], axis=1),
        np.concatenate([weight.scale, weight.scale], axis=1),
        np.concatenate([weight.zero, weight.zero], axis=1),
        perm=np.concatenate([weight.perm, weight.perm + 64]).astype(np.int32),
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("axis", [0, 1])
def test_packing_is_undone_by_unpacking(bits: int, axis: int) -> None:
    codes = np.random.default_rng(0).integers(0, 1 << bits, (24, 40)).astype(np.uint8)
    words = packed(codes, bits, axis)
    assert words.shape[axis] == codes.shape[axis] * bits // 32
    np.testing.assert_array_equal(unpacked(words, bits, axis), codes)


def test_lm_head_of_a_quantized_checkpoint_may_be_rounded_too(tmp_path: Path) -> None:
    stored = write_quantized(tmp_path, "weight_only_int4", 32)
    layout, plan = open_layout(stored, head_scheme="weight_only_int8")
    assert layout.scheme(plan.head) == "weight_only_int8"
    assert layout.scheme(named_linears(plan.layers[0]).qkv) == "weight_only_int4"
    assert answer(stored, lm_head_quant_type="weight_only_int8")


def test_ignored_linears_stay_dense(tmp_path: Path) -> None:
    stored = write_quantized(tmp_path, "weight_only_int8")
    dense = {k: v for k, v in tiny.tensors(tiny.CONFIG).items() if "layers.0.mlp.down" in k}
    held = {
        k: v
        for k, v in load_file(stored / "model.safetensors").items()
        if "layers.0.mlp.down" not in k
    }
    save_file({**held, **dense}, stored / "model.safetensors")
    ignore = ["lm_head", "re:.*layers\\.0\\.mlp\\.down.*"]
    announce(stored, compressed_tensors.config("weight_only_int8", ignore=ignore))
    layout, plan = open_layout(stored)
    assert layout.scheme(named_linears(plan.layers[0]).down) == "dense"
    assert layout.scheme(named_linears(plan.layers[1]).down) == "weight_only_int8"
    assert answer(stored)


def write_fp8(directory: Path, quantization: dict[str, Any], **scale_as: Any) -> Path:
    """A tiny model in one of Hugging Face's float8 layouts; the e4m3 codes are exact per row."""
    ending, dtype, shape = scale_as["ending"], scale_as["dtype"], scale_as["shape"]

    def stored(prefix: str, values: npt.NDArray[Any]) -> Any:
        if shape == "rows":
            rounded = scheme_of("a8w8_fp8").quantize(values, -1)
            scale: npt.NDArray[Any] = rounded.scale[:, None]
            codes = rounded.codes
        else:
            scale = np.float32(2.0**-9).reshape(shape)
            codes = encode(values * 512)
        if dtype == "F8_E8M0":
            scale = np.full(shape, 127 - 9, np.uint8)
        made = {f"{prefix}.weight": ("F8_E4M3", codes), f"{prefix}.{ending}": (dtype, scale)}
        if quantization.get("activation_scheme") == "static":
            made[f"{prefix}.input_scale"] = "F32", np.float32(0.02).reshape(())
        return made, None

    write_linears(directory, stored, quantization)
    return directory


FP8_LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"quant_method": "fbgemm_fp8"}, {"ending": "weight_scale", "dtype": "F32", "shape": "rows"}),
    ({"quant_method": "fp8"}, {"ending": "weight_scale", "dtype": "F32", "shape": ()}),
    ({"quant_method": "fp8"}, {"ending": "weight_scale_inv", "dtype": "F32", "shape": (1,)}),
    (
        {"quant_method": "fp8", "activation_scheme": "static"},
        {"ending": "weight_scale", "dtype": "F32", "shape": (1,)},
    ),
    (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"ending": "weight_scale_inv", "dtype": "F8_E8M0", "shape": (1, 1)},
    ),
]


@pytest.mark.parametrize(("quantization", "scale_as"), FP8_LAYOUTS)
def test_float8_layouts_of_hugging_face_are_read(
    tmp_path: Path, quantization: dict[str, Any], scale_as: dict[str, Any]
) -> None:
    """The tiny model's matrices have at most 128 rows and columns: one block each."""
    stored = write_fp8(tmp_path / "stored", quantization, **scale_as)
    dense = tiny.write(tmp_path / "dense")
    layout, plan = open_layout(stored)
    read = layout.read(named_linears(plan.layers[0]).qkv)
    assert layout.scheme(named_linears(plan.layers[0]).qkv) == "a8w8_fp8"
    assert (read.act_scale is not None) == (quantization.get("activation_scheme") == "static")
    assert relative_error(logits_of(stored), logits_of(dense)) < 0.2


def test_the_limit_of_activations_is_fbgemms_alone(tmp_path: Path) -> None:
    scale_as = FP8_LAYOUTS[0][1]

    def opened(method: str, **changes: Any) -> Any:
        given = {"quant_method": method, **changes}
        folder = tmp_path / f"{method} {len(list(tmp_path.iterdir()))}"
        layout, plan = open_layout(write_fp8(folder, given, **scale_as))
        return layout.read(named_linears(plan.layers[0]).qkv).act_limit

    assert opened("fbgemm_fp8") == 1200.0
    assert opened("fbgemm_fp8", activation_scale_ub=7) == 7.0
    with pytest.raises(UserError, match=r"activation_scale_ub is -1\.0 \(allowed: finite"):
        opened("fbgemm_fp8", activation_scale_ub=-1.0)
    with pytest.raises(UserError, match=r"activation_scale_ub is 7\.0, which is not known"):
        opened("fp8", activation_scale_ub=7.0)


@pytest.mark.parametrize(("quantization", "scale_as"), FP8_LAYOUTS)
@pytest.mark.parametrize(
    ("settings", "scheme"),
    [
        ({"scheme": "weight_only_int8"}, "weight_only_int8"),
        ({"scheme": "weight_only_int4", "group_size": 32}, "weight_only_int4"),
        ({"scheme": "a8w8"}, "a8w8"),
        ({"skip": ("self_attn",)}, "dense"),
    ],
)
def test_float8_codes_are_rounded_as_their_values(
    tmp_path: Path,
    quantization: dict[str, Any],
    scale_as: dict[str, Any],
    settings: dict[str, Any],
    scheme: str,
) -> None:
    stored = write_fp8(tmp_path / "stored", quantization, **scale_as)
    kept, plan = open_layout(stored)
    layout, _ = open_layout(stored, **settings)
    qkv = named_linears(plan.layers[0]).qkv
    assert layout.scheme(qkv) == scheme
    codes = kept.read(qkv)
    scale = codes.scale.reshape(len(codes.scale), -1)
    scale = np.repeat(scale, -(-len(codes.codes) // len(scale)), axis=0)[: len(codes.codes), :1]
    wanted = scheme_of(scheme).quantize(
        _e4m3.values_of(codes.codes) * scale, layout.group_size(qkv)
    )
    got = layout.read(qkv)
    np.testing.assert_array_equal(got.codes, wanted.codes)
    np.testing.assert_array_equal(got.scale, wanted.scale)


def test_float8_codes_in_blocks_stay_so(tmp_path: Path) -> None:
    quantization, scale_as = FP8_LAYOUTS[-1]
    stored = write_fp8(tmp_path / "stored", quantization, **scale_as)
    with pytest.raises(UserError, match="--weight_block_size cannot change"):
        open_layout(stored, scheme="a8w8_fp8", block_size=128)


@pytest.mark.parametrize(
    ("settings", "scheme"),
    [
        ({}, "a8w8_fp8"),
        ({"scheme": "a8w8_fp8"}, "a8w8_fp8"),
        ({"scheme": "a8w8"}, "dense"),
        ({"head_scheme": "weight_only_int8"}, "weight_only_int8"),
    ],
)
def test_float8_codes_of_an_lm_head_are_kept_where_nothing_else_is_asked_for(
    tmp_path: Path, settings: dict[str, Any], scheme: str
) -> None:
    stored = write_fp8(tmp_path / "stored", FP8_LAYOUTS[0][0], **FP8_LAYOUTS[0][1])
    held = Checkpoint(stored)
    made: dict[str, Any] = {n: (held.tensors[n].dtype, held.read(n)) for n in held.tensors}
    head = scheme_of("a8w8_fp8").quantize(to_float32(made["lm_head.weight"][1]), -1)
    made["lm_head.weight"] = "F8_E4M3", head.codes
    made["lm_head.weight_scale"] = "F32", head.scale[:, None]
    safetensors_file.write(stored / "model.safetensors", made)
    layout, plan = open_layout(stored, **settings)
    assert layout.scheme(plan.head) == scheme
    if scheme == "a8w8_fp8":
        np.testing.assert_array_equal(layout.read(plan.head).codes, head.codes)


def test_the_size_of_other_types_is_that_of_what_is_stored(tmp_path: Path) -> None:
    """A layer in float stays so beside float8, and is rounded with any other type."""
    stored = write_fp8(tmp_path / "stored", FP8_LAYOUTS[0][0], **FP8_LAYOUTS[0][1])
    held, dense = Checkpoint(stored), Checkpoint(tiny.write(tmp_path / "dense"))
    made: dict[str, Any] = {
        name: (held.tensors[name].dtype, held.read(name))
        for name in held.tensors
        if "layers.1." not in name
    }
    made |= {name: ("F32", dense.read(name)) for name in dense.tensors if "layers.1." in name}
    safetensors_file.write(stored / "model.safetensors", made)
    asked = EngineConfig(model_name_or_path=str(stored), dtype="float32", inference_model=False)
    weights = open_weights(asked, *read_spec(stored), platform_of("cpu", False))
    as_float8 = replace(weights, layout=weights.layout_as(QuantSettings(scheme="a8w8_fp8")))
    as_int8 = replace(weights, layout=weights.layout_as(QuantSettings(scheme="weight_only_int8")))
    assert as_float8.num_bytes == weights.num_bytes > as_int8.num_bytes


# What is refused, before anything runs.


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quant_type": "a8w8"}, r"weights are weight_only_int4, and --quant_type asks for a8w8"),
        ({"quant_type": "wint8"}, r"--quant_type asks for weight_only_int8; leave --quant_type"),
        (
            {"quant_type": "wint4", "weightonly_group_size": 64},
            r"weightonly_group_size cannot change; leave",
        ),
        (
            {"quant_type": "wint4", "skip_list_names": ("down",)},
            r"skip_list_names cannot change",
        ),
    ],
)
def test_flags_that_contradict_the_checkpoint_are_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    write_quantized(tmp_path, "weight_only_int4", 32)
    with pytest.raises(UserError, match=said):
        load(tmp_path, **changes)


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "bitsandbytes"}, r"'bitsandbytes', which is not supported .known: gptq"),
        ({"quant_method": "gptq", "bits": 3}, r"GPTQ with 3 bits is not supported .allowed: 4, 8"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, r"checkpoint_format 'marlin'"),
        ({"quant_method": "awq", "version": "gemv"}, r"AWQ version 'gemv' is not supported"),
        ({"quant_method": "awq", "bits": 8}, r"AWQ with 8 bits"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        ({"quant_method": "compressed-tensors"}, r"has no config_groups"),
        ({"quant_type": "int9"}, r"quant_type 'int9' is not known"),
        ("yes", r"quantization_config is 'yes'; it must be an object"),
    ],
)
def test_unknown_layouts_name_what_is_known(tmp_path: Path, quantization: Any, said: str) -> None:
    tiny.write(tmp_path)
    announce(tmp_path, quantization)
    with pytest.raises(UserError, match=said):
        load(tmp_path)


@pytest.mark.parametrize(
    ("weights", "inputs", "said"),
    [
        ({"num_bits": 2}, None, r"int2 weights with float activations .known: int8 with float"),
        ({"type": "float"}, None, r"float4 weights"),
        ({}, {"num_bits": 4, "type": "int"}, r"int4 weights with int4 activations"),
        ({"strategy": "tensor_group"}, None, r"strategy 'tensor_group'"),
        ({"strategy": "tensor"}, None, r"one scale per tensor"),
    ],
)
def test_unknown_compressed_tensors_are_named(
    tmp_path: Path, weights: dict[str, Any], inputs: dict[str, Any] | None, said: str
) -> None:
    tiny.write(tmp_path)
    config = compressed_tensors.config("weight_only_int4", group_size=32)
    config["config_groups"]["group_0"]["weights"] |= weights
    config["config_groups"]["group_0"]["input_activations"] = inputs
    announce(tmp_path, config)
    with pytest.raises(UserError, match=said):
        load(tmp_path)


UP, DOWN = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"
NOT_FINITE = np.ones((64, 3), np.float32)
NOT_FINITE[5, :2] = np.nan, np.inf
GROUPS, ROWS = ("weight_only_int4", 32), ("a8w8", -1)
NO_CODES = np.zeros((96, 64), np.float32)


@pytest.mark.parametrize(
    ("scheme", "name", "values", "said"),
    [
        (GROUPS, f"{UP}.weight_scale", np.ones((96, 1)), r"wrong shape: .*weight_scale \[96, 1\]"),
        (GROUPS, f"{UP}.weight_scale", None, "1 missing: .*up_proj.weight_scale"),
        (GROUPS, f"{DOWN}.weight_scale", NOT_FINITE, "weight_scale holds 2 values that are not fi"),
        (ROWS, f"{UP}.weight", NO_CODES, r"up_proj.weight has dtype F32; a8w8 needs I8"),
    ],
)
def test_codes_and_scales_that_do_not_fit_are_named(
    tmp_path: Path, scheme: tuple[str, int], name: str, values: Any, said: str
) -> None:
    write_quantized(tmp_path, *scheme)
    change(tmp_path, name, values)
    with pytest.raises(UserError, match=said):
        load(tmp_path)


@pytest.mark.parametrize(
    ("written", "announced", "said"),
    [
        (16, 16, r"groups of 16 input features \(allowed: 32, 64, 128"),
        (32, 48, "group size 48 does not divide its 64 input features"),
    ],
)
def test_group_sizes_that_cannot_be_are_named(
    tmp_path: Path, written: int, announced: int, said: str
) -> None:
    write_quantized(tmp_path, "weight_only_int4", written)
    announce(tmp_path, compressed_tensors.config("weight_only_int4", group_size=announced))
    with pytest.raises(UserError, match=said):
        load(tmp_path)


def test_damaged_act_order_is_named(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "gptq_act_order", tmp_path, dirs_exist_ok=True)
    change(tmp_path, "model.layers.0.mlp.down_proj.g_idx", np.zeros(96, np.int32))
    with pytest.raises(UserError, match=r"down_proj.g_idx does not put 32 input features"):
        load(tmp_path)


def test_parts_ordered_differently_are_read_dense(tmp_path: Path) -> None:
    """Exactly the same matrix, though one gather cannot serve both parts."""
    shutil.copytree(GOLDEN / "gptq_act_order", tmp_path, dirs_exist_ok=True)
    name = "model.layers.0.mlp.up_proj"
    held = load_file(tmp_path / "model.safetensors")
    held[name + ".g_idx"] = np.ascontiguousarray(held[name + ".g_idx"][::-1])
    # Its columns were packed in rows of eight: turn them round as well.
    codes = unpacked(held[name + ".qweight"], 4, 0)[::-1]
    held[name + ".qweight"] = packed(codes, 4, 0)
    save_file(held, tmp_path / "model.safetensors")
    layout, plan = open_layout(tmp_path)
    whole, wanted_plan = open_layout(GOLDEN / "gptq_act_order")
    linear = named_linears(plan.layers[0]).gate_up
    assert layout.scheme(linear) == "dense"
    got = dequantized(layout, linear)
    want = dequantized(whole, named_linears(wanted_plan.layers[0]).gate_up)
    np.testing.assert_array_equal(got["model.layers.0.mlp.gate_proj"], want[linear.prefixes[0]])
    np.testing.assert_array_equal(got[name], want[name][:, ::-1])
    assert answer(tmp_path)


# Linears that are stored in different ways.

DYNAMIC = {
    "-:.*down_proj": {},
    r"+:model\.layers\.0\.self_attn\.": {"bits": 8, "group_size": -1, "sym": True},
    r".*\.self_attn\.v_proj": {"bits": 8, "mse": 2.4},
    r".*\.0\.mlp\.up_proj": {"group_size": 64},
    ".*": {},
    ".*mlp": {"bits": 8},  # never comes to it
}


def write_dynamic(directory: Path) -> dict[str, npt.NDArray[np.float32]]:
    """A GPTQ checkpoint as DYNAMIC says."""

    def stored(prefix: str, values: npt.NDArray[Any]) -> Any:
        bits, size = 4, 32
        if prefix.endswith("down_proj"):
            return {prefix + ".weight": values}, values
        if ".0.self_attn." in prefix:
            bits, size = 8, -1
        elif prefix.endswith("v_proj"):
            bits = 8
        elif prefix.endswith("0.mlp.up_proj"):
            size = 64
        weight = rounded(f"weight_only_int{bits}", values, size)
        return gptq_tensors(prefix, weight, bits), values_of(weight)

    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": DYNAMIC}
    return write_linears(directory, stored, settings)


def test_linears_of_a_gptq_checkpoint_are_stored_as_dynamic_says(
    tmp_path: Path, compiled: object
) -> None:
    wanted = write_dynamic(tmp_path)
    layout, plan = open_layout(tmp_path)
    assert layout.schemes == {"weight_only_int4", "weight_only_int8"}
    first, second = map(named_linears, plan.layers)
    kinds = {
        first.qkv: ("weight_only_int8", -1),
        first.out: ("weight_only_int8", -1),
        first.gate_up: ("weight_only_int4", 32),  # the finer one of its parts
        first.down: ("dense", -1),
        second.qkv: ("weight_only_int8", 32),  # 4 bits and 8, in 8
        second.out: ("weight_only_int4", 32),
        second.down: ("dense", -1),
    }
    for linear, kind in kinds.items():
        assert (layout.scheme(linear), layout.group_size(linear)) == kind, linear.prefixes
    for linear in plan.linears():
        for prefix, values in dequantized(layout, linear).items():
            if prefix in wanted:
                np.testing.assert_allclose(values, wanted[prefix], rtol=1e-6, err_msg=prefix)
    got = logits_of(tmp_path, inference_model=True)
    assert relative_error(got, logits_of(tmp_path)) < 1e-5


@pytest.mark.parametrize(
    ("dynamic", "said"),
    [
        ([".*"], r"dynamic is .* \(allowed: an object\)"),
        ({"a(": {}}, r"dynamic: 'a\(' is no regular expression"),
        ({".*": 4}, r"'\.\*' is 4; it must be an object of settings"),
        ({".*": {"bits": 3}}, r"'\.\*': GPTQ with 3 bits is not supported \(allowed: 4, 8\)"),
        ({".*": {"group_size": 0}}, r"group_size 0 is not supported"),
        ({".*": {"adapter": {"rank": 8}}}, r"adapter of single linears is not supported"),
        ({".*": {"group_size": 16}}, r"groups of 16 input features \(allowed|wrong shape"),
        ({"-:.*v_proj": {}}, r"do not fit config.json; 2 missing: .*v_proj.weight"),
    ],
)
def test_what_dynamic_asks_for_in_vain_is_named(tmp_path: Path, dynamic: Any, said: str) -> None:
    def stored(prefix: str, values: npt.NDArray[Any]) -> Any:
        weight = rounded("weight_only_int4", values, 32)
        return gptq_tensors(prefix, weight, 4), None

    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": dynamic}
    write_linears(tmp_path, stored, settings)
    with pytest.raises(UserError, match=said):
        load(tmp_path)


IGNORE = ("lm_head", "re:.*k_proj")
BESIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq": ("weight_only_int4", {"bits": 4, "group_size": 32, "dynamic": {"-:.*k_proj": {}}}),
    "awq": ("weight_only_int4", {"group_size": 32, "modules_to_not_convert": ["k_proj"]}),
    **{
        f"compressed-tensors {name}": (name, compressed_tensors.config(name, ignore=IGNORE))
        for name in ("weight_only_int8", "weight_only_int4", "a8w8", "w4a8")
    },
}


@pytest.mark.parametrize("kind", list(BESIDE))
def test_codes_beside_floats_in_one_product_become_floats(tmp_path: Path, kind: str) -> None:
    """A recipe may leave one of the matrices that a product reads as it is."""
    scheme, settings = BESIDE[kind]
    method = kind.partition(" ")[0]

    def stored(prefix: str, values: npt.NDArray[Any]) -> Any:
        if prefix.endswith("k_proj"):
            return {prefix + ".weight": values}, values
        if method == "compressed-tensors":
            weight = scheme_of(scheme).quantize(values, -1)
            return compressed_tensors.linear_tensors(scheme, prefix, weight), None
        weight = rounded(scheme, values, 32)
        write_linear = {"gptq": lambda: gptq_tensors(prefix, weight, 4)}
        write_linear["awq"] = lambda: awq_tensors(prefix, weight)
        return write_linear[method](), values_of(weight)

    wanted = write_linears(tmp_path, stored, {"quant_method": method, **settings})
    layout, plan = open_layout(tmp_path)
    for linear in plan.linears():
        is_mixed = any(prefix.endswith("k_proj") for prefix in linear.prefixes)
        assert layout.scheme(linear) == ("dense" if is_mixed else scheme), linear.prefixes
        for prefix, values in dequantized(layout, linear).items():
            if wanted.get(prefix) is not None:
                np.testing.assert_allclose(values, wanted[prefix], rtol=1e-6, err_msg=prefix)
    got = logits_of(tmp_path)
    assert relative_error(logits_of(tmp_path, inference_model=True), got) < 1e-5
    change(tmp_path, "model.layers.1.self_attn.k_proj.weight", None)
    with pytest.raises(UserError, match=r"[13] missing: model\.layers\.1\.self_attn\.k_proj"):
        load(tmp_path)


def test_codes_of_two_kinds_that_one_product_reads_are_refused(tmp_path: Path) -> None:
    def stored(prefix: str, values: npt.NDArray[Any]) -> Any:
        scheme = "a8w8" if prefix.endswith("k_proj") else "weight_only_int4"
        weight = scheme_of(scheme).quantize(values, -1)
        return compressed_tensors.linear_tensors(scheme, prefix, weight), None

    settings = compressed_tensors.config("weight_only_int4")
    own = compressed_tensors.config("a8w8")["config_groups"]["group_0"]
    settings["config_groups"]["group_1"] = {**own, "targets": ["re:.*k_proj"]}
    write_linears(tmp_path, stored, settings)
    with pytest.raises(UserError, match=r"different ways .*q_proj weight_only_int4, .*k_proj a8w8"):
        load(tmp_path)


def test_config_groups_of_compressed_tensors_go_by_name_then_pattern_then_class(
    tmp_path: Path,
) -> None:
    def kind(prefix: str) -> tuple[str, int]:
        if prefix == "model.layers.0.mlp.down_proj":
            return "weight_only_int8", -1
        if prefix.endswith("down_proj"):
            return "a8w8", -1
        return "weight_only_int4", 32

    def stored(prefix: str, values: npt.NDArray[Any]) -> Any:
        if ".1.self_attn." in prefix:
            return {prefix + ".weight": values}, None
        scheme, size = kind(prefix)
        weight = rounded(scheme, values, size)
        return compressed_tensors.linear_tensors(scheme, prefix, weight), None

    groups = {}
    for scheme, size, targets in (
        ("weight_only_int4", 32, ["Linear"]),
        ("a8w8", -1, ["re:.*down_proj"]),
        ("weight_only_int8", -1, ["model.layers.0.mlp.down_proj"]),
    ):
        config = compressed_tensors.config(scheme, group_size=size)
        groups[scheme] = config["config_groups"]["group_0"] | {"targets": targets}
    config |= {"config_groups": groups, "ignore": ["lm_head", r"re:.*\.1\.self_attn\..*"]}
    write_linears(tmp_path, stored, config)
    layout, plan = open_layout(tmp_path)
    first, second = map(named_linears, plan.layers)
    assert [layout.scheme(linear) for linear in (first.qkv, first.down, second.qkv)] == [
        *("weight_only_int4", "weight_only_int8", "dense")
    ]
    assert layout.scheme(second.down) == "a8w8"
    assert answer(tmp_path)


# PaddleNLP's directories.


def paddlenlp_model(
    directory: Path, changes: dict[str, Any] | None = None, smooth: bool = False
) -> Path:
    """A tiny a8w8 model as PaddleNLP's calibration leaves it, down_proj of layer 0 skipped."""
    generator = np.random.default_rng(3)
    act: dict[str, Any] = {}
    largest: dict[str, Any] = {}

    def stored(prefix: str, values: npt.NDArray[Any]) -> Any:
        if "layers.0.mlp.down" in prefix:
            return {f"{prefix}.weight": values}, None
        rounded = scheme_of("a8w8").quantize(values, -1)
        extra: dict[str, Any] = {"act_scale": 8.0 / 127}
        if smooth and prefix.endswith(("o_proj", "down_proj")):
            extra["smooth"] = 1 + generator.random(values.shape[1], dtype=np.float32)
            extra["shift"] = generator.random(values.shape[1], dtype=np.float32)
        weight = Quantized(rounded.codes, rounded.scale, **extra)
        stem = prefix.replace("model.", "llama.", 1) + (".layer" if "smooth" in extra else "")
        act_entry, weight_entry = paddlenlp.scale_entries(stem, weight)
        act.update(act_entry)
        largest.update(weight_entry)
        return paddlenlp.linear_tensors(prefix, weight), None

    quantization = {"quant_type": "a8w8", "smooth": smooth, "shift": smooth}
    write_linears(directory, stored, quantization, changes)
    (directory / "act_scales.json").write_text(json.dumps(act))
    (directory / "weight_scales.json").write_text(json.dumps(largest))
    return directory


@pytest.mark.parametrize("smooth", [False, True])
def test_paddlenlp_directories_are_read(tmp_path: Path, smooth: bool) -> None:
    paddlenlp_model(tmp_path, smooth=smooth)
    layout, plan = open_layout(tmp_path)
    assert layout.scheme(named_linears(plan.layers[0]).down) == "dense"
    assert layout.scheme(named_linears(plan.layers[1]).down) == "a8w8"
    read = layout.read(named_linears(plan.layers[1]).out)
    assert read.act_scale == pytest.approx(8.0 / 127)
    assert (read.smooth is not None) == smooth
    assert answer(tmp_path)
    if not smooth:
        dense = tiny.write(tmp_path / "dense")
        assert relative_error(logits_of(tmp_path), logits_of(dense)) < 0.1


@pytest.mark.parametrize("file", ["model.safetensors", "model_state.pdparams"])
def test_checkpoints_as_paddlenlp_writes_them_are_read(tmp_path: Path, file: str) -> None:
    """Its names, its [in, out] matrices of integers in floats, and its way of saving them."""
    import paddle

    paddlenlp_model(tmp_path, smooth=True)
    want = logits_of(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    made = {}
    for name, values in held.items():
        name = name.replace("model.", "llama.", 1)
        for wrapped in ("layers.1.self_attn.o_proj", "layers.1.mlp.down_proj"):
            name = name.replace(f"{wrapped}.weight", f"{wrapped}.layer.weight")
        turned = values.ndim == 2 and "embed_tokens" not in name
        made[name] = np.ascontiguousarray(values.T if turned else values, np.float32)
    if file.endswith("pdparams"):
        paddle.save({k: paddle.to_tensor(v) for k, v in made.items()}, str(tmp_path / file))
    else:
        save_file(made, tmp_path / file, metadata={"format": "np"})
    np.testing.assert_array_equal(logits_of(tmp_path), want)


def test_biases_of_norms_are_shifts(tmp_path: Path) -> None:
    """(norm(x) + b) W, in integers where W is, in floats where it is not."""
    paddlenlp_model(tmp_path)
    bias = np.linspace(-1, 1, 64, dtype=np.float32)
    for name in ("input_layernorm", "post_attention_layernorm"):
        change(tmp_path, f"model.layers.1.{name}.bias", bias)
    layout, plan = open_layout(tmp_path)
    np.testing.assert_array_equal(layout.read(named_linears(plan.layers[1]).qkv).shift, bias)
    assert layout.read(named_linears(plan.layers[1]).out).shift is None
    assert layout.bias(named_linears(plan.layers[1]).qkv) is None
    for name in ("act_scales.json", "weight_scales.json"):
        scales = json.loads((tmp_path / name).read_text())
        kept = {k: v for k, v in scales.items() if "layers.1.mlp" not in k}
        (tmp_path / name).write_text(json.dumps(kept))
    dense = tiny.tensors(tiny.CONFIG)
    for part in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.1.mlp.{part}.weight"
        change(tmp_path, name, dense[name])
    layout, plan = open_layout(tmp_path)
    gate = dense["model.layers.1.mlp.gate_proj.weight"]
    gate_up = layout.bias(named_linears(plan.layers[1]).gate_up)
    np.testing.assert_allclose(gate_up[:96], gate @ bias, rtol=1e-5)
    assert answer(tmp_path)


def test_c8_in_the_stored_type_brings_its_cache(tmp_path: Path) -> None:
    paddlenlp_model(tmp_path)
    announce(tmp_path, {"quant_type": "a8w8c8"})
    with pytest.raises(UserError, match=r"cachekv_scales.json"):
        load(tmp_path)
    write_scales(tmp_path, 2, k=[9.0] * 4, v=[9.0] * 4)
    assert load(tmp_path).config.kv_format == "int8_static"
    with pytest.raises(UserError, match=r"whose cache is static, and --cachekv_int8_type asks for"):
        load(tmp_path, cachekv_int8_type="dynamic")


def test_floats_that_are_no_codes_are_named(tmp_path: Path) -> None:
    paddlenlp_model(tmp_path)
    change(tmp_path, "model.layers.1.mlp.up_proj.weight", np.full((96, 64), 0.5, np.float32))
    with pytest.raises(UserError, match=r"up_proj.weight holds F32 numbers that are no a8w8 codes"):
        load(tmp_path)


@pytest.mark.parametrize("missing", [("act",), ("weight",), ("act", "weight")])
@pytest.mark.parametrize("is_calibrated", [True, False])
def test_scales_that_are_missing_can_be_made_up(
    tmp_path: Path, missing: tuple[str, ...], is_calibrated: bool
) -> None:
    """Of codes, and of floats that nobody calibrated; those that are there stay."""
    paddlenlp_model(tmp_path)
    if not is_calibrated:
        tiny.write(tmp_path)
        announce(tmp_path, {"quant_type": "a8w8"})
    for kind in missing:
        (tmp_path / f"{kind}_scales.json").unlink()
    layout, plan = open_layout(tmp_path, fake=True)
    read = layout.read(named_linears(plan.layers[1]).out)
    assert read.codes.dtype == np.int8
    assert read.act_scale == pytest.approx((10.0 if "act" in missing else 8.0) / 127)
    made_up = is_calibrated and "weight" in missing
    assert bool(np.all(read.scale == np.float32(1 / 127))) == made_up
    assert answer(tmp_path, use_fake_parameter=True)
    with pytest.raises(UserError, match="is missing, and"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("act_scales.json", None, r"act_scales.json is missing, and config.json announces"),
        ("act_scales.json", "{", r"act_scales.json is not valid JSON"),
        ("weight_scales.json", "[]", r"weight_scales.json holds a list; a JSON object is needed"),
        ("weight_scales.json", "{}", r"act_scales.json has a scale for .*q_proj, and weight_sca"),
    ],
)
def test_broken_scale_files_are_named(
    tmp_path: Path, file: str, text: str | None, said: str
) -> None:
    paddlenlp_model(tmp_path)
    (tmp_path / file).unlink()
    if text is not None:
        (tmp_path / file).write_text(text)
    with pytest.raises(UserError, match=said):
        load(tmp_path)


def split_scales(directory: Path, own: bool) -> None:
    """The scale files of two ranks; own: of inner columns each rank has found others."""
    for kind in ("act", "weight"):
        path = directory / f"{kind}_scales.json"
        scales: dict[str, Any] = json.loads(path.read_text())
        path.unlink()
        for rank in range(2):
            found = {}
            for name, value in scales.items():
                is_inner = "o_proj" in name or "down_proj" in name
                if isinstance(value, list) and not is_inner:
                    half = len(value) // 2
                    value = value[rank * half : (rank + 1) * half]
                if own and is_inner and rank:
                    value = [each / 2 for each in value] if isinstance(value, list) else value / 2
                found[name] = value
            (directory / f"{kind}_scales_{rank}.json").write_text(json.dumps(found))


def test_scales_of_ranks_are_those_of_the_whole_model(tmp_path: Path) -> None:
    """As PaddleNLP's split_weights leaves them; and as ranks that calibrate themselves do."""
    paddlenlp_model(tmp_path, smooth=True)
    want = logits_of(tmp_path)
    split_scales(tmp_path, own=False)
    np.testing.assert_array_equal(logits_of(tmp_path), want)
    whole = open_layout(tmp_path)
    paddlenlp_model(tmp_path, smooth=True)
    split_scales(tmp_path, own=True)
    own = open_layout(tmp_path)
    for layout, plan in (whole, own):
        assert layout.read(named_linears(plan.layers[1]).out).act_scale == pytest.approx(8 / 127)
    first, second = (
        layout.read(named_linears(plan.layers[1]).down) for layout, plan in (whole, own)
    )
    np.testing.assert_array_equal(first.scale, second.scale)
    half = first.codes.shape[1] // 2
    np.testing.assert_array_equal(first.codes[:, :half], second.codes[:, :half])
    halved = np.rint(first.codes[:, half:] / np.float32(2)).astype(np.int8)
    np.testing.assert_array_equal(second.codes[:, half:], halved)
    for rank in ("tp00", "tp01", "tp02"):
        (tmp_path / f"model_state.{rank}.pdparams").touch()
    with pytest.raises(UserError, match=r"act_scales_N.json of 2 ranks, and there are 3; rank 2"):
        paths_of_ranks(tmp_path / "act_scales.json")
    for rank in ("tp00", "tp01", "tp02"):
        (tmp_path / f"model_state.{rank}.pdparams").unlink()
    path = (tmp_path / "act_scales_1.json").rename(tmp_path / "act_scales_2.json")
    with pytest.raises(UserError, match=r"act_scales_N.json of 2 ranks, and there are 3; rank 1"):
        load(tmp_path)
    path = path.rename(tmp_path / "act_scales_1.json")
    kept = {k: v for k, v in json.loads(path.read_text()).items() if "o_proj" not in k}
    path.write_text(json.dumps(kept))
    with pytest.raises(UserError, match=r"act_scales_1.json and act_scales_0.json do not hold"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1.0, 2.0], r"o_proj has 2 scales for 64 output features"),
        ([float("nan")] * 64, r"o_proj.*it must be above 0"),
        ([0.0] * 64, r"o_proj.*it must be above 0"),
        ("much", r"o_proj.* is much; it must be above 0"),
    ],
)
def test_wrong_scales_are_named(tmp_path: Path, value: Any, said: str) -> None:
    paddlenlp_model(tmp_path)
    path = tmp_path / "weight_scales.json"
    scales = json.loads(path.read_text())
    scales["llama.layers.1.self_attn.o_proj.weight_quanter"] = value
    path.write_text(json.dumps(scales))
    with pytest.raises(UserError, match=said):
        load(tmp_path)


def test_weight_only_paddlenlp_configs_are_rounded_while_read(tmp_path: Path) -> None:
    tiny.write(tmp_path)
    want = logits_of(tmp_path, quant_type="weight_only_int8")
    announce(tmp_path, {"quant_type": "weight_only_int8"})
    np.testing.assert_array_equal(logits_of(tmp_path), want)
    with pytest.raises(UserError, match="asks for a8w8"):
        load(tmp_path, quant_type="a8w8")


# Values of the wrong kind.


def test_written_dtypes_must_fit_their_arrays(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x: BF16 \[2\] needs uint16, got float32"):
        safetensors_file.write(tmp_path / "x.safetensors", {"x": ("BF16", np.ones(2, np.float32))})


def test_bfloat16_is_written_as_its_bits(tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0xC000, 0x0001], np.uint16)
    safetensors_file.write(tmp_path / "model.safetensors", {"x": ("BF16", bits)})
    checkpoint = Checkpoint(tmp_path)
    assert to_float32(checkpoint.read("x")).tolist() == [
        1.0,
        -2.0,
        pytest.approx(9.18e-41, rel=1e-2),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
KV_SCALES = {"k_scale": 0.02, "v_scale": 0.03}


def with_cache(directory: Path, scheme: dict[str, Any], scales: dict[str, float]) -> Path:
    """A copy of a checkpoint with a kv_cache_scheme, and scales that grow with the layer."""
    shutil.copytree(GOLDEN / "ct_w8a16", directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {
        f"model.layers.{layer}.self_attn.{name}": np.full((1,), scale * (1 + layer), np.float32)
        for layer in range(2)
        for name, scale in scales.items()
    }
    held = {name: (each.dtype, each.read()) for name, each in Checkpoint(directory).stored.items()}
    safetensors_file.write(directory / "model.safetensors", held | with_dtypes(tensors))
    return directory


@pytest.mark.parametrize("kind", ["float", "int"])
@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("k_proj.output_scale",) * 2])
def test_cache_scales_of_a_checkpoint_are_used(
    tmp_path: Path, kind: str, names: tuple[str, str]
) -> None:
    scales = dict(zip((names[0], names[1].replace("k_", "v_")), KV_SCALES.values(), strict=True))
    source = with_cache(tmp_path / "source", {**KV_SCHEME, "type": kind}, scales)
    llm = LLM(EngineConfig(model_name_or_path=str(source), inference_model=False))
    assert llm.config.kv_format == {"float": "fp8", "int": "int8_static"}[kind]
    kv_format = kv_format_of(llm.config.kv_format)
    layers = head_scales(kv_format, source, llm.spec)
    assert layers is not None
    for layer, (key, value) in layers.items():
        np.testing.assert_allclose([key, value], [[0.02 * (1 + layer)], [0.03 * (1 + layer)]])
    # A static model has no tensors to read them from.
    asked = EngineConfig(
        model_name_or_path=source, dtype="float32", max_length=64, inference_model=False
    )
    export_model(asked, tmp_path / "out")
    again = head_scales(kv_format, tmp_path / "out", llm.spec)
    assert again is not None
    read, wanted = (np.array([*scales.values()]) for scales in (again, layers))
    np.testing.assert_allclose(read, wanted, rtol=1e-6)
    assert answer(tmp_path / "out", mode="static") == answer(source)
    # They change what the cache holds.
    coarse = with_cache(
        tmp_path / "coarse", {**KV_SCHEME, "type": kind}, dict.fromkeys(scales, 9.0)
    )
    assert relative_error(logits_of(coarse), logits_of(source)) > 1e-3


def test_cache_scales_that_are_not_there_are_said_to_be_1(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(with_cache(tmp_path / "source", KV_SCHEME, {}), inference_model=False)
    assert "no k_scale and v_scale: all scales are 1" in caplog.text


def test_cache_schemes_that_are_not_known_are_refused_by_name(tmp_path: Path) -> None:
    for name, value in {"num_bits": 4, "strategy": "attn_head", "dynamic": True}.items():
        source = with_cache(tmp_path / name, {**KV_SCHEME, name: value}, KV_SCALES)
        with pytest.raises(UserError, match=f"kv_cache_scheme .*'{name}': .*is not supported"):
            LLM(EngineConfig(model_name_or_path=str(source), inference_model=False))
    source = with_cache(tmp_path / "flag", KV_SCHEME, KV_SCALES)
    with pytest.raises(UserError, match=r"whose cache is fp8, .*asks for int4"):
        LLM(EngineConfig(model_name_or_path=str(source), cachekv_int8_type="int4"))
    source = with_cache(tmp_path / "half", KV_SCHEME, {"k_scale": 0.02})
    with pytest.raises(UserError, match="layer 0 has no v_scale"):
        LLM(EngineConfig(model_name_or_path=str(source), inference_model=False))


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        (r".*lm_head", True),
        (r"model\.layers\.\d+\.mlp\.(gate|up)_proj", True),
        (r".*\.(?:1[0-5]|2\d)\..*", True),
        (r"[*+{2}]+x", True),
        (r"model.layers.\d{1,2}.(self_attn|mlp)?", True),
        (r"(a+)+$", False),
        (r"(\w+\.?)*!", False),
        (r"(?:.*){9}x", False),
        (r".*.*.*.*.*.*x", False),
        ("a" * 600, False),
        (r"[", False),
        (r"(?P<x", False),
    ],
)
def test_patterns_that_could_take_ages_are_refused(text: str, fine: bool) -> None:
    from predict.system.settings import pattern

    if fine:
        assert pattern(text, "here").pattern == text
        return
    with pytest.raises(UserError, match="here: "):
        pattern(text, "here")


ONLINE = {"config_groups": {"R4": {"apply": [{"targets": ["Linear"], "location": "input"}]}}}
CODES = {"num_bits": 8, "type": "int"}


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("gptq_sym", "is_marlin_format", True),
        ("gptq_sym", "rotation", "hadamard"),
        ("gptq_sym", "checkpoint_format", "marlin"),
        ("awq", "act_bits", 8),
        ("awq", "version", "gemv"),
        ("ct_w4a16", "transform_config", ONLINE),
        ("ct_w4a16", "sparsity_config", {"format": "sparse-24-bitmask"}),
        ("ct_w4a16", "spin_config", {"r1": True}),
        ("ct_w4a16", "config_groups group_0 output_activations", CODES),
        ("ct_w4a16", "config_groups group_0 weights offset", 1),
        ("ct_w8a8", "config_groups group_0 input_activations rotate", True),
        ("fp8_block", "fmt", "e5m2"),
        ("fp8_block", "scale_fmt", "log"),
        ("fp8_block", "dequantize", True),
        ("fp8_block", "expert_dtype", "fp4"),
        ("mxfp4", "scale_bits", 4),
        ("paddlenlp", "weight_double_quant", True),
    ],
)
def test_what_is_said_of_codes_and_not_read_is_refused_by_name(
    tmp_path: Path, case: str, key: str, value: Any
) -> None:
    own = {"mxfp4": {"quant_method": "mxfp4"}, "paddlenlp": {"quant_type": "weight_only_int8"}}
    shutil.copytree(GOLDEN / ("awq" if case in own else case), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    inside = config["quantization_config"] = own.get(case) or config["quantization_config"]
    *path, name = key.split()
    for part in path:
        inside = inside[part]
    inside[name] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=rf"config\.json: quantization_config.* {name} |{name}"):
        open_layout(tmp_path)


@pytest.mark.parametrize(
    ("case", "values"),
    [
        ("gptq_sym", {"bits": 4.0, "group_size": 32.0, "meta": {"quantizer": ["gptqmodel:7"]}}),
        ("gptq_sym", {"is_marlin_format": False, "rotation": None}),
        ("awq", {"version": None, "format": "gemm"}),
        ("ct_w4a16", {"transform_config": {}, "sparsity_config": {"format": "dense"}}),
        (
            "ct_w4a16",
            {
                "transform_config": {
                    "config_groups": {"R1": {"apply": [{"location": "weight_input"}]}}
                }
            },
        ),
        ("fp8_block", {"ignored_layers": [], "scale_fmt": "ue8m0"}),
    ],
)
def test_what_changes_no_code_is_read_over(
    tmp_path: Path, case: str, values: dict[str, Any]
) -> None:
    shutil.copytree(GOLDEN / case, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    announce(tmp_path, {**config["quantization_config"], **values})
    layout, plan = open_layout(tmp_path)
    wanted, _ = open_layout(GOLDEN / case)
    assert {layout.scheme(each) for each in plan.linears()} == {*layout.schemes}
    assert layout.schemes == wanted.schemes


@pytest.mark.parametrize(("case", "file"), [("gptq_sym", "quantize"), ("awq", "quant")])
def test_a_tools_own_file_says_what_config_json_does_not(
    tmp_path: Path, case: str, file: str
) -> None:
    shutil.copytree(GOLDEN / case, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    said = config.pop("quantization_config")
    del said["quant_method"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / f"{file}_config.json").write_text(json.dumps(said))
    layout, plan = open_layout(tmp_path)
    linear = next(iter(plan.linears()))
    for name, values in dequantized(layout, linear).items():
        whole, wanted_plan = open_layout(GOLDEN / case)
        wanted = dequantized(whole, next(iter(wanted_plan.linears())))
        np.testing.assert_array_equal(values, wanted[name])


def test_float8_of_another_kind_is_named(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "fp8_block", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    head = path.read_bytes()
    path.write_bytes(head.replace(b'"F8_E4M3"', b'"F8_E5M2"'))
    with pytest.raises(UserError, match=r"proj.weight has dtype F8_E5M2 \(allowed: F8_E4M3\)"):
        load(tmp_path)


def test_zero_points_that_are_not_there_are_named(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "awq", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if "qzeros" not in k}, path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    announce(tmp_path, {**config, "zero_point": False})
    with pytest.raises(UserError, match="zero_point is false, and the files have no qzeros"):
        load(tmp_path)


def test_compressed_parts_ordered_differently_are_read_dense(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    orders = {}

    def stored(prefix: str, values: npt.NDArray[Any]) -> Any:
        order = orders[prefix] = rng.permutation(values.shape[1])
        weight = replace(rounded("weight_only_int4", values[:, order], 32), perm=order)
        made = compressed_tensors.linear_tensors("weight_only_int4", prefix, weight)
        return {name: array for name, (_, array) in made.items()}, values_of(weight)

    wanted = write_linears(
        tmp_path, stored, compressed_tensors.config("weight_only_int4", group_size=32)
    )
    layout, plan = open_layout(tmp_path)
    first = named_linears(plan.layers[0])
    assert (layout.scheme(first.qkv), layout.scheme(first.out)) == ("dense", "weight_only_int4")
    for prefix, values in dequantized(layout, first.qkv).items():
        np.testing.assert_allclose(values[:, orders[prefix]], wanted[prefix], rtol=1e-6)
