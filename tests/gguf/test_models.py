"""Models from GGUF files: the same greedy tokens as from safetensors, with all that flags ask."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from predict import LLM, EngineConfig
from predict.cli.identity import folder_digest
from predict.errors import UserError
from predict.gguf.architectures import ARCHITECTURES as KNOWN
from predict.loading.checkpoint import Checkpoint, checkpoint_digest
from predict.loading.model import read_spec
from predict.nn.decoder import Decoder
from predict.nn.kinds.experts import Experts
from tests.support import tiny
from tests.support.gguf_blocks import KINDS, Types, random_blocks, values_of
from tests.support.gguf_models import (
    ARCHITECTURES,
    add_tensor,
    convert,
    finish,
    gguf_tensors,
    mapped,
    permuted,
    writer_of,
)
from tests.support.golden import CASES, GOLDEN, check_greedy, config, greedy, runs

# Layers with experts and layers without: llama.cpp has no such Qwen, and no converter writes them.
NOT_CONVERTED = ("qwen2_moe_sparse", "qwen3_moe_window")
# A rotary base that grows with the context is in no GGUF, nor DeepSeek rotated in halves.
NOT_ROTATED = ("llama_rope_dynamic", "deepseek_v3_halves", "glm4_moe_lite_types")
# What llama.cpp has for all of the family is not theirs: an experts' limit, a rotary factor.
OTHER_LIMIT = ("gpt_oss_20b", "gpt_oss_mxfp4", "phimoe_42b")
FAMILIES = [
    case
    for case in CASES
    if json.loads((GOLDEN / case / "config.json").read_text())["model_type"] in ARCHITECTURES
    and case not in (*NOT_CONVERTED, *NOT_ROTATED, *OTHER_LIMIT)
]
PROMPTS = [[1], list(range(3, 20)), [5, 6, 7, 100, 9, 11] * 6]
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@pytest.mark.parametrize("case", FAMILIES)
def test_families_give_the_golden_tokens(case: str, tmp_path: Path) -> None:
    path = convert(GOLDEN / case, tmp_path / "x.gguf")
    for max_length, which in runs(case):
        settings = config(str(path), inference_model=True, max_length=max_length)
        check_greedy(LLM(settings), case, which)


def test_gpt_oss_gives_the_tokens_of_its_safetensors(tmp_path: Path) -> None:
    directory = tmp_path / "m"
    shutil.copytree(GOLDEN / "gpt_oss_20b", directory)
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**values, "swiglu_limit": 7.0}))
    wanted = tokens_of(directory)
    assert tokens_of(convert(directory, tmp_path / "x.gguf")) == wanted
    # MXFP4 is of experts' matrices, which keep their codes.
    path = convert(directory, tmp_path / "mxfp4.gguf", Types.MXFP4)
    assert tokens_of(path) == tokens_of(path, inference_model=False)


def test_phimoe_gives_the_tokens_of_its_safetensors(tmp_path: Path) -> None:
    directory = tmp_path / "m"
    shutil.copytree(GOLDEN / "phimoe_42b", directory)
    values = json.loads((directory / "config.json").read_text())
    original, context = values["original_max_position_embeddings"], 256
    factor = (1 + np.log(context / original) / np.log(original)) ** 0.5
    values["rope_scaling"] |= {"short_mscale": factor, "long_mscale": factor}
    # A GGUF file has no jitter: llama.cpp knows the published model's.
    values["router_jitter_noise"] = 0.01
    (directory / "config.json").write_text(json.dumps(values))
    assert tokens_of(convert(directory, tmp_path / "x.gguf")) == tokens_of(directory)


@pytest.mark.parametrize(
    ("case", "add", "said"),
    [
        ("olmo3_7b", lambda w: w.add_float32("olmo2.rope.freq_base_swa", 1e4), "freq_base_swa is"),
        ("olmo3_7b", lambda w: w.add_rope_scaling_yarn_ext_factor(0.5), "yarn_ext_factor is 0.5"),
        ("exaone4_32b", lambda w: w.add_nextn_predict_layers(1), "nextn_predict_layers is 1"),
        ("ministral3_8b", lambda w: w.add_expert_count(8), "mistral3.expert_count is 8"),
        ("ministral3_8b", lambda w: w.add_attn_temperature_length(9), "temperature_length is 9"),
        ("seed_oss_36b", lambda w: w.add_attention_scale(0.5), "attention.scale is 0.5"),
        (
            "hunyuan_7b",
            lambda w: w.add_float32("hunyuan-dense.rope.scaling.alpha", 9.0),
            "alpha is",
        ),
        ("minimax_m2_230b", lambda w: w.add_expert_weights_scale(2.0), "weights_scale is 2.0"),
        ("phimoe_42b", lambda w: w.add_expert_shared_count(2), "expert_shared_count is 2"),
        (
            "granitemoe_3b",
            lambda w: w.add_expert_shared_feed_forward_length(64),
            "shared_feed_forward_length is 64",
        ),
    ],
)
def test_what_a_file_of_a_new_family_says_and_is_not_done_is_refused(
    case: str, add: Any, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        read_spec(convert(GOLDEN / case, tmp_path / "x.gguf", add_tokens=add))


def test_layers_that_draft_are_left_unread(tmp_path: Path) -> None:
    """GLM-4.7-Flash's file has its drafting layer, which the count of layers includes."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(3)
        writer.add_nextn_predict_layers(1)
        writer.add_tensor("blk.2.nextn.eh_proj.weight", np.zeros((32, 64), np.float32))
        writer.add_tensor("blk.2.attn_norm.weight", np.zeros(32, np.float32))

    path = convert(GOLDEN / "glm4_moe_lite_30b", tmp_path / "x.gguf", add_tokens=add)
    assert read_spec(path)[0].num_layers == 2
    assert tokens_of(path) == tokens_of(GOLDEN / "glm4_moe_lite_30b")


