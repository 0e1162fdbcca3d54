"""Experts in checkpoints: how tensors lie, are rounded, do not fit, or are refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from predict import LLM, EngineConfig
from predict.config.quantization import QuantizationConfig
from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading.build import check_gpu_expert
from predict.loading.checkpoint import Checkpoint
from predict.loading.layouts import compressed_tensors, layout_of, mxfp4, paddlenlp
from predict.loading.layouts._target import Target
from predict.loading.memory import weight_bytes
from predict.loading.model import read_spec
from predict.loading.platform import Platform
from predict.loading.safetensors_writer import write
from predict.loading.sources import CheckpointSource
from predict.models import weight_names
from predict.nn.plans import LinearPlan, WeightPlan, plan_weights
from predict.schemes import Quantized, float_values, scheme_of
from quant.writer import read_tensors
from tests.support import tiny
from tests.support.checkpoints import EXPERT, Tensors, changed, joined, stored
from tests.support.golden import GOLDEN, check_greedy, config
from tests.support.schemes import logits_of, relative_error
from tests.support.stored_layouts import awq_tensors, gptq_tensors, rounded, values_of, with_dtypes


@pytest.mark.parametrize("case", ["mixtral_8x7b", "qwen2_moe_a2_7b", "qwen3_moe_30b", "olmoe_7b"])
def test_experts_of_a_layer_may_be_one_tensor(case: str, tmp_path: Path) -> None:
    folder = changed(case, tmp_path / "model", joined(stored(GOLDEN / case)))
    check_greedy(LLM(config(folder, batch_size=3)), case)


def test_qwens_of_paddlenlp_are_read(tmp_path: Path) -> None:
    """Other names, and every matrix but the table the other way round."""
    case = "qwen2_moe_a2_7b"
    tensors = {
        name.replace("model.", "qwen2_moe."): (
            dtype,
            np.ascontiguousarray(values.T) if "embed" not in name else values,
        )
        for name, (dtype, values) in stored(GOLDEN / case).items()
    }
    check_greedy(LLM(config(changed(case, tmp_path / "model", tensors), batch_size=3)), case)


def drafting_layer() -> Tensors:
    """A layer behind the golden's three, by the names that DeepSeek V3 and GLM 4.5 give it.

    NaN, of no size that a layer has.
    """
    names = (
        *("enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head.norm", "shared_head.head"),
        *("input_layernorm", "post_attention_layernorm", "self_attn.q_a_proj"),
        *("self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", "self_attn.o_proj", "mlp.gate"),
        *("mlp.experts.0.gate_proj", "mlp.experts.11.down_proj", "mlp.shared_experts.up_proj"),
    )
    made: Tensors = {
        f"model.layers.3.{name}.weight": ("BF16", np.full((2, 3), 0x7FC0, np.uint16))
        for name in names
    }
    correction = "F32", np.full(2, np.nan, np.float32)
    return made | {"model.layers.3.mlp.gate.e_score_correction_bias": correction}


@pytest.mark.parametrize("case", ["glm4_moe_355b", "deepseek_v3"])
def test_layers_that_make_drafts_stay_unread_and_one_line_says_so(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    behind = drafting_layer()
    tensors = {n: v for n, v in stored(GOLDEN / case).items() if "layers.3." not in n} | behind
    folder = changed(case, tmp_path / "model", tensors)
    with caplog.at_level("INFO", "regatta"):
        check_greedy(LLM(config(folder, batch_size=3)), case)
    why = "these layers draft tokens, for --speculate_method mtp"
    unread = f"model.layers.3 ({len(behind)} tensors) stay unread"
    assert caplog.messages == [f"{folder}: {unread}; {why}"]
    with pytest.raises(UserError, match=r"num_hidden_layers is 3, .* those of 4 layers"):
        LLM(config(changed(case, tmp_path / "none", tensors, num_nextn_predict_layers=0)))


@pytest.mark.parametrize("case", ["glm4_moe_355b", "deepseek_v3", "deepseek_v3_fp8"])
def test_a_layer_that_config_json_leaves_out_is_none_that_makes_drafts(
    case: str, tmp_path: Path
) -> None:
    count = json.loads((GOLDEN / case / "config.json").read_text())["num_hidden_layers"]
    tensors = {
        name: t for name, t in stored(GOLDEN / case).items() if f"layers.{count}." not in name
    }
    folder = changed(case, tmp_path / "model", tensors, num_hidden_layers=count - 1)
    said = f"num_hidden_layers is {count - 1}, and the tensors are those of {count} layers"
    with pytest.raises(UserError, match=said):
        LLM(config(folder))


@pytest.mark.parametrize("where", ["missing", "num_mtp_layers"])
def test_config_need_not_say_that_deepseek_v3_has_a_layer_of_drafts(
    where: str, tmp_path: Path
) -> None:
    """The second is transformers 5's word for it."""
    case = "deepseek_v3"
    folder = changed(case, tmp_path / "model", stored(GOLDEN / case) | drafting_layer())
    path = folder / "config.json"
    values = json.loads(path.read_text())
    del values["num_nextn_predict_layers"]
    if where != "missing":
        values[where] = 1
    path.write_text(json.dumps(values))
    check_greedy(LLM(config(folder, batch_size=3)), case)


