"""What a checkpoint's network cannot do is refused when it is opened, and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.export_model import export_model
from predict import LLM
from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading.checkpoint import Checkpoint
from predict.loading.model import read_spec
from predict.loading.safetensors_writer import as_stored, write
from predict.models import MISSING
from predict.nn.kinds.attention import AttentionBlock
from predict.nn.rope import rope_table
from predict.nn.spec import DecoderSpec
from tests.support.checkpoints import changed
from tests.support.golden import GOLDEN, check_greedy, config, golden, greedy, runs
from tests.support.schemes import answer


@pytest.mark.parametrize(("case", "positions"), [("gpt2_small", 144), ("opt_125m", 256)])
def test_no_request_may_be_longer_than_the_learned_positions(
    case: str, positions: int, tmp_path: Path
) -> None:
    LLM(config(case, max_length=positions))
    message = f"max_length is {positions + 1}.* {positions} tokens.*--max_length {positions} or"
    with pytest.raises(UserError, match=message):
        LLM(config(case, max_length=positions + 1))
    with pytest.raises(UserError, match=message):
        export_model(config(case, max_length=positions + 1), tmp_path / "export")


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("minicpm_2b", {"num_experts": 8}),
        ("minicpm_2b", {"sparse_config": {"topk": 64}}),
        ("baichuan_7b", {"tie_word_embeddings": True}),
        ("chatglm_2_6b", {"rmsnorm": False}),
        ("chatglm_2_6b", {"post_layer_norm": False}),
        ("chatglm_2_6b", {"original_rope": False}),
        ("chatglm_2_6b", {"pre_seq_len": 128}),
        ("chatglm_2_6b", {"quantization_bit": 4}),
        ("qwen_7b", {"no_bias": False}),
        ("qwen_7b", {"rotary_pct": 0.5}),
        ("qwen_7b", {"intermediate_size": 81}),
        ("phi_2", {"qk_layernorm": True}),
        ("phi_2", {"tie_word_embeddings": True}),
        ("gpt2_small", {"scale_attn_weights": False}),
        ("opt_125m", {"layer_norm_elementwise_affine": False}),
        ("gpt_paddlenlp", {"normalize_before": False}),
        ("gpt_paddlenlp", {"tie_word_embeddings": False}),
        ("ernie_3_5_se", {"hidden_act": "gelu"}),
        ("ernie_3_5_se", {"architectures": ["ErnieModel"]}),
        ("ernie_3_5_se", {"num_hidden_layers": 2}),
        ("gemma3_4b", {"text_config": "gemma3_text"}),
        ("olmoe_7b", {"clip_qkv": 8.0}),
        ("olmoe_7b", {"scoring_func": "tanh"}),
        ("mixtral_8x7b", {"scoring_func": "sigmoid"}),
        ("mixtral_8x7b", {"num_local_experts": 0}),
        ("mixtral_8x7b", {"num_local_experts": 1000}),
        ("mixtral_8x7b", {"hidden_act": "tanh"}),
        ("qwen3_moe_30b", {"mlp_only_layers": [-1]}),
        ("qwen3_moe_30b", {"num_experts_per_tok": "two"}),
        ("glm4_moe_355b", {"scoring_func": "softmax"}),
        ("glm4_moe_355b", {"routed_scaling_factor": -1}),
        ("ernie4_5_moe_21b", {"use_bias": True}),
        ("ernie4_5_moe_21b", {"moe_gate_act": "sigmoid"}),
        ("ernie4_5_moe_21b", {"moe_norm_min": 0.5}),
        ("exaone4_32b", {"attention_bias": True}),
        ("exaone4_32b", {"layer_types": ["full_attention"]}),
        ("glm4_moe_lite_30b", {"topk_method": "greedy"}),
        ("glm4_moe_lite_types", {"mlp_layer_types": ["dense"]}),
        ("glm4_moe_lite_types", {"mlp_layer_types": ["dense", "experts"]}),
        ("hunyuan_7b", {"attention_head_dim": 32}),
        ("hunyuan_7b", {"num_experts": 16}),
        ("hunyuan_7b", {"position_embedding_xdrope": True}),
        ("hunyuan_7b", {"use_cla": True}),
        ("granitemoe_3b", {"mlp_bias": True}),
        ("phimoe_42b", {"num_experts_per_tok": 3}),
        ("phimoe_42b", {"router_jitter_noise": -0.1}),
        ("minimax_m2_230b", {"attn_type_list": [1, 0]}),
        ("minimax_m2_230b", {"layernorm_mlp_beta": 2.0}),
        ("minimax_m2_230b", {"qk_norm_type": "per_head"}),
        ("minimax_m2_230b", {"rotary_dim": 64}),
        ("minimax_m2_230b", {"scoring_func": "softmax"}),
        ("minimax_m2_230b", {"shared_intermediate_size": 64}),
        ("minimax_m2_230b", {"sliding_window": 12}),
        ("ministral3_8b", {"rope_parameters": None}),
        (
            "ministral3_8b",
            {"rope_parameters": {"type": "dynamic", "factor": 2.0, "llama_4_scaling_beta": 0.5}},
        ),
        ("phimoe_42b", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("gpt_oss_20b", {"hidden_act": "gelu"}),
        ("gpt_oss_20b", {"swiglu_limit": 0}),
        ("gpt_oss_20b", {"layer_types": ["full_attention"]}),
    ],
)
def test_config_that_asks_for_what_the_family_does_not_do_is_refused(
    case: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    (key,) = changes
    with pytest.raises(UserError, match=f"'{key}' is "):
        read_spec(changed(case, tmp_path / "model", **changes))


def windows_and_positions(spec: DecoderSpec) -> list[tuple[int, str]]:
    blocks = spec.blocks_of(AttentionBlock)
    return [(block.window, block.positions.kind) for block in blocks]


@pytest.mark.parametrize(
    ("pattern", "full"), [("LLLG", [3]), ("LG", [1, 3]), ("LLG", [2, 3]), ("L", [3]), (3, [2])]
)
def test_windows_of_exaone_go_by_letters_or_by_number(
    pattern: str | int, full: list[int], tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"sliding_window_pattern": pattern, "layer_types": None}
    spec, _ = read_spec(changed("exaone4_32b", tmp_path / "model", **changes))
    kinds = [(-1, "none") if index in full else (12, "rotary") for index in range(4)]
    assert windows_and_positions(spec) == kinds


def test_a_window_that_exaones_config_does_not_name_is_transformers(tmp_path: Path) -> None:
    spec, _ = read_spec(changed("exaone4_32b", tmp_path / "model", sliding_window=None))
    assert windows_and_positions(spec) == [(4096, "rotary")] * 3 + [(-1, "none")]
    # null is none, beside which no layer has one; types say what a pattern of 0 does not.
    path = changed("exaone4_1_2b", tmp_path / "null") / "config.json"
    values = json.loads((GOLDEN / "exaone4_1_2b" / "config.json").read_text())
    path.write_text(json.dumps({**values, "layer_types": ["sliding_attention", "full_attention"]}))
    with pytest.raises(UserError, match="'layer_types' is "):
        read_spec(path.parent)
    spec, _ = read_spec(GOLDEN / "exaone4_1_2b")
    assert windows_and_positions(spec) == [(-1, "rotary")] * 2
    for number, window in enumerate((5, None)):
        folder = changed("exaone4_1_2b", tmp_path / str(number), sliding_window=window)
        assert windows_and_positions(read_spec(folder)[0]) == [(-1, "none")] * 2


@pytest.mark.parametrize("method", [{"rope_type": "default"}, {"type": "linear", "factor": 2.0}])
def test_queries_of_ministral_grow_whatever_scales_positions(
    method: dict[str, Any], tmp_path: Path
) -> None:
    rope = {**method, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16}
    spec, _ = read_spec(changed("ministral3_8b", tmp_path / "model", rope_parameters=rope))
    keys, queries = (rope_table(each, 16, 40, spec.max_position) for each in spec.ropes)
    growth = 1 + 0.5 * np.log1p(np.arange(40) // 16)
    np.testing.assert_allclose(queries, keys * growth[:, None], rtol=1e-6)


def test_letters_that_say_nothing_of_windows_are_refused(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"sliding_window_pattern": "LLGX", "layer_types": None}
    with pytest.raises(UserError, match=r"'sliding_window_pattern' is 'LLGX' .*letters L and G"):
        read_spec(changed("exaone4_32b", tmp_path / "model", **changes))


@pytest.mark.parametrize(
    "scaling",
    [
        {"short_factor": None},
        {"short_factor": [1.0] * 7},
        {"long_factor": [1.0] * 7 + [-1.0]},
        {"long_factor": 2.0},
        {"short_mscale": 1.1},
    ],
)
def test_longrope_with_factors_of_another_kind_is_refused(
    scaling: dict[str, Any], tmp_path: Path
) -> None:
    (key,) = scaling
    given = json.loads((GOLDEN / "phi3_longrope" / "config.json").read_text())["rope_scaling"]
    folder = changed("phi3_longrope", tmp_path / "model", rope_scaling={**given, **scaling})
    with pytest.raises(UserError, match=f"rope_scaling: '{key}'|lacks '{key}'"):
        read_spec(folder)


@pytest.mark.parametrize(
    ("case", "linear"), [("gpt2_small", "attn.c_attn"), ("internlm2_7b", "attention.wqkv")]
)
def test_quantized_matrix_that_is_stored_otherwise_is_refused(
    case: str, linear: str, tmp_path: Path
) -> None:
    quantized = {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False}
    folder = changed(case, tmp_path / "model", quantization_config=quantized)
    checkpoint = Checkpoint(folder)
    tensors = {name: ("F32", to_float32(checkpoint.read(name))) for name in checkpoint.tensors}
    for name in [name for name in tensors if name.endswith(f"{linear}.weight")]:
        del tensors[name]
        tensors[name.replace(".weight", ".qweight")] = ("I32", np.zeros((4, 96), np.int32))
    write(folder / "model.safetensors", tensors)
    with pytest.raises(UserError, match=rf"{linear} is quantized.* in another order"):
        LLM(config(folder, max_length=64))


def stored(folder: Path) -> dict[str, tuple[str, Any]]:
    """The tensors of a checkpoint by the names in its file, as `write` takes them."""
    checkpoint = Checkpoint(folder)
    return {name: (array.dtype, array.read()) for name, array in checkpoint.stored.items()}


@pytest.mark.parametrize("case", ["gemma3_4b", "mistral3_24b"])
def test_text_model_is_found_by_the_names_of_transformers_5(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = changed(case, tmp_path / "model")
    renamed = {
        name.replace("language_model.model.", "model.language_model.")
        .replace("language_model.lm_head.", "lm_head.")
        .replace("vision_tower.", "model.vision_tower."): tensor
        for name, tensor in stored(folder).items()
    }
    write(folder / "model.safetensors", renamed)
    with caplog.at_level("INFO", "regatta"):
        llm = LLM(config(folder, batch_size=3, limit_mm_per_prompt={"image": 0}))
    expected = golden(case)
    assert greedy(llm, expected["prompts"], len(expected["greedy"][0])) == expected["greedy"]
    num_eyes = sum("vision_tower." in name for name in renamed)
    assert f"vision_tower ({num_eyes} tensors) and multi_modal_projector" in caplog.text


def test_tensors_beside_a_text_model_are_not_all_ignored(tmp_path: Path) -> None:
    folder = changed("gemma3_4b", tmp_path / "model")
    extra = {"audio_tower.weight": ("F32", np.zeros((2, 2), np.float32))}
    write(folder / "model.safetensors", stored(folder) | extra)
    with pytest.raises(UserError, match=r"1 unexpected: audio_tower\.weight"):
        LLM(config(folder))


def test_text_model_of_another_family_is_refused(tmp_path: Path) -> None:
    text = json.loads((GOLDEN / "mistral3_24b" / "config.json").read_text())["text_config"]
    folder = changed(
        "mistral3_24b", tmp_path / "model", text_config=text | {"model_type": "mistral4"}
    )
    with pytest.raises(UserError, match=r"'model_type' is 'mistral4' .*: mistral, ministral3"):
        read_spec(folder)


def test_gemma_3_says_of_its_text_model_what_differs_from_the_defaults(tmp_path: Path) -> None:
    """config.json of the published gemma-3-4b-it."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    values = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(values))
    spec, _ = read_spec(tmp_path)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (34, 8, 4, 256)
    assert (spec.vocab_size, spec.max_position) == (262208, 131072)
    assert spec.eos_token_ids == (1, 106)
    assert spec.tie_word_embeddings
    windows = [block.window for block in spec.attention if isinstance(block, AttentionBlock)]
    assert windows[:7] == [1024] * 5 + [-1, 1024]
    assert (spec.ropes[0].theta, spec.ropes[1].theta) == (1e6, 1e4)