def test_older_files_have_the_sizes_of_heads_of_latents_under_their_own_names(
    tmp_path: Path,
) -> None:
    values = json.loads((GOLDEN / "deepseek_v2_lite" / "config.json").read_text())
    path = tmp_path / "x.gguf"
    writer = writer_of(path, values)
    (keys,) = writer.kv_data
    for name in ("key_length", "value_length"):
        keys[f"deepseek2.attention.{name}"] = keys.pop(f"deepseek2.attention.{name}_mla")
    writer.add_tensor("token_embd.weight", np.zeros((211, 32), np.float32))
    finish(writer)
    wanted, _ = read_spec(GOLDEN / "deepseek_v2_lite")
    assert read_spec(path)[0].attention == wanted.attention


def test_each_architecture_has_a_golden_case() -> None:
    families = {
        json.loads((GOLDEN / case / "config.json").read_text())["model_type"]
        for case in (*FAMILIES, *OTHER_LIMIT)
    }
    families |= {  # tests/test_hybrids.py
        *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe"),
    }
    assert {ARCHITECTURES[name] for name in families} == set(KNOWN)


def in_blocks(directory: Path, path: Path, kind: str) -> Path:
    """A model whose layers' matrices are random blocks of a type, in GGUF and in safetensors."""
    tiny.write(directory, {**WIDE, "num_hidden_layers": 1})
    values = json.loads((directory / "config.json").read_text())
    writer = writer_of(path, values)
    writer.add_eos_token_id(values["eos_token_id"])
    held = load_file(directory / "model.safetensors")
    table = gguf.tensor_mapping.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    heads = {"q_proj": values["num_attention_heads"], "k_proj": values["num_key_value_heads"]}
    for seed, (name, tensor) in enumerate(sorted(held.items())):
        if "layers" not in name or tensor.ndim < 2:
            add_tensor(writer, mapped(table, name), tensor, Types.F32)
            continue
        rows, columns = tensor.shape
        blocks = random_blocks(kind, rows, columns, seed)
        held[name] = values_of(blocks, kind)
        linear = name.split(".")[-2]
        if linear in heads:
            blocks = permuted(blocks, heads[linear])
        writer.add_tensor(mapped(table, name), blocks, raw_dtype=Types[kind])
    finish(writer)
    save_file(held, directory / "model.safetensors")
    return path


def tokens_of(model: Path, **settings: Any) -> list[list[int]]:
    values = {"dtype": "float32", "max_length": 96, "inference_model": True, **settings}
    return greedy(LLM(EngineConfig(model_name_or_path=str(model), **values)), PROMPTS, 12)


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_gives_the_tokens_of_its_values(kind: str, tmp_path: Path) -> None:
    path = in_blocks(tmp_path / "m", tmp_path / "x.gguf", kind)
    assert tokens_of(path) == tokens_of(tmp_path / "m")


