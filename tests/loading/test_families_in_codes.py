"""Checkpoints of the newer families as people have them: GPTQ, AWQ and float8 in blocks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predict.device.place import to_float32
from predict.loading.layouts import compressed_tensors
from predict.loading.model import read_spec
from predict.loading.safetensors_writer import write
from predict.models import weight_names
from predict.nn.plans import plan_weights
from predict.schemes._e4m3 import encode, values_of
from tests.support.checkpoints import Tensors, stored, write_random
from tests.support.expert_models import SIZES
from tests.support.golden import GOLDEN
from tests.support.schemes import logits_of, relative_error
from tests.support.stored_layouts import awq_tensors, gptq_tensors, rounded, with_dtypes
from tests.support.stored_layouts import values_of as values_of_integers

CASES = (
    *("exaone4_32b", "glm4_moe_lite_30b", "hunyuan_7b", "minimax_m2_230b", "ministral3_8b"),
    *("granitemoe_3b", "mistral3_3b", "olmo3_7b", "phimoe_42b", "seed_oss_36b"),
)
GROUP = 32
GRANITE_EXPERT = re.compile(
    r"(.*\.block_sparse_moe)\.experts\.(\d+)\.(gate_up_proj|down_proj)\.weight"
)
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "awq": {"bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "fp8": {  # as MiniMax's
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        "weight_block_size": [128, 128],
    },
}


def in_codes(method: str, prefix: str, values: Any) -> tuple[dict[str, Any], Any]:
    """Tensors of a linear, and what they stand for."""
    if method == "fp8":
        codes = encode(values * 256)
        scale = np.full([-(-size // 128) for size in values.shape], 1 / 256, np.float32)
        made: dict[str, Any] = {f"{prefix}.weight": ("F8_E4M3", codes)}
        return made | {f"{prefix}.weight_scale_inv": scale}, values_of(codes) / 256
    weight = rounded("weight_only_int4", values, GROUP)
    if method == "gptq":
        return gptq_tensors(prefix, weight, 4), values_of_integers(weight)
    return awq_tensors(prefix, weight), values_of_integers(weight)


def random_model(folder: Path, case: str, seed: int) -> Path:
    """A model of the case's family, of sizes that groups divide."""

    def shaped(values: dict[str, Any]) -> dict[str, Any]:
        values = {k: SIZES.get(k, v) if v is not None else v for k, v in values.items()}
        cut = {k: v[:2] for k, v in values.items() if k in ("layer_types", "attn_type_list")}
        inner = {k: shaped(v) for k, v in values.items() if k == "text_config"}
        return values | cut | inner

    rng = np.random.default_rng(seed)

    def made(name: str, shape: tuple[int, ...]) -> Any:
        values = rng.standard_normal(shape, dtype=np.float32)
        return 1 + 0.1 * values if "norm" in name else 0.15 * values

    config = shaped(json.loads((GOLDEN / case / "config.json").read_text()))
    if case == "phimoe_42b":  # whose file has a factor for each pair of a head's values
        config["num_attention_heads"] = 4
    return write_random(folder, config, made)


# By rounded activations another expert is chosen with the first seed, in transformers too.
SEEDS = {("phimoe_42b", "fp8"): 5}


def check_codes(
    folder: Path, case: str, method: str, keep: Callable[[str], bool] = lambda _: False
) -> None:
    """A checkpoint of codes answers as one of the values that they stand for.

    keep: of which linears the checkpoint holds floats, by their names.
    """
    dense = random_model(folder / "dense", case, SEEDS.get((case, method), 3))
    spec, reader = read_spec(dense)
    linears = plan_weights(spec, weight_names(reader)).linears()
    names = {prefix for linear in linears for prefix in linear.prefixes if not keep(prefix)}
    tensors = stored(dense)
    plain, codes = dict(tensors), dict(tensors)
    for prefix in names:
        del codes[f"{prefix}.weight"]
        made, values = in_codes(method, prefix, tensors[f"{prefix}.weight"][1])
        codes |= with_dtypes(made)
        plain[f"{prefix}.weight"] = "F32", values.astype(np.float32)
    write(dense / "model.safetensors", plain)
    (folder / "codes").mkdir()
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, **CONFIGS[method]}
    (folder / "codes" / "config.json").write_text(json.dumps(config))
    write(folder / "codes" / "model.safetensors", as_granite(codes))
    error = relative_error(logits_of(folder / "codes"), logits_of(dense))
    assert error < (0.3 if method == "fp8" else 1e-4), error  # float8's activations are rounded