@pytest.mark.parametrize("case", ["gpt_paddlenlp", "ernie_3_5_se"])
def test_paddles_pickles_of_its_own_families_are_read(case: str, tmp_path: Path) -> None:
    import paddle

    folder = changed(case, tmp_path / "model")
    params = {
        name: paddle.to_tensor(to_float32(values)) for name, (_, values) in stored(folder).items()
    }
    (folder / "model.safetensors").unlink()
    paddle.save(params, str(folder / "model_state.pdparams"))
    max_length, which = runs(case)[0]
    expected = golden(case)
    llm = LLM(config(folder, batch_size=3, max_length=max_length))
    answers = greedy(llm, expected["prompts"][which], len(expected["greedy"][0]))
    assert answers == expected["greedy"][which]


def test_ernie_whose_matrices_have_other_sizes_is_refused(tmp_path: Path) -> None:
    folder = changed("ernie_3_5_se", tmp_path / "model", intermediate_size=36)
    with pytest.raises(UserError, match=r"self_attn_mlp\.\w+\.weight has the shape .* says"):
        LLM(config(folder))


@pytest.mark.parametrize(
    ("case", "name"), [("gpt_paddlenlp", "gpt-3"), ("ernie_3_5_se", "ernie-3.5-se")]
)
def test_named_family_is_that_of_a_config_without_one(case: str, name: str, tmp_path: Path) -> None:
    folder = changed(case, tmp_path / "model", model_type=None)
    with pytest.raises(
        UserError, match=r"lacks 'model_type'; .* --model_type gpt-3 or ernie-3.5-se"
    ):
        read_spec(folder)
    max_length = runs(case)[0][0]
    settings = {"model_type": name, "max_length": max_length}
    llm = LLM(config(folder, **settings))
    assert llm.spec == read_spec(GOLDEN / case)[0]
    export_model(config(folder, **settings), tmp_path / "export")
    check_greedy(
        LLM(config(tmp_path / "export", mode="static", max_length=max_length, batch_size=3)), case
    )