@pytest.mark.parametrize("inference_model", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_a_quant_type_rounds_the_values(
    kind: str, inference_model: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = in_blocks(tmp_path / "m", tmp_path / "x.gguf", kind)
    settings = {
        "quant_type": "weight_only_int4",
        "weightonly_group_size": 64,
        "inference_model": inference_model,
    }
    with caplog.at_level("INFO", "regatta"):
        rounded = tokens_of(path, **settings)
    assert f"x.gguf: linears: 4 {kind} rounded to weight_only_int4" in caplog.messages
    assert rounded == tokens_of(tmp_path / "m", **settings)


def test_what_became_of_types_is_said_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tiny.write(tmp_path / "m", WIDE)

    def kind_of(name: str) -> Any:
        if name == "blk.1.attn_v.weight":
            return Types.Q6_K
        return Types.Q4_0 if "ffn" in name else Types.Q8_0

    path = convert(directory, tmp_path / "x.gguf", kind_of)
    with caplog.at_level("INFO", "regatta"):
        LLM(str(path), dtype="float16", max_length=64, inference_model=True)
    assert caplog.messages == [
        "x.gguf: linears: 4 Q8_0 kept as weight_only_int8, "
        "4 Q4_0 kept as weight_only_int4, 1 Q6_K+Q8_0 float16",
        "8 linears of weight-only codes round activations to int8 in blocks of 32; "
        "--weight_only_activations float loses less, and reads prompts slower",
    ]


def test_codes_of_the_type_that_is_asked_for_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = in_blocks(tmp_path / "m", tmp_path / "x.gguf", "Q4_K")
    int4 = {"quant_type": "weight_only_int4"}
    with caplog.at_level("INFO", "regatta"):
        for settings in (int4, {**int4, "weightonly_group_size": 32}):
            assert tokens_of(path, **settings) == tokens_of(path)
            assert "x.gguf: linears: 4 Q4_K kept as weight_only_int4" in caplog.messages
            assert not any("second time" in line for line in caplog.messages)
        tokens_of(path, **int4, weightonly_group_size=64)
    assert sum("loses a second time" in line for line in caplog.messages) == 1


def decoder_of(path: Path, **settings: Any) -> Decoder:
    llm = LLM(str(path), dtype="float32", max_length=64, inference_model=True, **settings)
    assert llm.decoder is not None
    return llm.decoder


def scheme_of_head(path: Path, **settings: Any) -> str:
    return decoder_of(path, **settings).head.linear.scheme


def test_an_lm_head_is_kept_or_rounded(tmp_path: Path) -> None:
    path = convert(tiny.write(tmp_path / "m"), tmp_path / "x.gguf", Types.Q8_0)
    assert scheme_of_head(path) == "weight_only_int8"
    assert scheme_of_head(path, lm_head_quant_type="weight_only_int4") == "weight_only_int4"


def test_experts_keep_their_codes(tmp_path: Path) -> None:
    case = "qwen3_moe_30b"
    path = convert(GOLDEN / case, tmp_path / "x.gguf", Types.Q8_0)
    llm = LLM(str(path), dtype="float32", max_length=64, inference_model=True)
    blocks = [block for layer in decoder_of(path).layers for block in layer]
    experts = [block for block in blocks if isinstance(block, Experts)]
    assert {block.gate_up.scheme for block in experts} == {"weight_only_int8"}
    plain = LLM(str(path), dtype="float32", max_length=64, inference_model=False)
    assert greedy(llm, PROMPTS, 8) == greedy(plain, PROMPTS, 8)


def test_a_split_model_is_read_from_its_first_part(tmp_path: Path) -> None:
    directory = tiny.write(tmp_path / "m")
    values = json.loads((directory / "config.json").read_text())
    tensors = gguf_tensors(directory, values)
    (tmp_path / "parts").mkdir()
    halves = [dict(list(tensors.items())[i::2]) for i in range(2)]
    for number, half in enumerate(halves):
        path = tmp_path / "parts" / f"m-{number + 1:05}-of-00002.gguf"
        writer = writer_of(path, values)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(tensors))
        for name, tensor in half.items():
            add_tensor(writer, name, tensor, Types.F32)
        finish(writer)
    wanted = tokens_of(directory)
    assert tokens_of(tmp_path / "parts" / "m-00001-of-00002.gguf") == wanted
    assert tokens_of(tmp_path / "parts") == wanted


def test_an_unknown_architecture_is_refused_with_the_list(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    finish(writer)
    with pytest.raises(UserError, match=r"architecture 'mamba'.*known: llama, .*qwen3moe"):
        read_spec(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.add_head_count(0), "num_attention_heads"),
        (lambda w: w.add_head_count([4, 4, 2]), "attention.head_count is a list of 3"),
        (lambda w: w.add_block_count(100_000), "num_hidden_layers"),
        (lambda w: w.add_layer_norm_rms_eps(float("nan")), "layer_norm_rms_epsilon is nan"),
        (lambda w: w.add_string("llama.embedding_length", "64"), "embedding_length is '64'"),
        (lambda w: w.add_string("llama.rope.scaling.type", "su"), "'none', 'linear', 'yarn'"),
        (lambda w: w.add_value_length(48), "do not go together"),
        (lambda w: w.add_rope_dimension_count(3), "must be even"),
        (lambda w: w.add_causal_attention(False), "llama.attention.causal is False .*True"),
        (lambda w: w.add_attention_scale(0.5), "llama.attention.scale is 0.5 .allowed: none; it"),
        (lambda w: w.add_clamp_kqv(8.0), "llama.attention.clamp_kqv is 8.0"),
        (lambda w: w.add_nextn_predict_layers(1), "llama.nextn_predict_layers is 1"),
        (lambda w: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID), "gating_func is 2"),
        (lambda w: w.add_expert_weights_norm(False), "expert_weights_norm is False"),
    ],
    ids=[
        *(
            "no heads",
            "heads by layer",
            "layers",
            "not a number",
            "a text",
            "rope",
            "values",
            "odd",
        ),
        *("not causal", "scale", "clamp", "drafting layers", "sigmoid", "sums of experts"),
    ],
)
def test_metadata_out_of_range_are_named(change: Any, said: str, tmp_path: Path) -> None:
    values = {**tiny.CONFIG}
    path = tmp_path / "x.gguf"
    writer = writer_of(path, values)
    kept = {key: value for keys in writer.kv_data for key, value in keys.items()}
    writer.kv_data = [{}]
    change(writer)
    writer.kv_data = [{**kept, **writer.kv_data[0]}]
    writer.add_tensor("token_embd.weight", np.zeros((199, 64), np.float32))
    finish(writer)
    with pytest.raises(UserError, match=said):
        read_spec(path)