# Refused by name, before anything is read.


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("mixtral_8x7b", {"num_experts": 5, "num_local_experts": 7}),
        ("ernie4_5_moe_21b", {"num_experts_per_tok": 2, "moe_k": 3}),
        ("gpt_oss_20b", {"num_experts_per_tok": 3, "experts_per_token": "3"}),
        ("deepseek_v3", {"n_routed_experts": 12, "num_local_experts": 6}),
    ],
)
def test_two_names_of_one_number_of_experts_must_agree(
    case: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    (first, kept), (second, other) = changes.items()
    said = f"'{second}' is {other!r} .allowed: {kept}, as '{first}' is"
    with pytest.raises(UserError, match=said):
        read_spec(changed(case, tmp_path / "model", **changes))
    read_spec(changed(case, tmp_path / "same", **(changes | {second: kept})))


@pytest.mark.parametrize("case", ["mixtral_8x7b", "gpt_oss_20b", "olmoe_7b", "glm4_moe_355b"])
def test_norms_have_the_familys_epsilon_where_config_json_says_nothing(
    case: str, tmp_path: Path
) -> None:
    spec, _ = read_spec(changed(case, tmp_path / "model", rms_norm_eps=None))
    norms = [block.norm for block in spec.blocks()] + [spec.head.norm]
    assert {norm.epsilon for norm in norms if norm is not None} == {1e-5}


# Of each family: the keys of its numbers of experts and of those that are chosen, and what holds
# the second product of the experts.
OF_FAMILY = {
    "mixtral_8x7b": ("num_local_experts", "num_experts_per_tok", "experts.3.w2.weight"),
    "qwen2_moe_a2_7b": ("num_experts", "num_experts_per_tok", "experts.3.down_proj.weight"),
    "qwen3_moe_30b": ("num_local_experts", "num_experts_per_tok", "experts.3.down_proj.weight"),
    "olmoe_7b": ("num_experts", "num_experts_per_tok", "experts.3.down_proj.weight"),
    "glm4_moe_355b": ("n_routed_experts", "num_experts_per_tok", "experts.3.down_proj.weight"),
    "ernie4_5_moe_21b": ("moe_num_experts", "moe_k", "experts.3.down_proj.weight"),
    "gpt_oss_20b": ("num_local_experts", "num_experts_per_tok", "experts.down_proj"),
    "deepseek_v2": ("n_routed_experts", "num_experts_per_tok", "experts.3.down_proj.weight"),
    "deepseek_v3": ("n_routed_experts", "num_experts_per_tok", "experts.3.down_proj.weight"),
}


def value_of(case: str, key: str) -> Any:
    return json.loads((GOLDEN / case / "config.json").read_text())[key]


@pytest.mark.parametrize("case", list(OF_FAMILY))
def test_numbers_of_experts_that_do_not_fit_are_refused_in_every_family(
    case: str, tmp_path: Path
) -> None:
    count, top_k, _ = OF_FAMILY[case]
    num_experts = value_of(case, count)
    with pytest.raises(UserError, match=r"experts cannot be chosen of the [0-9]+ in"):
        read_spec(changed(case, tmp_path / "chosen", **{top_k: num_experts + 1}))
    # So many more that groups divide them, too.
    more = 2 * num_experts
    said = rf"number of experts is {more}, and the tensors are those of {num_experts};"
    with pytest.raises(UserError, match=said):
        LLM(config(changed(case, tmp_path / "more", None, **{count: more})))
    for key, wrong in ((count, 0), (count, "many"), (top_k, 0), (top_k, -1), (top_k, 1.5)):
        with pytest.raises(UserError, match=f"'{key}' is {wrong!r} .allowed: a"):
            read_spec(changed(case, tmp_path / f"{key}{wrong}", None, **{key: wrong}))


@pytest.mark.parametrize("case", list(OF_FAMILY))
def test_an_unknown_scoring_function_is_refused_in_every_family(case: str, tmp_path: Path) -> None:
    for number, name in enumerate(("tanh", 3, ["softmax"])):
        folder = changed(case, tmp_path / str(number), scoring_func=name)
        with pytest.raises(UserError, match=r"'scoring_func' is .* .allowed: (softmax|sigmoid)"):
            read_spec(folder)


@pytest.mark.parametrize("case", list(OF_FAMILY))
@pytest.mark.parametrize("part", ["experts", "router"])
def test_a_missing_tensor_of_experts_is_named_in_every_family(
    case: str, part: str, tmp_path: Path
) -> None:
    ending = OF_FAMILY[case][2] if part == "experts" else ".gate.weight"
    if case == "gpt_oss_20b" and part == "router":
        ending = "router.weight"
    path = changed(case, tmp_path / "model") / "model.safetensors"
    tensors = read_tensors(path)
    (name,) = (name for name in tensors if "layers.1." in name and name.endswith(ending))
    del tensors[name]
    write(path, tensors)
    wanted = r"experts\.[0-9]+\.down_proj" if case == "gpt_oss_20b" else re.escape(name)
    wanted = re.escape(name) if part == "router" else wanted
    said = f"missing: .*{wanted}"
    if case == "deepseek_v2" and part == "experts":  # one layer alone has any
        said = r"number of experts is 12, and the tensors are those of 11, without 3;"
    with pytest.raises(UserError, match=said):
        LLM(config(tmp_path / "model"))


@pytest.mark.parametrize("case", ["deepseek_v2", "deepseek_v3", "glm4_moe_355b"])
def test_groups_that_contradict_are_refused_in_every_family_with_groups(
    case: str, tmp_path: Path
) -> None:
    method = {"topk_method": "group_limited_greedy"} if case == "deepseek_v2" else {}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"n_group": 5, "topk_group": 1}, "12 experts do not divide into 5 groups"),
        ({"n_group": 4, "topk_group": 5}, "5 groups of 4 cannot be chosen"),
        (
            {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 4},
            "4 experts cannot be chosen of the 3 in 1 of 4 groups",
        ),
    ]
    if case != "deepseek_v2":  # whose groups have one score each
        wrong.append(({"n_group": 12, "topk_group": 4}, ".*need groups of two experts and more"))
    for number, (changes, said) in enumerate(wrong):
        folder = changed(case, tmp_path / str(number), **changes | method)
        with pytest.raises(UserError, match=f"do not go together: {said}"):
            read_spec(folder)