def test_named_family_does_not_override_the_configs_own() -> None:
    with pytest.raises(UserError, match=r"'model_type' is 'llama' \(allowed: gpt\)"):
        read_spec(GOLDEN / "llama_gqa", "gpt-3")
    assert read_spec(GOLDEN / "llama_gqa", "llama")[0] == read_spec(GOLDEN / "llama_gqa")[0]


@pytest.mark.parametrize("factor", [1.0, -1.0])
def test_a_stored_head_that_differs_from_the_table_is_the_head(
    factor: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = stored(GOLDEN / "qwen2_tied")
    dtype, table = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = (dtype, as_stored(to_float32(table) * np.float32(factor), dtype))
    own = changed("qwen2_tied", tmp_path / "own", tensors)
    answers = answer(own)
    assert ("lm_head.weight is stored and differs" in caplog.text) == (factor != 1.0)
    untied = changed("qwen2_tied", tmp_path / "untied", tensors, tie_word_embeddings=False)
    assert answers == answer(untied)
    assert (answers == answer(GOLDEN / "qwen2_tied")) == (factor == 1.0)


def test_a_tied_head_in_codes_is_no_table(tmp_path: Path) -> None:
    tensors = stored(GOLDEN / "qwen2_tied")
    tensors["lm_head.qweight"] = ("I32", np.zeros((4, 4), np.int32))
    folder = changed("qwen2_tied", tmp_path / "model", tensors)
    with pytest.raises(UserError, match=r"1 missing: lm_head.weight; 1 unexpected: lm_head.qw"):
        answer(folder)


def test_a_head_that_is_missing_is_told_from_one_that_is_the_table(tmp_path: Path) -> None:
    folder = changed("qwen2_tied", tmp_path / "model", tie_word_embeddings=False)
    with pytest.raises(UserError, match=r"lm_head.weight; a model whose head .* true in config"):
        answer(folder)


@pytest.mark.parametrize("family", sorted(MISSING))
def test_a_family_that_is_not_there_is_refused_with_what_is_missing(
    family: str, tmp_path: Path
) -> None:
    folder = changed("llama_gqa", tmp_path / "model", model_type=family)
    with pytest.raises(UserError, match=f"'{family}' is not supported: .* missing here") as error:
        read_spec(folder)
    assert MISSING[family] in str(error.value)


@pytest.mark.parametrize("case", ["qwen3_tied", "ministral3_8b"])
def test_names_may_lack_the_model_they_are_of(case: str, tmp_path: Path) -> None:
    """As Qwen3-Embedding's, whose file has the layers alone."""
    folder = changed(case, tmp_path / "model")
    tensors = {name.removeprefix("model."): held for name, held in stored(folder).items()}
    write(folder / "model.safetensors", tensors)
    check_greedy(LLM(config(folder, batch_size=3)), case)
