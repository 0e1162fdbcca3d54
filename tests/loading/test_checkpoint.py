"""Reading checkpoints: names, shapes and broken files."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from predict.config.quantization import QuantSettings
from predict.errors import UserError
from predict.loading.build import expected_tensors
from predict.loading.checkpoint import Checkpoint, checkpoint_digest
from predict.loading.layouts.online import Online
from predict.loading.model import read_spec
from predict.loading.sources import CheckpointSource, check_sizes
from predict.models import family_of, weight_names
from predict.nn.hf_config import NUMBERS, ROPE_NUMBERS, ConfigReader
from predict.nn.plans import plan_weights
from tests.support import tiny
from tests.support.paths import ROOT


def check(directory: Path) -> None:
    reader = ConfigReader.from_dir(directory)
    plan = plan_weights(family_of(reader).spec(reader), weight_names(reader))
    checkpoint = Checkpoint(directory)
    layout = Online(CheckpointSource(checkpoint), QuantSettings(), plan)
    checkpoint.check(expected_tensors(plan, layout), plan.ignored)


def test_whole_checkpoint_passes(tmp_path: Path) -> None:
    check(tiny.write(tmp_path))


def test_tied_checkpoint_may_still_hold_its_head(tmp_path: Path) -> None:
    tiny.write(tmp_path, {"tie_word_embeddings": True})
    file = tmp_path / "model.safetensors"
    held = load_file(file)
    save_file({**held, "lm_head.weight": held["model.embed_tokens.weight"].copy()}, file)
    check(tmp_path)


def test_missing_unexpected_and_misshaped_tensors_are_listed_together(tmp_path: Path) -> None:
    tiny.write(tmp_path)
    file = tmp_path / "model.safetensors"
    held = load_file(file)
    del held["model.layers.1.mlp.down_proj.weight"]
    held["model.norm.weight"] = held["model.norm.weight"][:-1].copy()
    held["model.extra.weight"] = np.zeros(3, np.float32)
    save_file(held, file)
    with pytest.raises(UserError) as error:
        check(tmp_path)
    message = str(error.value)
    assert "1 missing: model.layers.1.mlp.down_proj.weight" in message
    assert "1 unexpected: model.extra.weight" in message
    assert "model.norm.weight [63] instead of [64]" in message


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    tiny.write(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors is not a whole safetensors file"):
        Checkpoint(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    tiny.write(tmp_path)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"lacks model-00002-of-00002\.safetensors"):
        Checkpoint(tmp_path)


def test_directory_without_weights_names_the_ways_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="load_format dummy"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt9"}, "model_type 'gpt9' is not supported .known: aquila"),
        ({"hidden_size": "64"}, "'hidden_size' is '64' .allowed: a whole number from 1 to 131072"),
        ({"hidden_act": "gelu9"}, "'hidden_act' is 'gelu9' .allowed: silu, swish, gelu"),
        ({"num_attention_heads": 3}, "num_attention_heads 3 is not a multiple of .* 2"),
        ({"rope_scaling": {"rope_type": "magic", "factor": 2.0}}, "rope type 'magic'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0 .allowed: a whole number from 1"),
        ({"head_dim": None, "hidden_size": 1 << 17}, r"131072 over .* 4 is 32768, and head_dim"),
        ({"head_dim": None, "hidden_size": 66}, "is 16.5, and head_dim is not given"),
        ({"head_dim": 33}, "33 of the head_dim 33 dims are rotated"),
        ({"partial_rotary_factor": 0.01}, "0 of the head_dim 32 dims are rotated"),
        ({"rope_scaling": "yarn"}, "'rope_scaling' is 'yarn' .allowed: an object, null"),
        ({"rope_scaling": {"type": ["yarn"]}}, r"'type' is \['yarn'\] .allowed: a text"),
        (
            {"rope_scaling": {"type": "llama3", "high_freq_factor": 1}},
            "'high_freq_factor' is 1.0; it must be above 'low_freq_factor', 1.0",
        ),
        ({"eos_token_id": [2, "3"]}, "'eos_token_id' is .*or a list of at most 1024"),
        ({"eos_token_id": True}, "'eos_token_id' is True"),
        ({"eos_token_id": [1] * 1025}, "'eos_token_id' is .*or a list of at most 1024"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' is 1 .allowed: true, false"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types.* 2 of full_attention and sliding_attention",
        ),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["linear"] * 2},
            "layer_types.* 2 of full_attention and sliding_attention",
        ),
        ({"vocab_size": None}, "lacks 'vocab_size'"),
    ],
)
def test_wrong_config_says_what_is_allowed(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**tiny.CONFIG, **change}))

    with pytest.raises(UserError, match=message):
        read_spec(tmp_path)


TOKENS = ("bos_token_id", "gmask_token_id", "mask_token_id")
CHATGLM = {"model_type": "chatglm", "tie_word_embeddings": False, **dict.fromkeys(TOKENS, 1)}
ROPE_ORIGINAL = "original_max_position_embeddings"
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
OF_QWEN = ("shared_expert_intermediate_size", "decoder_sparse_step", "mlp_only_layers")
OF_GLM = (
    *("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"),
    "num_nextn_predict_layers",
)
OF_DEEPSEEK = (
    *("moe_layer_freq", "q_lora_rank", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
OF_ERNIE = ("moe_layer_start_index", "moe_layer_end_index", "moe_norm_min")
DEEPSEEK = {"num_key_value_heads": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
OF_LFM2 = ("full_attn_idxs", "conv_L_cache", "block_ffn_dim_multiplier")
# Within rope_scaling, read by one family each.
OF_ROPE = {"alpha": ("hunyuan_v1_dense", "dynamic"), "llama_4_scaling_beta": ("ministral3", "yarn")}
OF_ROPE |= dict.fromkeys(("short_mscale", "long_mscale"), ("phimoe", "longrope"))
TOP_LEVEL: dict[str, dict[str, Any]] = {
    **{key: {} for key in NUMBERS if key not in (*ROPE_NUMBERS, *OF_ROPE, ROPE_ORIGINAL)},
    "router_jitter_noise": {"model_type": "phimoe"},
    "sliding_window": {"model_type": "mistral"},
    "max_window_layers": {"model_type": "qwen2", "use_sliding_window": True},
    "layer_norm_eps": {"model_type": "cohere"},
    "sliding_window_pattern": {"model_type": "gemma3_text"},
    "softcap": {"model_type": "gemma2"},
    "n_inner": {"model_type": "gpt2"},
    "ffn_hidden_size": {"model_type": "falcon"},
    "word_embed_proj_dim": {"model_type": "opt"},
    "rope_local_base_freq": {"model_type": "gemma3_text"},
    "multiplier": {"model_type": "granite"},
    "seq_length": {"model_type": "qwen"},
    "norm_eps": {"model_type": "modernbert"},
    **dict.fromkeys(TOKENS, CHATGLM),
    **{key: {"model_type": "qwen2_moe"} for key in (*EXPERTS, *OF_QWEN)},
    **{key: {"model_type": "glm4_moe"} for key in OF_GLM},
    **{key: {"model_type": "ernie4_5_moe"} for key in OF_ERNIE},
    **{key: {**DEEPSEEK, "model_type": "deepseek_v2"} for key in OF_DEEPSEEK},
    **{key: {"model_type": "qwen3_next"} for key in NUMBERS if key.startswith("linear_")},
    "mtp_num_hidden_layers": {"model_type": "qwen3_5_text"},
    "full_attention_interval": {"model_type": "qwen3_next"},
    **{key: {"model_type": "lfm2"} for key in OF_LFM2},
    "downsample_ratio": {"model_type": "internvl"},
}
OF_TOWERS = {
    **dict.fromkeys(("depth", "num_heads", "fullatt_block_indexes"), "qwen2_5_vl"),
    "deepstack_visual_indexes": "qwen3_vl",
}
GOLDENS = {"qwen3_next": "golden_hybrids", "qwen3_5_text": "golden_hybrids"}
GOLDENS |= {"lfm2": "golden_hybrids", "internvl": "golden_images"}
GOLDENS |= dict.fromkeys(OF_TOWERS.values(), "golden_images")


def config_with(key: str, value: Any) -> dict[str, Any]:
    """A config whose family reads this key."""
    if key in OF_TOWERS:
        config = golden_config(OF_TOWERS[key])
        return {**config, "vision_config": {**config["vision_config"], key: value}}
    family, kind = OF_ROPE.get(key, ("llama", "yarn"))
    inner = {"model_type": family, "rope_scaling": {"type": kind, key: value}}
    changes = {**TOP_LEVEL[key], key: value} if key in TOP_LEVEL else inner
    if (of := changes.get("model_type")) in GOLDENS:
        return {**golden_config(of), key: value}
    return {**tiny.CONFIG, "num_experts_per_tok": 2, **changes}


def golden_config(family: str) -> dict[str, Any]:
    config = json.loads((ROOT / "tests" / GOLDENS[family] / family / "config.json").read_text())
    return {key: value for key, value in config.items() if key != "layer_types"}


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, True, "2", [2.5], {}, -2, 1e300, 10**9 * 10**4]
)
def test_every_number_of_a_config_has_a_range(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_with(key, value)))
    with pytest.raises(UserError, match=f"config.json: .*'{key}' is .* .allowed: a"):
        weight_names(read_spec(tmp_path)[1])


@pytest.mark.parametrize("key", NUMBERS)
def test_the_ends_of_a_range_are_within_it_unless_it_says_above(key: str) -> None:
    allowed = NUMBERS[key]
    kind = int if allowed.whole else float
    assert kind(allowed.high) in allowed
    assert (kind(allowed.low) in allowed) is not allowed.above
    assert kind(allowed.high * 2) not in allowed


def test_end_ids_that_the_model_cannot_make_are_left_out(tmp_path: Path) -> None:
    tiny.write(tmp_path, {"eos_token_id": [2, -1, 199, 198]})
    assert read_spec(tmp_path)[0].eos_token_ids == (2, 198)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": 1000},
            "num_hidden_layers is 1000, and the tensors are those of 2 layers;",
        ),
        (
            {"num_hidden_layers": 1},
            "num_hidden_layers is 1, and the tensors are those of 2 layers;",
        ),
        (
            {"vocab_size": 1 << 22},
            r"is \[4194304, 64\], and model.embed_tokens.weight .* \[199, 64\]",
        ),
        ({"hidden_size": 1 << 17}, r"is \[199, 131072\], and model.embed_tokens.weight"),
    ],
)
def test_sizes_are_compared_with_the_tensors_before_anything_is_planned(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    tiny.write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**tiny.CONFIG, **changes}))
    spec, reader = read_spec(tmp_path)
    with pytest.raises(UserError, match=message):
        check_sizes(spec, weight_names(reader), Checkpoint(tmp_path))


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_unreadable_config_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        ConfigReader.from_dir(tmp_path)


def test_both_rope_spellings_give_the_same_spec(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 128}
    old = {"rope_theta": 5e5, "rope_scaling": scaling}
    new = {"rope_parameters": {**scaling, "rope_theta": 5e5}}
    specs = []
    for spelling in (old, new):
        (tmp_path / "config.json").write_text(json.dumps({**tiny.CONFIG, **spelling}))
        reader = ConfigReader.from_dir(tmp_path)
        specs.append(family_of(reader).spec(reader))
    assert specs[0] == specs[1]
    assert specs[0].ropes[0].theta == 5e5


def test_digest_names_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*config.json"):
        checkpoint_digest(tmp_path)
