"""GGUF files of golden and tiny checkpoints, written as llama.cpp's converter writes them.

Names of tensors are those of the gguf package's own table, keys those of its writer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.tensor_mapping import get_tensor_name_map

from predict.loading.checkpoint import Checkpoint
from tests.support.gguf_blocks import Types, random_blocks

Array = npt.NDArray[Any]
# By model_type: ggml's architecture.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi": "phi2",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "granite": "granite",
    "minicpm": "minicpm",
    "cohere": "command-r",
    "ernie4_5": "ernie4_5",
    "glm4": "glm4",
    "internlm2": "internlm2",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "olmo3": "olmo2",
    "exaone4": "exaone4",
    "ministral3": "mistral3",
    "mistral3": "mistral3",
    "seed_oss": "seed_oss",
    "hunyuan_v1_dense": "hunyuan-dense",
    "minimax_m2": "minimax-m2",
    "phimoe": "phimoe",
    "granitemoe": "granitemoe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
}
PERMUTED = ("llama", "granite", "minicpm", "internlm2", "mistral3", "granitemoe")
OF_EYES = ("vision_tower.", "multi_modal_projector.")
PLUS_ONE = ("gemma", "gemma2", "gemma3")
DELTA_NETS = ("qwen3next", "qwen35", "qwen35moe")
WITH_STATES = (*DELTA_NETS, "lfm2", "lfm2moe")
LAYER_NORM = ("phi2", "starcoder2", "stablelm", "command-r")
EXPERT = re.compile(r"(model\.layers\.\d+\.)(.*\.experts)\.(\d+)\.(.*)\.(weight|bias)")


def read_tensors(directory: Path) -> dict[str, Array]:
    """The directory's tensors of text in float32, experts' one by one."""
    checkpoint = Checkpoint(directory)
    return {
        name.replace("language_model.model.", "model.").replace("language_model.lm", "lm"):
            checkpoint.read_float((name,))
        for name in checkpoint.tensors if not name.startswith(OF_EYES)
    }  # fmt: skip


def as_float32(values: Array) -> npt.NDArray[np.float32]:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def permuted(values: Array, heads: int) -> Array:
    """Rows of each head's halves in turns, as llama.cpp rotates them."""
    shape = (heads, 2, len(values) // heads // 2, *values.shape[1:])
    return values.reshape(shape).swapaxes(1, 2).reshape(values.shape)


def gguf_tensors(directory: Path, config: Mapping[str, Any]) -> dict[str, Array]:
    """The tensors by GGUF's names, as the converter of the architecture changes them."""
    arch = ARCHITECTURES[config["model_type"]]
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = get_tensor_name_map(number, config["num_hidden_layers"])
    heads = config["num_attention_heads"]
    keys = config.get("num_key_value_heads") or heads
    rows = config.get("qk_nope_head_dim", 0)
    made: dict[str, Array] = {}
    stacked: dict[str, dict[int, Array]] = {}  # parts by their number
    drafting = f"model.layers.{config['num_hidden_layers']}."  # what makes drafts stays behind
    tensors = {
        name: as_float32(held)
        for name, held in read_tensors(directory).items()
        if not name.startswith(drafting)
    }
    if arch in WITH_STATES:
        tensors = of_states(tensors, config)
    for name, values in with_parts(tensors, heads, keys, rows).items():
        if arch in PERMUTED and re.search(r"[qk]_proj\.", name):
            values = permuted(values, heads if ".q_proj" in name else keys)
        if arch in PLUS_ONE and name.endswith("norm.weight"):
            values = values + 1
        found = EXPERT.fullmatch(name)
        if found:
            layer, where, number_of, linear, ending = found.groups()
            stacked.setdefault(f"{layer}{where}.{linear}.{ending}", {})[int(number_of)] = values
            continue
        if name.endswith("shared_expert_gate.weight"):
            values = values.reshape(-1)
        head = re.fullmatch(r"(.*_layernorm)\.norms\.(\d+)(\.weight)", name)
        if head:
            stacked.setdefault(head[1] + head[3], {})[int(head[2])] = values
            continue
        made[name] = values
    for name, parts in stacked.items():
        if arch == "lfm2moe":
            name = name.removeprefix("model.")
        made[name] = np.stack([parts[i] for i in sorted(parts)])
    return {mapped(table, name): values for name, values in made.items()}


def of_states(tensors: dict[str, Array], config: Mapping[str, Any]) -> dict[str, Array]:
    """Of networks with states what the converter has for their tensors."""
    made: dict[str, Array] = {}
    key_heads = config.get("linear_num_key_heads", 1)
    heads = config.get("linear_num_value_heads", 1)
    dims = [config.get(f"linear_{each}_head_dim", 1) for each in ("key", "value")]
    group, is_qwen = heads // key_heads, config["model_type"].startswith("qwen")

    def tiled(rows: Array, dim: int) -> Array:
        """The heads of a group `key_heads` apart, of value heads alone."""
        if config["model_type"] == "qwen3_next":
            return rows
        parts = rows.reshape(key_heads, group, dim, *rows.shape[1:])
        return parts.swapaxes(0, 1).reshape(rows.shape)

    for name, values in tensors.items():
        if "conv1d." in name or "conv.conv." in name:
            values = values.squeeze(1) if values.ndim > 2 else values
        if name.endswith("norm.weight") and is_qwen and "linear_attn.norm" not in name:
            values = values + 1
        if "in_proj_qkvz" in name:
            parts = values.reshape(key_heads, -1, values.shape[-1])
            ends = np.cumsum([dims[0], dims[0], group * dims[1]])
            q, k, v, z = (part.reshape(-1, values.shape[-1]) for part in np.split(parts, ends, 1))
            made[name.replace("qkvz", "qkv")] = np.concatenate([q, k, v])
            made[name.replace("qkvz", "z")] = z
            continue
        if "in_proj_qkv." in name or "conv1d." in name:
            keys, rows = np.split(values, [2 * key_heads * dims[0]])
            values = np.concatenate([keys, tiled(rows, dims[1])])
        elif "in_proj_z." in name:
            values = tiled(values, dims[1])
        elif re.search(r"linear_attn\.(in_proj_[ab]\.|A_log|dt_bias)", name):
            values = tiled(values, 1)
        elif "linear_attn.out_proj" in name:
            values = tiled(values.T, dims[1]).T
        if name.endswith("A_log"):
            values = -np.exp(values)
        made[name.replace("dt_bias", "dt_proj.bias").replace("expert_bias", "expert_bias.bias")] = (
            values
        )
    return made


def add_states(writer: gguf.GGUFWriter, arch: str, config: Mapping[str, Any]) -> None:
    """Keys of networks with states."""
    if arch in DELTA_NETS:
        heads = config["linear_num_value_heads"]
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * heads)
        writer.add_full_attention_interval(4)
        if arch != "qwen35":
            shared = config["shared_expert_intermediate_size"]
            writer.add_expert_shared_feed_forward_length(shared)
        if arch == "qwen3next":
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        return
    keys = config["num_key_value_heads"]
    full = [kind == "full_attention" for kind in config["layer_types"]]
    writer.add_head_count_kv([keys * each for each in full])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    if arch == "lfm2moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
    else:
        size = int(2 * config["intermediate_size"] / 3)
        multiple = config["block_multiple_of"]
        writer.add_feed_forward_length(-(-size // multiple) * multiple)


def with_parts(
    tensors: dict[str, Array], heads: int, keys: int, head_rows: int = 0
) -> dict[str, Array]:
    """InternLM 2's queries, keys and values apart, under Llama's names; gpt-oss' gate and up."""
    made: dict[str, Array] = {}
    for name, values in tensors.items():
        if "experts" in name and "gate_up_proj" in name:
            halves = [values[..., start::2].T for start in range(2)]  # gpt-oss'
            if "block_sparse_moe" in name:
                halves = np.split(values, 2)
            for half, part in zip(halves, ("gate_proj", "up_proj"), strict=True):
                made[as_default(name).replace("gate_up_proj", part)] = half
            continue
        if "sinks" in name:
            made[name + ".weight"] = values
            continue
        if "e_score_correction_bias" in name:
            made[name.replace("e_score_correction_bias", "e_score_correction.bias")] = values
            continue
        if "kv_b_proj" in name:
            both = values.reshape(heads, -1, values.shape[-1])
            keys_b, values_b = both[:, :head_rows], both[:, head_rows:]
            made[name.replace("kv_b_proj", "k_b_proj")] = keys_b.swapaxes(1, 2)
            made[name.replace("kv_b_proj", "v_b_proj")] = values_b
            continue
        if "wqkv" not in name:
            made[as_default(name)] = values.T if is_turned(name, tensors) else values
            continue
        layer = name.removesuffix("attention.wqkv.weight") + "self_attn."
        groups = values.reshape(keys, heads // keys + 2, -1, values.shape[-1])
        for part, rows in (("q", groups[:, :-2]), ("k", groups[:, -2]), ("v", groups[:, -1])):
            made[f"{layer}{part}_proj.weight"] = rows.reshape(-1, values.shape[-1])
    return made


def as_default(name: str) -> str:
    """GraniteMoe's experts under the names that most families' have."""
    return re.sub(r"block_sparse_moe(\.experts\.\d+\.(gate_up|down)_proj)", r"mlp\1", name)


def is_turned(name: str, tensors: Mapping[str, Array]) -> bool:
    """Whether a matrix of gpt-oss lies as [in, out]."""
    joined = name.replace("down_proj", "gate_up_proj")
    return "mlp.experts" in name and name.endswith("down_proj.weight") and joined in tensors


def mapped(table: Any, name: str) -> str:
    found = table.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return str(found)


def writer_of(path: Path, config: Mapping[str, Any]) -> gguf.GGUFWriter:
    """A writer with the metadata of the network; tokens and tensors are the caller's."""
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    if arch == "deepseek2":
        return latent_writer(writer, config)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    if config["model_type"] not in ("lfm2", "qwen3_5_moe_text"):  # of which the latter have none
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    if arch not in ("lfm2", "lfm2moe"):
        writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    partial = config.get("partial_rotary_factor", rope_of(config).get("partial_rotary_factor"))
    if config.get("rotary_dim"):
        partial = config["rotary_dim"] / head_dim
    if partial is None:
        partial = {"phi": 0.5, "stablelm": 0.25, "glm4": 0.5}.get(config["model_type"], 1.0)
    writer.add_rope_dimension_count(int(head_dim * partial))
    epsilon = config.get("layer_norm_eps") or config.get("norm_epsilon")
    if arch in LAYER_NORM:
        writer.add_layer_norm_eps(epsilon or 1e-5)
    elif "norm_eps" not in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    add_rope(writer, config)
    add_family(writer, arch, config)
    if arch in WITH_STATES:
        add_states(writer, arch, config)
    return writer


def latent_writer(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> gguf.GGUFWriter:
    """The metadata of a network with latent attention, whose sizes are those of heads."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rotated = config["qk_rope_head_dim"]
    writer.add_rope_dimension_count(rotated)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["kv_lora_rank"] + rotated)
    writer.add_value_length(config["kv_lora_rank"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_count(config.get("n_routed_experts") or config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config.get("first_k_dense_replace", 0))
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    is_third = config["model_type"] in ("deepseek_v3", "glm4_moe_lite")
    if config["model_type"] != "glm4_moe_lite":  # which does not say how its router scores
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType(2 if is_third else 1))
    if is_third or config.get("topk_method") == "group_limited_greedy":
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    add_rope(writer, config)
    scaling = rope_of(config)
    if scaling.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])
    return writer


def rope_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary settings of layers without a window, as transformers 5 has them."""
    rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta", 10000.0), **rope.get("full_attention", rope)}


def add_rope(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    scaling = rope_of(config)
    kind = scaling.get("rope_type", scaling.get("type"))
    if "alpha" not in scaling:
        writer.add_rope_freq_base(scaling["rope_theta"])
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(
            scaling.get("original_max_position_embeddings", config["max_position_embeddings"])
        )
        if "attention_factor" in scaling:
            writer.add_rope_scaling_yarn_attn_factor(scaling["attention_factor"])
    if "alpha" in scaling:  # Hunyuan's "dynamic", which has one base
        dim = config["head_dim"]
        writer.add_rope_freq_base(scaling["rope_theta"] * scaling["alpha"] ** (dim / (dim - 2)))
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if kind == "longrope":
        original, context = (config[f"{name}max_position_embeddings"] for name in ("original_", ""))
        writer.add_rope_scaling_orig_ctx_len(original)
        longer = context / original
        writer.add_rope_scaling_attn_factors(
            math.sqrt(1 + math.log(longer) / math.log(original)) if longer > 1 else 1.0
        )


def add_family(writer: gguf.GGUFWriter, arch: str, config: Mapping[str, Any]) -> None:
    """Keys of single architectures."""
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts and experts > 1:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if arch in ("gpt-oss", "minimax-m2"):
            writer.add_expert_feed_forward_length(config["intermediate_size"])
        if arch.endswith("moe") and arch not in ("olmoe", "phimoe", "granitemoe"):
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if arch in ("gemma2", "gemma3"):
        writer.add_sliding_window(config["sliding_window"])
        writer.add_attention_scale(config["query_pre_attn_scalar"] ** -0.5)
        for key, add in (
            ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
            ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ):
            if config.get(key) or arch == "gemma2":
                add(config.get(key) or 0.0)
    if arch in ("gemma2", "gemma3", "olmo2", "exaone4") and config.get("sliding_window"):
        pattern = config.get("sliding_window_pattern")
        if config.get("layer_types"):
            pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
        if pattern:
            writer.add_sliding_window_pattern(pattern)
    windowed = ("llama", "phi3", "starcoder2", "gpt-oss", "olmo2", "exaone4", "phimoe")
    if arch in windowed and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if arch == "stablelm":
        writer.add_parallel_residual(config.get("use_parallel_residual", False))
    if arch == "minimax-m2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch == "mistral3":
        scaling = rope_of(config)
        if "llama_4_scaling_beta" in scaling:
            writer.add_rope_scaling_yarn_log_mul(scaling["mscale_all_dim"])
            writer.add_attn_temperature_scale(scaling["llama_4_scaling_beta"])
    if arch in ("granite", "granitemoe"):
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if arch == "minicpm":
        writer.add_embedding_scale(config["scale_emb"])
        writer.add_residual_scale(config["scale_depth"] / math.sqrt(config["num_hidden_layers"]))
        writer.add_logit_scale(config["hidden_size"] / config["dim_model_base"])
    if arch == "command-r":
        writer.add_logit_scale(config["logit_scale"])


def small_tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    """Factors of rotary frequencies: Phi 3's, or as Llama 3's converter makes them."""
    scaling = rope_of(config)
    if scaling.get("rope_type", scaling.get("type")) == "longrope":
        yield "rope_factors_long.weight", np.array(scaling["long_factor"], np.float32)
        yield "rope_factors_short.weight", np.array(scaling["short_factor"], np.float32)
    if scaling.get("rope_type") != "llama3":
        return
    dim, theta = config["head_dim"], scaling["rope_theta"]
    low = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
    high = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
    factors = []
    for i in range(0, dim, 2):
        length = 2 * math.pi * theta ** (i / dim)
        if length < high:
            factors.append(1.0)
        elif length > low:
            factors.append(scaling["factor"])
        else:
            smooth = (
                scaling["original_max_position_embeddings"] / length - scaling["low_freq_factor"]
            ) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    yield "rope_freqs.weight", np.array(factors, np.float32)


def add_tensor(writer: gguf.GGUFWriter, name: str, values: Array, kind: Types) -> None:
    """Adds a tensor, matrices whose rows are whole blocks of the type in that type."""
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if values.ndim < 2 or values.shape[-1] % block or "norm" in name or "ffn_gate_inp" in name:
        kind = Types.F32
    if kind is Types.Q6_K:  # which the package reads and does not make
        made = random_blocks(kind.name, *values.shape)
    else:
        made = gguf.quants.quantize(np.ascontiguousarray(values, np.float32), kind)
    writer.add_tensor(name, made, raw_dtype=kind)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert(
    directory: Path,
    path: Path,
    kind: Types | Callable[[str], Types] = Types.F32,
    add_tokens: Callable[[gguf.GGUFWriter], None] | None = None,
    **changes: Any,
) -> Path:
    """Writes the directory's checkpoint as GGUF.

    kind: of all matrices, or by their name. add_tokens: its tokenizer. changes: of config.json.
    """
    config = json.loads((directory / "config.json").read_text())
    config = {**config.get("text_config", config), "model_type": config["model_type"], **changes}
    writer = writer_of(path, config)
    if add_tokens is not None:
        add_tokens(writer)
    elif isinstance(config.get("eos_token_id"), int):
        writer.add_eos_token_id(config["eos_token_id"])
    for name, values in (*gguf_tensors(directory, config).items(), *small_tensors(config)):
        add_tensor(writer, name, values, kind(name) if callable(kind) else kind)
    finish(writer)
    return path
