"""float8 checkpoints in blocks of 128 x 128: DeepSeek's, whose latents have one, and wide experts.

The golden's blocks end within heads and within rows of latents. HF transformers made its logits of
the values that codes stand for; products of codes round activations besides.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.export_model import export_model
from predict import LLM, EngineConfig
from predict.device import library
from predict.loading.build import DecoderBuilder
from predict.loading.layouts import compressed_tensors
from predict.loading.model import open_weights, read_spec
from predict.loading.platform import platform_of
from predict.loading.safetensors_writer import write
from predict.nn.decoder import Decoder
from predict.nn.kinds.latent_attention import LatentAttention, LatentAttentionBlock
from predict.nn.plans import LinearPlan
from predict.schemes import scheme_of
from tests.support.checkpoints import Tensors, stored
from tests.support.expert_models import write_experts
from tests.support.float8 import (
    BLOCK,
    CASE,
    LATENTS,
    SCALE,
    Array,
    plain_values,
    with_codes_of,
    written,
)
from tests.support.golden import CODED, GOLDEN, check_greedy, config, golden, greedy
from tests.support.golden_logits import check_logits, logits_and_wanted
from tests.support.layouts import open_layout
from tests.support.schemes import logits_of, relative_error
from tests.support.stored_layouts import rounded
from tests.support.stored_layouts import values_of as values_of_integers

EXPERTS = re.compile(r".*\.experts\.[0-9]+\.\w+_proj")


def decoder_of(folder: Path) -> Decoder:
    """The network, float32, for plain operators."""
    asked = EngineConfig(model_name_or_path=str(folder), dtype="float32", inference_model=False)
    weights = open_weights(asked, *read_spec(folder), platform_of("cpu", False))
    given = weights.plan, weights.source, weights.layout, "float32", None, 16
    return DecoderBuilder(*given).build()


# Latents.


def test_the_golden_has_blocks_that_end_within_heads_and_latents() -> None:
    block = read_spec(GOLDEN / CASE)[0].attention[0]
    assert isinstance(block, LatentAttentionBlock)
    (name,) = CODED
    assert name == CASE
    scale = stored(GOLDEN / CASE)[f"model.layers.1.self_attn.kv_b_proj.weight{SCALE}"][1]
    assert scale.shape == (3, 2)
    assert len(np.unique(scale)) == scale.size
    head = block.qk_nope_head_dim + block.v_head_dim
    ends = [end % head for end in (BLOCK, 2 * BLOCK)]
    assert 0 < ends[0] < block.qk_nope_head_dim < ends[1] < head


def test_codes_of_latents_become_the_matrices_of_every_head() -> None:
    values = plain_values(stored(GOLDEN / CASE))
    decoder = decoder_of(GOLDEN / CASE)
    assert len(decoder.layers) == 2
    for number, (attention, _) in enumerate(decoder.layers):
        assert isinstance(attention, LatentAttention)
        block = attention.block
        keys, per_head = block.qk_nope_head_dim, block.qk_nope_head_dim + block.v_head_dim
        whole = values[f"model.layers.{number}.self_attn.kv_b_proj"]
        for head in range(block.num_heads):
            rows = whole[head * per_head : (head + 1) * per_head]
            np.testing.assert_array_equal(attention.kv_b.key_up.numpy()[head], rows[:keys])
            np.testing.assert_array_equal(attention.kv_b.value_up.numpy()[head], rows[keys:])


@pytest.mark.parametrize("absorbs", [True, False])
@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_latents_of_codes_give_transformers_logits_and_text(
    operators: dict[str, Any], mode: str, absorbs: bool, tmp_path: Path
) -> None:
    """Nothing else is in codes here, so that no product rounds activations."""
    tensors = with_codes_of(stored(GOLDEN / CASE), LATENTS)
    assert sum(dtype == "F8_E4M3" for dtype, _ in tensors.values()) == 2
    model = written(tmp_path / "model", GOLDEN / CASE, tensors)
    settings = {"batch_size": 8, "mla_use_matrix_absorption": absorbs, **operators}
    if mode == "static":
        export_model(config(model, **settings), tmp_path / "static")
        model = tmp_path / "static"
    llm = LLM(config(model, mode=mode, **settings))
    check_logits(llm, CASE)
    check_greedy(llm, CASE)


def test_values_of_codes_give_transformers_logits(
    operators: dict[str, Any], tmp_path: Path
) -> None:
    tensors = with_codes_of(stored(GOLDEN / CASE), re.compile("none"))
    model = written(tmp_path / "model", GOLDEN / CASE, tensors)
    check_logits(LLM(config(model, batch_size=8, **operators)), CASE)


@pytest.mark.parametrize(
    ("settings", "median"),
    [
        ({}, 0.15),
        ({"cachekv_int8_type": "fp8"}, 0.2),
        ({"quant_type": "a8w8_fp8_wint4"}, 0.7),
        ({"quant_type": "weight_only_int8"}, 0.07),
        ({"quant_type": "a8w8"}, 0.11),
    ],
)
def test_logits_of_codes_are_near_transformers(settings: dict[str, Any], median: float) -> None:
    """Of the median prompt: rounding may send another one to other experts."""
    got, wanted = logits_and_wanted(LLM(config(CASE, batch_size=8, **settings)), CASE)
    errors = [relative_error(*pair) for pair in zip(got, wanted, strict=True)]
    assert 0 < np.median(errors) < median, errors


@pytest.mark.parametrize("quant_type", ["a8w8", "weight_only_int8"])
def test_compiled_operators_give_the_plain_ones_logits(
    compiled: library.Library, quant_type: str
) -> None:
    got, wanted = (
        logits_and_wanted(
            LLM(config(CASE, batch_size=8, quant_type=quant_type, inference_model=fused)), CASE
        )[0]
        for fused in (True, False)
    )
    # An activation between two codes takes either.
    assert relative_error(got, wanted) < (0.02 if quant_type == "a8w8" else 1e-4)


@pytest.mark.parametrize("absorbs", [True, False])
def test_text_of_codes_is_the_same_in_a_program(tmp_path: Path, absorbs: bool) -> None:
    settings = {"mla_use_matrix_absorption": absorbs, "batch_size": 3}
    prompts = golden(CASE)["prompts"]
    dynamic = greedy(LLM(config(CASE, **settings)), prompts, 16)
    export_model(config(CASE, **settings), tmp_path / "static")
    llm = LLM(config(tmp_path / "static", mode="static", **settings))
    assert greedy(llm, prompts, 16) == dynamic


def test_compressed_tensors_hold_the_same_latents(tmp_path: Path) -> None:
    tensors: Tensors = {
        name.replace(SCALE, "_scale"): value for name, value in stored(GOLDEN / CASE).items()
    }
    ignore = ["lm_head", r"re:.*mlp\.gate$"]
    settings = compressed_tensors.config("a8w8_fp8", block=True, ignore=ignore)
    model = written(tmp_path / "model", GOLDEN / CASE, tensors, settings)
    np.testing.assert_array_equal(logits_of(model), logits_of(GOLDEN / CASE))


# Several columns of blocks; other types beside them.

WIDE = {
    "hidden_size": 320,
    "head_dim": 96,  # 384 rows of queries and 96 of keys, and values of a part's own blocks
    "intermediate_size": 192,
    "moe_intermediate_size": 192,
    "num_local_experts": 5,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}


def wide_experts(folder: Path) -> Path:
    """Layers' matrices in e4m3 of three columns of blocks, each of another size than the next."""
    write_experts(folder, "qwen3_moe", WIDE)
    made: Tensors = {}
    for name, (dtype, values) in stored(folder).items():
        if "_proj" not in name:
            made[name] = dtype, values
            continue
        rows, columns = (np.arange(size) // BLOCK for size in values.shape)
        sizes = np.exp2((rows[:, None] + 2 * columns) % 3 - 1)
        weight = scheme_of("a8w8_fp8").quantize((values * sizes).astype(np.float32), BLOCK)
        made[name] = "F8_E4M3", weight.codes
        made[name + SCALE] = "F32", weight.scale
    write(folder / "model.safetensors", made)
    path = folder / "config.json"
    settings = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    return folder


def as_compressed_tensors(folder: Path, source: Path) -> Path:
    tensors = {name.replace(SCALE, "_scale"): value for name, value in stored(source).items()}
    ignore = ["lm_head", r"re:.*mlp\.gate$"]
    settings = compressed_tensors.config("a8w8_fp8", block=True, ignore=ignore)
    return written(folder, source, tensors, settings)


def joined(values: dict[str, Array], linear: LinearPlan) -> Array:
    return np.concatenate([values[prefix] for prefix in linear.prefixes])


def plain(layout: Any, linear: LinearPlan) -> Array:
    """What the layout's codes stand for, float32."""
    scheme = scheme_of(layout.scheme(linear))
    tensors = scheme.tensors(layout.read(linear), "float32", compiled=None)
    values: Array = scheme.plain(tensors).astype("float32").numpy()
    return values


@pytest.mark.parametrize("kind", ["fp8", "compressed-tensors"])
def test_every_block_has_its_own_scale(tmp_path: Path, kind: str) -> None:
    source = wide_experts(tmp_path / "fp8")
    values = plain_values(stored(source))
    folder = source
    if kind != "fp8":
        folder = as_compressed_tensors(tmp_path / "other", source)
    layout, plan = open_layout(folder)
    linears = list(plan.linears())
    assert {layout.scheme(linear) for linear in linears} == {"a8w8_fp8"}
    assert max(-(-linear.in_features // BLOCK) for linear in linears) == 3
    for linear in linears:
        np.testing.assert_array_equal(plain(layout, linear), joined(values, linear))


@pytest.mark.parametrize(
    ("settings", "experts", "others"),
    [
        ({"scheme": "a8w8_fp8", "expert_scheme": "weight_only_int4"}, "weight_only_int4", None),
        (
            {"expert_scheme": "weight_only_int4", "group_size": 64},
            "weight_only_int4",
            None,
        ),
        ({"expert_scheme": "weight_only_int8"}, "weight_only_int8", None),
        ({"scheme": "a8w8", "expert_scheme": "weight_only_int4"}, "weight_only_int4", "a8w8"),
        ({"scheme": "a8w8", "expert_scheme": "a8w8_fp8"}, None, "a8w8"),
    ],
)
def test_codes_stay_where_flags_ask_for_nothing_else_and_are_rounded_as_values_where_they_do(
    tmp_path: Path, settings: dict[str, Any], experts: str | None, others: str | None
) -> None:
    """None: the codes stay, to the last bit, and so do their scales."""
    folder = wide_experts(tmp_path / "model")
    values = plain_values(stored(folder))
    kept, _ = open_layout(folder)
    layout, plan = open_layout(folder, **settings)
    for linear in plan.linears():
        wanted = experts if linear.is_expert else others
        got = layout.read(linear)
        if wanted is None:
            assert layout.scheme(linear) == "a8w8_fp8"
            weight = kept.read(linear)
        else:
            assert layout.scheme(linear) == wanted
            scheme = scheme_of(wanted)
            weight = scheme.quantize(joined(values, linear), layout.group_size(linear))
        np.testing.assert_array_equal(got.codes, weight.codes, str(linear.prefixes))
        np.testing.assert_array_equal(got.scale, weight.scale, str(linear.prefixes))


@pytest.mark.parametrize("group_size", [-1, 64])
def test_experts_in_4_bits_beside_kept_codes_answer_as_values_that_are_rounded(
    tmp_path: Path, group_size: int
) -> None:
    codes = wide_experts(tmp_path / "codes")
    floats = written(
        tmp_path / "floats",
        codes,
        with_codes_of(stored(codes), re.compile(rf"(?!{EXPERTS.pattern}).*")),
    )
    assert {"F32", "F8_E4M3"} <= {dtype for dtype, _ in stored(floats).values()}
    asked = {"quant_type": "a8w8_fp8_wint4", "weightonly_group_size": group_size}
    got = logits_of(codes, **asked)
    np.testing.assert_array_equal(got, logits_of(floats, **asked))
    assert relative_error(got, logits_of(codes)) > 0.001


def test_stored_experts_of_4_bits_stand_beside_stored_float8(tmp_path: Path) -> None:
    """compressed-tensors with a group of each; flags make the same of float8 alone."""
    source = wide_experts(tmp_path / "float8")
    values = plain_values(stored(source))
    made: Tensors = {}
    for name, value in stored(as_compressed_tensors(tmp_path / "plain", source)).items():
        prefix = name.removesuffix(".weight").removesuffix(".weight_scale")
        if not EXPERTS.fullmatch(prefix):
            made[name] = value
        elif name.endswith(".weight"):
            weight = rounded("weight_only_int4", values[prefix], 64)
            made |= compressed_tensors.linear_tensors("weight_only_int4", prefix, weight)
    ignore = ["lm_head", r"re:.*mlp\.gate$"]
    settings = compressed_tensors.config("a8w8_fp8", block=True, ignore=ignore)
    of_experts = compressed_tensors.config("weight_only_int4", group_size=64)
    group = of_experts["config_groups"]["group_0"] | {"format": of_experts["format"]}
    settings["config_groups"]["group_1"] = group | {"targets": [f"re:{EXPERTS.pattern}"]}
    folder = written(tmp_path / "both", source, made, settings)
    layout, plan = open_layout(folder)
    kinds = {(linear.is_expert, layout.scheme(linear)) for linear in plan.linears()}
    assert kinds == {(True, "weight_only_int4"), (False, "a8w8_fp8")}
    for linear in plan.linears():
        wanted = joined(values, linear)
        if linear.is_expert:
            wanted = values_of_integers(rounded("weight_only_int4", wanted, 64))
        np.testing.assert_allclose(plain(layout, linear), wanted, rtol=1e-6, atol=1e-7)
    by_flags = logits_of(source, quant_type="a8w8_fp8_wint4", weightonly_group_size=64)
    np.testing.assert_allclose(logits_of(folder), by_flags, rtol=1e-5, atol=1e-5)