def test_a_tensor_of_absurdly_many_experts_is_not_taken_apart(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    write(tmp_path / "model.safetensors", {name: ("F32", np.zeros((1 << 20, 0), np.float32))})
    assert list(Checkpoint(tmp_path).tensors) == [name]


# Quantized checkpoints.


def quantized(
    folder: Path,
    write_linear: Callable[[str, Any], dict[str, Any]],
    quantization: dict[str, Any],
    case: str = "mixtral_8x7b",
) -> Path:
    """A golden checkpoint whose linears `write_linear` wrote: tensors, or dtypes and tensors."""
    made: Tensors = {}
    for name, (dtype, values) in stored(GOLDEN / case).items():
        prefix = name.removesuffix(".weight")
        if not (EXPERT.fullmatch(name) or prefix.endswith("_proj")):
            made[name] = dtype, values
            continue
        made |= with_dtypes(write_linear(prefix, to_float32(values)))
    return changed(case, folder, made, quantization_config=quantization)


def of_compressed_tensors(scheme: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    def write_linear(prefix: str, values: Any) -> dict[str, Any]:
        weight = scheme_of(scheme).quantize(values, -1)
        return compressed_tensors.linear_tensors(scheme, prefix, weight)

    ignore = ["lm_head", r"re:.*block_sparse_moe\.gate$"]
    return write_linear, compressed_tensors.config(scheme, group_size=-1, ignore=ignore)


def of_fp8(prefix: str, values: Any) -> dict[str, Any]:
    weight = scheme_of("a8w8_fp8").quantize(values, -1)
    return {
        f"{prefix}.weight": ("F8_E4M3", weight.codes),
        f"{prefix}.weight_scale": ("F32", weight.scale[:, None]),
    }


FORMATS: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "gptq": (
        "weight_only_int4",
        lambda prefix, values: gptq_tensors(prefix, rounded("weight_only_int4", values, -1), 4),
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False},
    ),
    "awq": (
        "weight_only_int4",
        lambda prefix, values: awq_tensors(prefix, rounded("weight_only_int4", values, -1)),
        {"quant_method": "awq", "bits": 4, "group_size": -1},
    ),
    "fp8": ("a8w8_fp8", of_fp8, {"quant_method": "fbgemm_fp8"}),
    **{
        f"compressed-tensors {name}": (name, *of_compressed_tensors(name))
        for name in ("weight_only_int8", "weight_only_int4", "a8w8", "a8w8_fp8", "w4a8")
    },
}


