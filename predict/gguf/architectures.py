"""What GGUF files call models: one table, from llama.cpp's names to config.json and its tensors.

A row says which of our families an architecture is, what its tensors are called there beside
what most are called, and how llama.cpp's converter changed values: rows of queries and keys in
neighbouring pairs (`permuted`), norms with 1 added (`plus_one`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from predict.errors import UserError
from predict.gguf.metadata import GgufMetadata
from predict.gguf.rope import scaling_of, yarn_mscale

ConfigValues = dict[str, Any]
# What tensors are called in most families, without ".weight" and ".bias": in the file, to us.
TENSORS: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_TENSORS: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    # Experts are found by these names in every family, whatever its own are.
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Of layers with a state, and others of the same networks.
DELTA_NET: Mapping[str, str] = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
}
SHORT_CONV: Mapping[str, str] = {
    "token_embd_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.{expert}.w1",
    "ffn_up_exps": "feed_forward.experts.{expert}.w3",
    "ffn_down_exps": "feed_forward.experts.{expert}.w2",
    "exp_probs_b": "feed_forward.expert_bias",
}
# Read into config.json, or of no use: cos and sin are made here.
UNREAD = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
NORMS_AROUND = {**NORMS_BEHIND, "ffn_norm": "pre_feedforward_layernorm"}
FUSED_GATE_UP = {"ffn_up": "mlp.gate_up_proj"}
GEMMA_LOCAL_BASE = 10000.0
# What newer files have in place of one matrix, kv_b_proj: [heads, latent, key] and [heads, value,
# latent].
KEYS_OF_LATENTS, VALUES_OF_LATENTS = "self_attn.k_b_proj", "self_attn.v_b_proj"
SOFTMAX, SIGMOID = 1, 2  # of a router's scores
TEMPERATURE = "{arch}.attention.temperature_scale"
CORRECTION = re.compile(r"blk\.[0-9]+\.exp_probs_b\.bias")
V3_EXPERTS = 256  # of DeepSeek V3, whose older files do not say that they are in groups
# Layers of the models whose scores llama.cpp scales by the width of the hidden states.
GEMMA2_27B, GEMMA3_27B = 46, 62


@dataclass(frozen=True)
class Architecture:
    """A row of the table."""

    model_type: str | Callable[[GgufMetadata], str]
    config: Callable[[GgufMetadata], ConfigValues] = lambda data: {}
    tensors: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    plus_one: bool = False
    latent: bool = False  # keys and values of latents: sizes of heads are the row's to tell
    layer_norm: bool = False  # with a mean, and an epsilon of its own name
    drafting: str = "model.layers."  # what names of layers behind the last one begin with

    def family(self, data: GgufMetadata) -> str:
        return self.model_type if isinstance(self.model_type, str) else self.model_type(data)

    def names(self) -> Mapping[str, str]:
        """What a layer's tensors are called, in the file and to us."""
        return {**LAYER_TENSORS, **self.tensors}


def _llama_family(data: GgufMetadata) -> str:
    if data.whole("{arch}.expert_count", 0):
        return "mixtral"
    return "mistral" if data.whole("{arch}.attention.sliding_window", 0) else "llama"


def _llama(data: GgufMetadata) -> ConfigValues:
    data.must_be("{arch}.expert_weights_norm", (True,))
    return {**_biases(data), **_experts(data)}


def _with_biases(data: GgufMetadata) -> ConfigValues:
    return {"attention_bias": data.has_tensor("blk.0.attn_q.bias")}


def _biases(data: GgufMetadata) -> ConfigValues:
    return {**_with_biases(data), "mlp_bias": data.has_tensor("blk.0.ffn_up.bias")}


def _experts(data: GgufMetadata) -> ConfigValues:
    """Of families whose experts are as wide as config.json's intermediate_size says."""
    size = data.whole("{arch}.feed_forward_length")
    data.must_be("{arch}.expert_feed_forward_length", (size,))
    return {
        "num_local_experts": data.optional("{arch}.expert_count"),
        "num_experts_per_tok": data.optional("{arch}.expert_used_count"),
    }


def _olmoe(data: GgufMetadata, renormalize: bool = False) -> ConfigValues:
    return {
        "num_experts": data.whole("{arch}.expert_count"),
        "num_experts_per_tok": data.whole("{arch}.expert_used_count"),
        "norm_topk_prob": data.flag("{arch}.expert_weights_norm", renormalize),
    }