def as_granite(tensors: Tensors) -> Tensors:
    """Granite's experts in floats as its files have them: all of a layer in one tensor."""
    made: Tensors = {}
    experts: dict[str, dict[int, Any]] = {}
    for name, (dtype, values) in tensors.items():
        found = GRANITE_EXPERT.fullmatch(name)
        if found is None or dtype != "F32":
            made[name] = dtype, values
        else:
            linear = {"gate_up_proj": "input_linear", "down_proj": "output_linear"}[found[3]]
            experts.setdefault(f"{found[1]}.{linear}.weight", {})[int(found[2])] = values
    stacked = {n: ("F32", np.stack([of[i] for i in range(len(of))])) for n, of in experts.items()}
    return made | stacked


@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("case", CASES)
def test_codes_answer_as_what_they_stand_for(case: str, method: str, tmp_path: Path) -> None:
    check_codes(tmp_path, case, method)


@pytest.mark.parametrize("method", CONFIGS)
def test_experts_in_one_tensor_stay_in_floats_beside_codes(method: str, tmp_path: Path) -> None:
    """Tools find Granite's linears one by one, and its experts are none to them."""
    check_codes(tmp_path, "granitemoe_3b", method, keep=lambda name: "experts" in name)


def ministral_in_float8(folder: Path, layout: str) -> Path:
    """Ministral 3 as Mistral publishes it, or the same codes as compressed-tensors has them.

    One scale for each matrix and one for its activations, bfloat16, of no dimension; the tower that
    sees images, the projector and the table of tokens in floats.
    """
    tensors = stored(GOLDEN / "mistral3_3b")
    made: Tensors = {}
    for name, (dtype, values) in tensors.items():
        if "language_model" not in name or "_proj.weight" not in name:
            made[name] = dtype, values
            continue
        prefix, weight = name.removesuffix(".weight"), to_float32(values)
        scale = 2.0 ** np.ceil(np.log2(np.abs(weight).max() / 448))  # bfloat16 holds it
        made[name] = "F8_E4M3", encode(weight / scale)
        scales = {"weight": scale, "input": 2.0**-4}
        for kind, value in scales.items():
            ending = f"{kind}_scale"
            if layout == "fp8":
                ending = {"weight": "weight_scale_inv", "input": "activation_scale"}[kind]
            made[f"{prefix}.{ending}"] = "BF16", np.uint16(np.float32(value).view(np.uint32) >> 16)
    folder.mkdir()
    config = json.loads((GOLDEN / "mistral3_3b" / "config.json").read_text())
    ignored = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    config["quantization_config"] = {
        "activation_scheme": "static",
        "dequantize": False,
        "modules_to_not_convert": ignored,
        "quant_method": "fp8",
        "weight_block_size": None,
    }
    if layout != "fp8":
        names = ["re:.*vision_tower.*", "re:.*multi_modal_projector.*", "lm_head"]
        config["quantization_config"] = compressed_tensors.config(
            "a8w8_fp8", ignore=names, static=True, per_tensor=True
        )
    (folder / "config.json").write_text(json.dumps(config))
    write(folder / "model.safetensors", made)
    return folder


def test_ministral_in_float8_answers_as_its_codes_in_another_layout(tmp_path: Path) -> None:
    logits = {
        layout: logits_of(ministral_in_float8(tmp_path / layout, layout))
        for layout in ("fp8", "compressed-tensors")
    }
    np.testing.assert_array_equal(logits["fp8"], logits["compressed-tensors"])
    assert 0 < relative_error(logits["fp8"], logits_of(GOLDEN / "mistral3_3b")) < 0.3