@pytest.mark.parametrize("kind", list(FORMATS))
def test_stored_experts_answer_as_those_that_are_rounded_while_read(
    kind: str, tmp_path: Path
) -> None:
    """Every expert is rounded on its own: a scale of theirs depends on no other expert."""
    scheme, write_linear, settings = FORMATS[kind]
    folder = quantized(tmp_path / "stored", write_linear, settings)
    wanted = logits_of(GOLDEN / "mixtral_8x7b", quant_type=scheme)
    np.testing.assert_allclose(logits_of(folder), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", list(FORMATS))
def test_latents_in_float_stand_beside_queries_in_codes(kind: str, tmp_path: Path) -> None:
    """Recipes leave kv_a_proj_with_mqa as it is; one product makes queries and latents."""
    scheme, write_coded, settings = FORMATS[kind]
    floats: dict[str, Any] = {}

    def write_linear(prefix: str, values: Any) -> dict[str, Any]:
        floats[prefix] = values
        if prefix.endswith(".q_proj"):
            made: dict[str, Any] = write_coded(prefix, values)
            return made
        return {f"{prefix}.weight": values}

    folder = quantized(tmp_path / "stored", write_linear, settings, "deepseek_v2_lite")
    layout, plan = layout_and_plan(folder)
    found = [linear for linear in plan.linears() if linear.prefixes[0].endswith(".q_proj")]
    assert len(found) == plan.spec.num_layers
    for linear in found:
        assert layout.scheme(linear) == "dense"
        queries, latents = np.split(layout.read(linear).codes, [linear.part_sizes[0]])
        coded = scheme_of(scheme).quantize(floats[linear.prefixes[0]], -1)
        np.testing.assert_allclose(queries, float_values(scheme, coded), rtol=1e-6)
        (_, stored_latents) = stored(folder)[f"{linear.prefixes[1]}.weight"]
        np.testing.assert_array_equal(latents, to_float32(stored_latents))
    assert relative_error(logits_of(folder), logits_of(GOLDEN / "deepseek_v2_lite")) < 0.5


def test_one_expert_with_biases_is_named(tmp_path: Path) -> None:
    _, write_coded, settings = FORMATS["gptq"]

    def write_linear(prefix: str, values: Any) -> dict[str, Any]:
        made: dict[str, Any] = write_coded(prefix, values)
        if prefix.endswith("experts.1.w1"):
            made[f"{prefix}.bias"] = np.ones(len(values), np.float32)
        return made

    folder = quantized(tmp_path / "stored", write_linear, settings)
    said = r"experts\.1\.w1 has some biases, and the experts before it have none"
    with pytest.raises(UserError, match=said):
        logits_of(folder)


@pytest.mark.parametrize("name", ["block_sparse_moe.gate.bias", "input_layernorm.bias"])
def test_a_bias_that_nothing_adds_is_refused(name: str, tmp_path: Path) -> None:
    """Of a linear, tools write some: zeros go unsaid. A router or a norm has none to begin with."""
    _, write_linear, settings = FORMATS["awq"]
    tensors = stored(quantized(tmp_path / "stored", write_linear, settings))
    tensors["model.layers.0.self_attn.o_proj.bias"] = "F16", np.zeros(64, np.float16)
    fine = changed("mixtral_8x7b", tmp_path / "fine", tensors, quantization_config=settings)
    np.testing.assert_array_equal(logits_of(fine), logits_of(tmp_path / "stored"))
    tensors[f"model.layers.0.{name}"] = "F16", np.zeros(5, np.float16)
    with pytest.raises(UserError, match=rf"1 unexpected: model\.layers\.0\.{re.escape(name)}"):
        LLM(config(changed("mixtral_8x7b", tmp_path / "no", tensors, quantization_config=settings)))
    del tensors[f"model.layers.0.{name}"]
    tensors["model.layers.0.self_attn.o_proj.bias"] = "F16", np.zeros(5, np.float16)
    with pytest.raises(UserError, match=r"o_proj\.bias \[5\] instead of \[64\]"):
        LLM(
            config(changed("mixtral_8x7b", tmp_path / "no2", tensors, quantization_config=settings))
        )


@pytest.mark.parametrize("value", [0, 1])
def test_biases_of_what_latents_become_are_zeros_or_refused(value: int, tmp_path: Path) -> None:
    _, write_linear, settings = FORMATS["compressed-tensors weight_only_int8"]

    def write_queries(prefix: str, values: Any) -> dict[str, Any]:
        is_coded = prefix.endswith("kv_b_proj")
        made: dict[str, Any] = write_linear(prefix, values) if is_coded else {}
        bias = {f"{prefix}.bias": np.full(len(values), value, np.float32)}
        return made | bias if is_coded else {f"{prefix}.weight": values}

    folder = quantized(tmp_path / "stored", write_queries, settings, "deepseek_v2_lite")
    if value:
        with pytest.raises(UserError, match=r"0\.self_attn\.kv_b_proj has biases, and no product"):
            logits_of(folder)
    else:
        assert relative_error(logits_of(folder), logits_of(GOLDEN / "deepseek_v2_lite")) < 0.05


def test_an_expert_that_stands_alone_and_among_all_is_refused(tmp_path: Path) -> None:
    tensors = joined(stored(GOLDEN / "qwen3_moe_30b"))
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    tensors[name] = stored(GOLDEN / "qwen3_moe_30b")[name]
    folder = changed("qwen3_moe_30b", tmp_path / "made", tensors)
    said = r"experts\.0\.down_proj\.weight stands alone and in .*\.experts\.down_proj; keep one"
    with pytest.raises(UserError, match=said):
        LLM(config(folder))


def of_paddlenlp(folder: Path, case: str) -> Path:
    """A golden whose experts and other linears are PaddleNLP's codes, with calibrated scales."""
    act: dict[str, float] = {}
    each: dict[str, list[float]] = {}

    def write_linear(prefix: str, values: Any) -> dict[str, Any]:
        weight = replace(scheme_of("a8w8").quantize(values, -1), act_scale=0.05)
        found = paddlenlp.scale_entries(prefix, weight)
        act.update(found[0])
        each.update(found[1])
        return paddlenlp.linear_tensors(prefix, weight)

    made = quantized(folder, write_linear, {"quant_type": "a8w8"}, case)
    (made / "act_scales.json").write_text(json.dumps(act))
    (made / "weight_scales.json").write_text(json.dumps(each))
    return made


def test_a_shift_of_what_a_router_reads_is_refused(tmp_path: Path) -> None:
    """A norm's bias goes into the linears behind it; the router beside them would miss it."""
    folder = of_paddlenlp(tmp_path / "stored", "qwen2_moe_a2_7b")
    dense = logits_of(GOLDEN / "qwen2_moe_a2_7b")
    assert relative_error(logits_of(folder), dense) < 0.1
    tensors = stored(folder)
    name = "model.layers.1.{}_layernorm.bias"
    tensors[name.format("input")] = "F32", np.zeros(32, np.float32)  # of queries, keys and values
    write(folder / "model.safetensors", tensors)
    assert relative_error(logits_of(folder), dense) < 0.1
    tensors[name.format("post_attention")] = "F32", np.ones(32, np.float32)
    write(folder / "model.safetensors", tensors)
    with pytest.raises(UserError, match=r"1\.post_attention_layernorm\.bias would shift what rout"):
        logits_of(folder)


@pytest.mark.parametrize(
    ("kind", "ending", "dtype"),
    [
        ("gptq", "qweight", "I64"),
        ("gptq", "qzeros", "F32"),
        ("gptq", "scales", "I32"),
        ("awq", "qweight", "I8"),
        ("awq", "qzeros", "F16"),
        ("compressed-tensors weight_only_int4", "weight_packed", "F32"),
        ("compressed-tensors a8w8", "weight", "I32"),
        ("compressed-tensors w4a8", "weight_scale", "I64"),
        ("fp8", "weight_scale", "F8_E4M3"),
        ("mxfp4", "down_proj_blocks", "I8"),
        ("mxfp4", "gate_up_proj_scales", "F32"),
    ],
)
def test_codes_and_scales_of_another_dtype_are_named(
    kind: str, ending: str, dtype: str, tmp_path: Path
) -> None:
    if kind == "mxfp4":
        case, tensors = "gpt_oss_mxfp4", rejoined(stored(GOLDEN / "gpt_oss_mxfp4"))
        name, folder = f"model.layers.0.mlp.experts.{ending}", GOLDEN / case
        shown = re.sub(r"experts\.(\w+_proj)_(\w+)", r"experts.0.\1.\2", name)
    else:
        _, write_linear, settings = FORMATS[kind]
        folder = quantized(tmp_path / "stored", write_linear, settings)
        tensors = stored(folder)
        name = shown = f"model.layers.0.block_sparse_moe.experts.0.w1.{ending}"
    kinds = {"F32": "float32", "F16": "float16", "I64": "int64", "I32": "int32", "I8": "int8"}
    tensors[name] = dtype, tensors[name][1].astype(kinds.get(dtype, "uint8"))
    shutil.copytree(folder, tmp_path / "made")
    write(tmp_path / "made" / "model.safetensors", tensors)
    with pytest.raises(UserError, match=rf"{re.escape(shown)} has dtype {dtype}"):
        LLM(config(tmp_path / "made"))


def test_an_expert_that_calibration_never_reached_has_its_columns_in_order(tmp_path: Path) -> None:
    """GPTQ sorts columns by what it saw; of an expert that saw nothing they stay as they are."""
    generator = np.random.default_rng(0)
    orders: dict[str, Any] = {}
    dense = stored(GOLDEN / "mixtral_8x7b")

    def write_linear(prefix: str, values: Any) -> dict[str, Any]:
        if not prefix.endswith(("w1", "w3")):
            return {f"{prefix}.weight": values}
        size = values.shape[1]
        perm = np.arange(size)
        if "experts.1." not in prefix:  # w1 and w3 read one input, and are sorted alike
            perm = orders.setdefault(prefix[:-1], generator.permutation(size))
        weight, back = rounded("weight_only_int4", values[:, perm], 32), np.argsort(perm)
        dense[f"{prefix}.weight"] = "F32", np.ascontiguousarray(values_of(weight)[:, back])
        in_place = Quantized(weight.codes[:, back], weight.scale, weight.zero)
        group_of = (back // 32).astype(np.int32)
        return {**gptq_tensors(prefix, in_place, 4), f"{prefix}.g_idx": group_of}

    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    folder = quantized(tmp_path / "stored", write_linear, settings)
    wanted = logits_of(changed("mixtral_8x7b", tmp_path / "dense", dense))
    np.testing.assert_allclose(logits_of(folder), wanted, rtol=1e-4, atol=1e-4)
    settings["desc_act"] = False
    with pytest.raises(
        UserError, match=r"experts\.1\.w1 has scales, zero points or an order of col"
    ):
        logits_of(
            changed(
                "mixtral_8x7b", tmp_path / "other", stored(folder), quantization_config=settings
            )
        )


# Schemes of experts alone.


def schemes_of(folder: Path, **settings: Any) -> tuple[set[str], set[str]]:
    """Those of experts, and of the other linears of the layers."""
    layout, plan = layout_and_plan(folder, **settings)
    names: tuple[set[str], set[str]] = set(), set()
    for linear in plan.linears():
        names[not linear.is_expert].add(layout.scheme(linear))
    return names


def layout_and_plan(
    folder: Path, target: Target | None = None, **settings: Any
) -> tuple[Any, WeightPlan]:
    spec, reader = read_spec(folder)
    checkpoint = Checkpoint(folder)
    plan = plan_weights(spec, weight_names(reader))
    source = CheckpointSource(checkpoint)
    asked = QuantizationConfig(**settings).settings
    return layout_of(reader, checkpoint, source, asked, plan, target), plan


@pytest.mark.parametrize(
    ("settings", "experts", "others"),
    [
        ({"quant_type": "wint8"}, "weight_only_int8", "weight_only_int8"),
        ({"quant_type": "a8w8_fp8_wint4"}, "weight_only_int4", "a8w8_fp8"),
        ({"moe_quant_type": "wint4"}, "weight_only_int4", "dense"),
        ({"moe_quant_type": "a8w8_fp8_wint4"}, "weight_only_int4", "dense"),
        ({"quant_type": "a8w8", "moe_quant_type": "w8a16"}, "weight_only_int8", "a8w8"),
    ],
)
def test_experts_may_have_a_scheme_of_their_own(
    settings: dict[str, Any], experts: str, others: str
) -> None:
    assert schemes_of(GOLDEN / "qwen2_moe_a2_7b", **settings) == ({experts}, {others})


@pytest.mark.parametrize(
    ("own", "experts"), [("", "weight_only_int8"), ("wint4", "weight_only_int4")]
)
def test_config_json_may_say_what_experts_become(tmp_path: Path, own: str, experts: str) -> None:
    """As PaddleNLP writes it."""
    asked = {"quant_type": "weight_only_int8", "moe_quant_type": own}
    tensors = stored(GOLDEN / "qwen2_moe_a2_7b")
    folder = changed("qwen2_moe_a2_7b", tmp_path / "made", tensors, quantization_config=asked)
    assert schemes_of(folder) == ({experts}, {"weight_only_int8"})
    with pytest.raises(UserError, match="--moe_quant_type asks for a8w8; leave"):
        schemes_of(folder, moe_quant_type="a8w8")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_type": "a8w8_fp8_wint4"}, "experts are to be weight_only_int4, .* llama has none"),
        ({"moe_quant_type": "wint8"}, "leave --moe_quant_type out"),
        ({"moe_quant_type": "a8w8c8"}, "moe_quant_type a8w8c8 has a static cache"),
    ],
)
def test_schemes_of_experts_that_cannot_be_are_refused(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        LLM(EngineConfig(model_name_or_path=str(tiny.write(tmp_path)), max_length=64, **settings))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_one_expert_that_is_skipped_is_refused_before_any_is_read(
    load_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointSource, "matrix", None)
    monkeypatch.setattr(CheckpointSource, "stored_matrix", None)
    settings = {"quant_type": "wint8", "skip_list_names": ("experts.1.",)}
    said = r"experts\.1\.gate_proj would be dense, and .*experts\.0\.gate_proj weight_only_int8"
    with pytest.raises(UserError, match=said):
        LLM(config("qwen2_moe_a2_7b", load_format=load_format, **settings))


def test_stored_experts_keep_their_scheme(tmp_path: Path) -> None:
    _, write_linear, settings = FORMATS["gptq"]
    folder = quantized(tmp_path / "stored", write_linear, settings)
    with pytest.raises(UserError, match="--moe_quant_type asks for weight_only_int8; leave --moe"):
        LLM(config(folder, moe_quant_type="wint8"))


# MXFP4.


AMPERE = Target("gpu", compiled=True, dtype="bfloat16", capability=(8, 0))  # has no such kernels


def test_mxfp4_is_kept_and_eight_bits_in_groups_of_32_hold_it_exactly() -> None:
    folder = GOLDEN / "gpt_oss_mxfp4"
    floats, plan = layout_and_plan(folder, AMPERE)
    kept, _ = layout_and_plan(folder)
    codes, _ = layout_and_plan(folder, quant_type="wint8", weightonly_group_size=32)
    linears = [linear for linear in plan.linears() if linear.is_expert]
    assert len(linears) == 2 * 7 * plan.spec.num_layers
    scheme = scheme_of("weight_only_mxfp4")
    for linear in linears:
        assert floats.scheme(linear) == "dense"
        assert (kept.scheme(linear), kept.group_size(linear)) == (scheme.NAME, 32)
        wanted, weight = to_float32(floats.read(linear).codes), codes.read(linear)
        np.testing.assert_array_equal(values_of(weight), wanted)
        tensors = scheme.tensors(kept.read(linear), "float32", None)
        np.testing.assert_array_equal(scheme.plain(tensors).numpy(), wanted)
    exact = logits_of(folder, moe_quant_type="wint8", weightonly_group_size=32)
    np.testing.assert_allclose(exact, logits_of(folder), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("target", "settings", "scheme"),
    [
        (Target("cpu", compiled=True, dtype="bfloat16"), {}, "weight_only_mxfp4"),
        (Target("gpu", True, "bfloat16", (9, 0)), {}, "weight_only_mxfp4"),
        (Target("gpu", True, "float16", (9, 0)), {}, "weight_only_mxfp4"),
        (Target("gpu", True, "float32", (9, 0)), {}, "dense"),
        (Target("gpu", True, "bfloat16", (10, 0)), {}, "dense"),
        (AMPERE, {}, "dense"),
        (AMPERE, {"quant_type": "wint8", "moe_quant_type": "mxfp4"}, "weight_only_mxfp4"),
        (Target(), {"lm_head_quant_type": "weight_only_int8"}, "weight_only_mxfp4"),
        (Target(), {"quant_type": "wint4"}, "weight_only_int4"),
    ],
)
def test_mxfp4_is_kept_where_operators_have_it_and_no_flag_asks_for_another(
    target: Target, settings: dict[str, Any], scheme: str
) -> None:
    layout, plan = layout_and_plan(GOLDEN / "gpt_oss_mxfp4", target, **settings)
    experts = {layout.scheme(linear) for linear in plan.linears() if linear.is_expert}
    assert experts == {scheme}


def test_kept_mxfp4_is_counted_at_4_bits() -> None:
    folder = GOLDEN / "gpt_oss_mxfp4"
    (kept, plan), (floats, _) = layout_and_plan(folder), layout_and_plan(folder, AMPERE)
    values = sum(
        linear.out_features * linear.in_features for linear in plan.linears() if linear.is_expert
    )
    saved = weight_bytes(plan, floats.scheme, "bfloat16") - weight_bytes(
        plan, kept.scheme, "bfloat16"
    )
    assert saved == values * 2 - values // 2


def test_mxfp4_is_rounded_as_flags_ask() -> None:
    folder = GOLDEN / "gpt_oss_mxfp4"
    dense = logits_of(folder)
    for settings in ({"quant_type": "wint8"}, {"quant_type": "a8w8_fp8_wint4"}):
        assert 0 < relative_error(logits_of(folder, **settings), dense) < 0.4


def test_mxfp4_scales_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    tensors = rejoined(stored(GOLDEN / "gpt_oss_mxfp4"))
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name][1][3, 2, 1] = mxfp4.NO_NUMBER
    folder = changed("gpt_oss_mxfp4", tmp_path / "model", tensors)
    with pytest.raises(UserError, match=r"experts\.3\.down_proj\.scales hold 1 values that are no"):
        LLM(config(folder))