def _qwen_moe(data: GgufMetadata, renormalize: bool = False) -> ConfigValues:
    shared = data.optional("{arch}.expert_shared_feed_forward_length")
    return {
        **_olmoe(data, renormalize),
        "moe_intermediate_size": data.whole("{arch}.expert_feed_forward_length"),
        "shared_expert_intermediate_size": shared,
    }


def _windows(data: GgufMetadata) -> ConfigValues:
    """Which layers have a window, where the file says so: a list, or every how many have none."""
    key = "{arch}.attention.sliding_window_pattern"
    value = data.file.metadata.get(data.key(key))
    if value is None:
        return {}
    if isinstance(value, int):
        return {"sliding_window_pattern": data.whole(key)}
    kinds = ("full_attention", "sliding_attention")
    return {"layer_types": [kinds[bool(each)] for each in data.numbers(key)]}


def _gemma2(data: GgufMetadata) -> ConfigValues:
    return {
        **_windows(data),
        **_gemma_scores(data, GEMMA2_27B),
        "attn_logit_softcapping": data.real("{arch}.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": data.real("{arch}.final_logit_softcapping", 30.0),
        "sliding_window": data.whole("{arch}.attention.sliding_window", 4096),
    }


def _gemma3(data: GgufMetadata) -> ConfigValues:
    return {
        **_windows(data),
        **_gemma_scores(data, GEMMA3_27B),
        "final_logit_softcapping": data.real("{arch}.final_logit_softcapping", 0.0),
        "sliding_window": data.whole("{arch}.attention.sliding_window", 4096),
        "rope_local_base_freq": data.real("{arch}.rope.freq_base_swa", GEMMA_LOCAL_BASE),
        "rope_theta": data.real("{arch}.rope.freq_base", 1e6),
    }


def _gemma_scores(data: GgufMetadata, layers: int) -> ConfigValues:
    """The square of what scores are divided by, which most files leave to llama.cpp's code."""
    scale = data.real("{arch}.attention.scale", 0.0)
    if scale > 0:
        return {"query_pre_attn_scalar": scale**-2}
    heads = data.whole("{arch}.attention.head_count")
    width = data.whole("{arch}.embedding_length") / max(heads, 1)
    is_wide = data.whole("{arch}.block_count") == layers
    return {
        "query_pre_attn_scalar": width if is_wide else data.whole("{arch}.attention.key_length")
    }


def _phi3(data: GgufMetadata) -> ConfigValues:
    return {
        "original_max_position_embeddings": data.whole(
            "{arch}.rope.scaling.original_context_length", data.whole("{arch}.context_length")
        ),
    }


def _use_bias(data: GgufMetadata) -> ConfigValues:
    return {"use_bias": data.has_tensor("blk.0.attn_q.bias")}


def _stablelm(data: GgufMetadata) -> ConfigValues:
    return {
        "use_parallel_residual": data.flag("{arch}.use_parallel_residual", False)
        or not data.has_tensor("blk.0.ffn_norm.weight"),
        "use_qkv_bias": data.has_tensor("blk.0.attn_q.bias"),
        "qk_layernorm": data.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _granite(data: GgufMetadata) -> ConfigValues:
    return {
        **_biases(data),
        "embedding_multiplier": data.real("{arch}.embedding_scale"),
        "residual_multiplier": data.real("{arch}.residual_scale"),
        "attention_multiplier": data.real("{arch}.attention.scale"),
        "logits_scaling": data.real("{arch}.logit_scale"),
    }


def _minicpm(data: GgufMetadata) -> ConfigValues:
    depth = math.sqrt(max(data.whole("{arch}.block_count"), 1))
    width = data.whole("{arch}.embedding_length")
    scale = data.real("{arch}.logit_scale")
    if scale <= 0:
        raise UserError(
            f"{data.file.path}: minicpm.logit_scale is {scale} (allowed: a number above 0)"
        )
    return {
        "scale_emb": data.real("{arch}.embedding_scale"),
        "scale_depth": data.real("{arch}.residual_scale") * depth,
        "dim_model_base": width / scale,
    }


def _cohere(data: GgufMetadata) -> ConfigValues:
    return {
        "logit_scale": data.real("{arch}.logit_scale"),
        "use_qk_norm": data.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _gpt_oss(data: GgufMetadata) -> ConfigValues:
    scaling = scaling_of(data)
    return {
        **_windows(data),
        "intermediate_size": data.whole("{arch}.expert_feed_forward_length"),
        "num_local_experts": data.whole("{arch}.expert_count"),
        "num_experts_per_tok": data.whole("{arch}.expert_used_count"),
        "sliding_window": data.whole("{arch}.attention.sliding_window", 128),
        # Its own code does not round where the ramp begins and ends.
        "rope_scaling": {**scaling, "truncate": False} if scaling else {"rope_type": "default"},
    }


def _has_correction(data: GgufMetadata) -> bool:
    return any(map(CORRECTION.fullmatch, data.file.tensors))


def _is_sigmoid(data: GgufMetadata) -> bool:
    """The router's scores; GLM-4.7-Flash's files do not say, and have what only sigmoids have."""
    data.must_be("{arch}.expert_gating_func", (SOFTMAX, SIGMOID))
    given = SIGMOID if _has_correction(data) else SOFTMAX
    return data.whole("{arch}.expert_gating_func", given) == SIGMOID


def _deepseek_family(data: GgufMetadata) -> str:
    return "deepseek_v3" if _is_sigmoid(data) else "deepseek_v2"


def _deepseek(data: GgufMetadata) -> ConfigValues:
    rotated = data.whole("{arch}.rope.dimension_count")
    # Files whose keys are the latents themselves have the sizes of heads under other names.
    key = data.optional("{arch}.attention.key_length_mla") or data.whole(
        "{arch}.attention.key_length"
    )
    value = data.optional("{arch}.attention.value_length_mla") or data.whole(
        "{arch}.attention.value_length"
    )
    experts = data.whole("{arch}.expert_count")
    groups = data.whole("{arch}.expert_group_count", 0 if experts == V3_EXPERTS else 1)
    drafting = data.whole("{arch}.nextn_predict_layers", 0)  # counted, and behind the others
    method = "noaux_tc" if _is_sigmoid(data) else "group_limited_greedy"
    scaling = scaling_of(data)
    if scaling and scaling["rope_type"] == "yarn":
        del scaling["attention_factor"]  # of the scores, by what follows
        temperature = 10 * data.real("{arch}.rope.scaling.yarn_log_multiplier", 0.0)
        scaling |= {"mscale": temperature, "mscale_all_dim": temperature}
    return {
        "num_key_value_heads": data.whole("{arch}.attention.head_count"),
        "attention_bias": data.has_tensor("blk.0.attn_output.bias"),
        "q_lora_rank": data.whole("{arch}.attention.q_lora_rank", 0) or None,
        "kv_lora_rank": data.whole("{arch}.attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "rope_scaling": scaling,
        "n_routed_experts": experts,
        "num_experts_per_tok": data.whole("{arch}.expert_used_count"),
        "moe_intermediate_size": data.whole("{arch}.expert_feed_forward_length"),
        "n_shared_experts": data.whole("{arch}.expert_shared_count", 0),
        "first_k_dense_replace": data.whole("{arch}.leading_dense_block_count", 0),
        "routed_scaling_factor": data.real("{arch}.expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": data.flag("{arch}.expert_weights_norm", False),
        "topk_method": method if groups > 1 or _is_sigmoid(data) else "greedy",
        "n_group": groups or None,
        "topk_group": data.whole("{arch}.expert_group_used_count", min(groups, 1)) or None,
        "num_hidden_layers": data.whole("{arch}.block_count") - drafting,
        "num_nextn_predict_layers": drafting,
    }


def _olmo2_family(data: GgufMetadata) -> str:
    return "olmo3" if data.whole("{arch}.attention.sliding_window", 0) else "olmo2"


def _olmo2(data: GgufMetadata) -> ConfigValues:
    base = data.file.metadata.get(data.key("{arch}.rope.freq_base"))
    data.must_be("{arch}.rope.freq_base_swa", (base,))
    return {**_with_biases(data), **_windows(data)}


def _mistral3_family(data: GgufMetadata) -> str:
    return "ministral3" if data.real(TEMPERATURE, 0.0) else "mistral"


def _mistral3(data: GgufMetadata) -> ConfigValues:
    original = data.optional("{arch}.rope.scaling.original_context_length")
    scaling: ConfigValues = scaling_of(data) or {"rope_type": "default"}
    scaling["original_max_position_embeddings"] = original or data.whole("{arch}.context_length")
    if scaling["rope_type"] == "yarn":
        log = data.real("{arch}.rope.scaling.yarn_log_multiplier", 0.0)
        scaling["attention_factor"] /= yarn_mscale(scaling["factor"], log)
    return {"rope_scaling": {**scaling, "llama_4_scaling_beta": data.real(TEMPERATURE, 0.0)}}


def _exaone4(data: GgufMetadata) -> ConfigValues:
    has_window = data.whole("{arch}.attention.sliding_window", 0) > 0
    return _windows(data) if has_window else {"sliding_window_pattern": 0}  # as its own config.json


def _hunyuan(data: GgufMetadata) -> ConfigValues:
    return {**_with_biases(data), "use_qk_norm": data.has_tensor("blk.0.attn_q_norm.weight")}


def _minimax(data: GgufMetadata) -> ConfigValues:
    data.must_be("{arch}.expert_gating_func", (SIGMOID,))
    return {
        **_experts(data),
        "intermediate_size": data.whole("{arch}.expert_feed_forward_length"),
        "use_routing_bias": _has_correction(data),
    }


def _phimoe(data: GgufMetadata) -> ConfigValues:
    head = {"lm_head_bias": data.has_tensor("output.bias")}
    return {**_phi3(data), **_with_biases(data), **_experts(data), **head}


def _seed_oss(data: GgufMetadata) -> ConfigValues:
    return {**_biases(data), "attention_out_bias": data.has_tensor("blk.0.attn_output.bias")}


def _delta_net(data: GgufMetadata, tiled: bool = True) -> ConfigValues:
    """tiled: whether the file's value heads lie so, where there are more than key heads."""
    key_heads = data.whole("{arch}.ssm.group_count")
    heads = data.whole("{arch}.ssm.time_step_rank")
    drafting = data.whole("{arch}.nextn_predict_layers", 0)  # counted, and behind the others
    count = data.whole("{arch}.block_count") - drafting
    every = data.whole("{arch}.full_attention_interval", 4)
    has_state = [bool((index + 1) % max(every, 1)) for index in range(count)]
    if "{arch}.attention.recurrent_layers" in data:
        has_state = [*map(bool, data.numbers("{arch}.attention.recurrent_layers"))][:count]
    kinds = ("full_attention", "linear_attention")
    return {
        "num_hidden_layers": count,
        "mtp_num_hidden_layers": drafting,
        "layer_types": [kinds[each] for each in has_state],
        "linear_conv_kernel_dim": data.whole("{arch}.ssm.conv_kernel"),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": data.whole("{arch}.ssm.state_size"),
        "linear_value_head_dim": data.whole("{arch}.ssm.inner_size") // max(heads, 1),
        "linear_tiled_value_heads": tiled and heads != key_heads,
        "linear_grouped_rows": False,
    }


def _delta_net_with_experts(data: GgufMetadata, tiled: bool = True) -> ConfigValues:
    return {**_qwen_moe(data, renormalize=True), **_delta_net(data, tiled)}


def _short_conv(data: GgufMetadata) -> ConfigValues:
    names = {name.split(".", 2)[2] for name in data.file.tensors if name.startswith("blk.")}
    data.must_be("{arch}.attention.sliding_window", (0,))
    return {
        "norm_eps": data.real("{arch}.attention.layer_norm_rms_epsilon"),
        "rms_norm_eps": None,
        "conv_L_cache": data.whole("{arch}.shortconv.l_cache"),
        "conv_bias": "shortconv.conv.bias" in names,
        "tie_embedding": not data.has_tensor("output.weight"),
        "layer_types": [
            "full_attention" if data.has_tensor(f"blk.{layer}.attn_q.weight") else "conv"
            for layer in range(data.whole("{arch}.block_count"))
        ],
    }


def _lfm2(data: GgufMetadata) -> ConfigValues:
    return {**_short_conv(data), "block_auto_adjust_ff_dim": False}


def _lfm2_moe(data: GgufMetadata) -> ConfigValues:
    data.must_be("{arch}.expert_gating_func", (SIGMOID,))
    return {
        **_short_conv(data),
        "num_experts": data.whole("{arch}.expert_count"),
        "num_experts_per_tok": data.whole("{arch}.expert_used_count"),
        "moe_intermediate_size": data.whole("{arch}.expert_feed_forward_length"),
        "num_dense_layers": data.whole("{arch}.leading_dense_block_count", 0),
        "norm_topk_prob": data.flag("{arch}.expert_weights_norm", True),
        "routed_scaling_factor": data.real("{arch}.expert_weights_scale", 0.0) or 1.0,
        "use_expert_bias": _has_correction(data),
    }


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(_llama_family, _llama, permuted=True),
    "internlm2": Architecture("llama", _biases, permuted=True),  # its three matrices are apart
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe", _qwen_moe),
    "qwen3": Architecture("qwen3", _with_biases),
    "qwen3moe": Architecture("qwen3_moe", partial(_qwen_moe, renormalize=True)),
    "qwen3next": Architecture(
        "qwen3_next",
        partial(_delta_net_with_experts, tiled=False),
        DELTA_NET,
        plus_one=True,
        drafting="mtp.layers.",
    ),
    "qwen35": Architecture(
        "qwen3_5_text", _delta_net, DELTA_NET, plus_one=True, drafting="mtp.layers."
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        _delta_net_with_experts,
        DELTA_NET,
        plus_one=True,
        drafting="mtp.layers.",
    ),
    "lfm2": Architecture("lfm2", _lfm2, SHORT_CONV),
    "lfm2moe": Architecture("lfm2_moe", _lfm2_moe, SHORT_CONV),
    "gemma": Architecture("gemma", plus_one=True),
    "gemma2": Architecture("gemma2", _gemma2, NORMS_AROUND, plus_one=True),
    "gemma3": Architecture("gemma3_text", _gemma3, NORMS_AROUND, plus_one=True),
    "phi2": Architecture(
        "phi",
        tensors={
            "output_norm": "model.final_layernorm",
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        layer_norm=True,
    ),
    "phi3": Architecture("phi3", _phi3, FUSED_GATE_UP),
    "olmo2": Architecture(_olmo2_family, _olmo2, NORMS_BEHIND),
    "exaone4": Architecture("exaone4", _exaone4, NORMS_BEHIND),
    "mistral3": Architecture(_mistral3_family, _mistral3, permuted=True),
    "seed_oss": Architecture(
        "seed_oss", _seed_oss, {"post_attention_norm": "post_attention_layernorm"}
    ),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        _hunyuan,
        {
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
    ),
    "minimax-m2": Architecture(
        "minimax_m2", _minimax, {"exp_probs_b": "block_sparse_moe.e_score_correction_bias"}
    ),
    "phimoe": Architecture("phimoe", _phimoe),
    "granitemoe": Architecture(
        "granitemoe", lambda data: {**_granite(data), **_experts(data)}, permuted=True
    ),
    "olmoe": Architecture("olmoe", _olmoe),
    "starcoder2": Architecture(
        "starcoder2", _use_bias, {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, layer_norm=True
    ),
    "stablelm": Architecture(
        "stablelm",
        _stablelm,
        {
            "attn_q_norm": "self_attn.q_layernorm.norms.{head}",
            "attn_k_norm": "self_attn.k_layernorm.norms.{head}",
        },
        layer_norm=True,
    ),
    "deepseek2": Architecture(
        _deepseek_family,
        _deepseek,
        {
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": KEYS_OF_LATENTS,
            "attn_v_b": VALUES_OF_LATENTS,
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
            "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
            "ffn_up_shexp": "mlp.shared_experts.up_proj",
            "ffn_down_shexp": "mlp.shared_experts.down_proj",
        },
        latent=True,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        _gpt_oss,
        {
            "attn_sinks": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
    ),
    "granite": Architecture("granite", _granite, permuted=True),
    "minicpm": Architecture("minicpm", _minicpm, permuted=True),
    "command-r": Architecture("cohere", _cohere, layer_norm=True),
    "ernie4_5": Architecture("ernie4_5", _use_bias),
    "glm4": Architecture(
        "glm4",
        _with_biases,
        {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            **FUSED_GATE_UP,
        },
    ),
}


def architecture_of(data: GgufMetadata) -> Architecture:
    """The row of the file; raises UserError naming the known ones."""
    row = ARCHITECTURES.get(data.arch)
    if row is None:
        raise UserError(
            f"{data.file.path} is of the architecture {data.arch[:80]!r}, which is not supported "
            f"as GGUF (known: {', '.join(ARCHITECTURES)}); use the model's safetensors files"
        )
    return row