def test_metadata_that_change_nothing_are_read_over(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = writer_of(path, tiny.CONFIG)
    for key, value in {"logit_scale": 1.0, "attention.clamp_kqv": 0.0}.items():
        writer.add_float32(f"llama.{key}", value)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    writer.add_causal_attention(True)
    writer.add_string("llama.tensor_data_layout", "Meta AI original pth")
    writer.add_uint32("general.unheard_of", 7)
    writer.add_tensor("token_embd.weight", np.zeros((199, 64), np.float32))
    finish(writer)
    assert read_spec(path)[0].num_layers == tiny.CONFIG["num_hidden_layers"]


@pytest.mark.parametrize("name", ["blk.0.ffn_gate.0.weight", "blk.0.ffn_gate_up_exps.weight"])
def test_experts_in_another_form_are_to_be_converted_again(name: str, tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "x.gguf", tiny.CONFIG)
    writer.add_tensor("token_embd.weight", np.zeros((199, 64), np.float32))
    writer.add_tensor(name, np.zeros((96, 64), np.float32))
    finish(writer)
    with pytest.raises(UserError, match=rf"x.gguf has {name}: .*convert the model again"):
        Checkpoint(tmp_path / "x.gguf")


def test_tensors_that_do_not_fit_the_metadata_are_named(tmp_path: Path) -> None:
    convert(tiny.write(tmp_path / "m"), tmp_path / "x.gguf", intermediate_size=64)
    with pytest.raises(UserError, match=r"mlp.gate_proj.weight \[96, 64\] instead of \[64, 64\]"):
        LLM(str(tmp_path / "x.gguf"), dtype="float32", max_length=64)


def test_digests_cover_the_file(tmp_path: Path) -> None:
    path = convert(tiny.write(tmp_path / "m"), tmp_path / "x.gguf")
    before = checkpoint_digest(path), folder_digest(path)
    assert before == (checkpoint_digest(path), folder_digest(path))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert all(a != b for a, b in zip(before, (checkpoint_digest(path), folder_digest(path)),
                                      strict=True))  # fmt: skip


def test_norms_of_gemma_lose_the_one_that_was_added(tmp_path: Path) -> None:
    path = convert(GOLDEN / "gemma_2b", tmp_path / "x.gguf")
    name = "model.layers.0.input_layernorm.weight"
    ours, theirs = Checkpoint(path), Checkpoint(GOLDEN / "gemma_2b")
    np.testing.assert_allclose(
        ours.read_float((name,)),
        (theirs.read(name).astype(np.uint32) << 16).view(np.float32),
        atol=1e-7,
    )