def rejoined(tensors: Tensors) -> Tensors:
    """gpt-oss's tensors of all experts, of those that the reader shows one by one."""
    endings = {"blocks": "_blocks", "scales": "_scales", "bias": "_bias", "weight": ""}
    made: Tensors = {}
    parts: dict[str, list[Any]] = {}
    for name, (dtype, values) in tensors.items():
        match = re.fullmatch(r"(.*experts)\.[0-9]+\.(\w+)\.(\w+)", name)
        if match is None:
            made[name] = dtype, values
            continue
        whole = f"{match[1]}.{match[2]}{endings[match[3]]}"
        parts.setdefault(whole, []).append(values)
        made[whole] = dtype, np.stack(parts[whole])
    return made


# Memory.


def test_a_model_that_does_not_fit_says_which_quant_type_would(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Experts of 12 features beside 32: most of it are their weights, in 4 bytes each."""
    folder = changed("qwen3_moe_30b", tmp_path / "model", num_local_experts=512)
    (folder / "model.safetensors").unlink()
    asked = {"load_format": "dummy", "max_length": 64}
    monkeypatch.setattr(Platform, "free_bytes", lambda self: 3 << 20)
    said = (
        r"the weights do not fit: they take 4 MiB, .* it fits with --quant_type weight_only_int8 "
        r".1 MiB of weights. or weight_only_int4 .0 MiB of weights. or a8w8 "
    )  # no groups of MXFP4: there are 12 features
    with pytest.raises(UserError, match=said):
        LLM(config(folder, **asked))
    monkeypatch.setattr(Platform, "free_bytes", lambda self: 5 << 18)
    with pytest.raises(UserError, match=r"or w4a8 .0 MiB of weights., each without --moe_quant_ty"):
        LLM(config(folder, **asked, quant_type="weight_only_int4", moe_quant_type="a8w8"))
    monkeypatch.setattr(Platform, "free_bytes", lambda self: 1 << 10)
    with pytest.raises(UserError, match=r"do not fit: .*; no --quant_type makes it fit"):
        LLM(config(folder, **asked))


@pytest.mark.parametrize(("field", "said"), [("act_scale", "static"), ("perm", "act-order")])
def test_an_expert_with_changes_of_its_own_is_refused_on_a_gpu(field: str, said: str) -> None:
    plan = LinearPlan(("mlp.experts.3.down_proj",), (2,), 4, False)
    plain = Quantized(np.zeros((2, 4), np.int8), np.ones(2, np.float32))
    check_gpu_expert(plain, plan)
    with pytest.raises(UserError, match=f"experts.3.down_proj has .*{said}.*--device cpu"):
        check_gpu_expert(replace(plain, **cast("dict[str, Any]", {field: np.ones(4)})), plan)
