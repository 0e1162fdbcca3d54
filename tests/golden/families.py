"""The golden checkpoints that Hugging Face transformers writes and computes, as a table."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PROMPT_LENS = (1, 5, 17, 67, 103)
TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# The smallest shape: used where the case is not about shapes.
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 211,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "rope_parameters": PLAIN_ROPE,
    **TOKENS,
}
# Where a head takes hidden_size / num_attention_heads elements.
EVEN = {key: value for key, value in SMALL.items() if key != "head_dim"} | {
    "intermediate_size": 40,
    "num_key_value_heads": 2,
}
# The smallest shape of each family whose config has other words, or no heads of its own size.
SHAPES: dict[str, dict[str, Any]] = {
    "opt": {
        "hidden_size": 48,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "vocab_size": 211,
        "max_position_embeddings": 256,
        **TOKENS,
    },
    "gpt2": {
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 3,
        "n_positions": 256,
        "vocab_size": 211,
        **TOKENS,
    },
    "bloom": {"hidden_size": 48, "n_layer": 2, "n_head": 3, "vocab_size": 211, **TOKENS},
    "falcon": {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "vocab_size": 211,
        "max_position_embeddings": 256,
        "rope_parameters": PLAIN_ROPE,
        **TOKENS,
    },
    "gpt_neox": {key: value for key, value in EVEN.items() if key != "num_key_value_heads"}
    | {"tie_word_embeddings": False},
    "phi3": EVEN | {"tie_word_embeddings": False},
    "olmo2": EVEN | {"tie_word_embeddings": False},
    "olmo3": EVEN | {"tie_word_embeddings": False},
    "starcoder2": EVEN | {"num_key_value_heads": 1},
    "granite": EVEN,
    "granitemoe": EVEN,
    "phimoe": EVEN,
    "smollm3": EVEN,
    "cohere": EVEN,
    "gemma3": TOKENS,
    "mistral3": TOKENS,
    "stablelm": EVEN | {"tie_word_embeddings": False},
    "phi": EVEN | {"tie_word_embeddings": False},
    "gpt_oss": SMALL | {"tie_word_embeddings": False},
}

# The eyes of multimodal models, as small as they get: text alone is computed.
VISION: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 14,
    "patch_size": 14,
}


def rope(kind: str, **values: Any) -> dict[str, Any]:
    """A rope_parameters object."""
    return {"rope_type": kind, "rope_theta": 10000.0, **values}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One golden checkpoint; each of `without` are config values that switch one feature off."""

    family: str
    config: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[Mapping[str, Any], ...] = ()
    dtype: str = "bfloat16"  # of the stored weights
    # Major version of transformers whose config.json it imitates: at 4 config.json and the names
    # of the tensors are those of the family's published checkpoints (published.py).
    spelling: int = 5
    shard_size: str = "1GB"
    prompt_lens: tuple[int, ...] = PROMPT_LENS
    min_distinct: float = 0.3  # share of different tokens in the greedy continuations
    attention: str = "eager"  # the implementation of transformers
    mxfp4: bool = False  # experts' matrices are stored in 4 bits
    fp8: bool = False  # layers' matrices are stored as e4m3 codes, with a scale of 128 x 128

    def values(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the family's config class, with `changes`."""
        values = SHAPES.get(self.family, SMALL) | dict(self.config) | dict(changes)
        kept = {key: value for key, value in values.items() if (key, value) != ("head_dim", None)}
        return copy.deepcopy(kept)  # some config classes change what they are given


LLAMA: dict[str, Case] = {
    "llama_mha": Case(
        family="llama",
        config={
            "hidden_size": 64,
            "intermediate_size": 40,
            "num_key_value_heads": 2,
            "head_dim": None,
            "tie_word_embeddings": False,
        },
        spelling=4,
    ),
    "llama_gqa": Case(
        family="llama",
        config={
            "hidden_size": 64,
            "intermediate_size": 48,
            "head_dim": None,
            "tie_word_embeddings": False,
            "rope_parameters": rope("default", rope_theta=500000.0),
        },
        without=({"rope_parameters": PLAIN_ROPE},),
    ),
    "llama_head_dim": Case(
        family="llama",
        config={
            "hidden_size": 48,
            "intermediate_size": 40,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 256,
        },
    ),
    "llama_deep_float32": Case(
        family="llama",
        config={"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 3},
        dtype="float32",
        spelling=4,
    ),
    "llama_rope_llama3": Case(
        family="llama",
        config={
            "rope_parameters": rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            )
        },
        without=({"rope_parameters": PLAIN_ROPE},),
        spelling=4,
    ),
    "llama_rope_linear": Case(
        family="llama",
        config={"rope_parameters": rope("linear", factor=4.0)},
        without=({"rope_parameters": PLAIN_ROPE},),
        spelling=4,
    ),
    "llama_rope_dynamic": Case(  # every prompt is within the original context, two grow past it
        family="llama",
        config={
            "rope_parameters": rope("dynamic", factor=4.0),
            "max_position_embeddings": 96,
        },
        without=({"rope_parameters": PLAIN_ROPE},),
        prompt_lens=(1, 5, 17, 67, 90),
    ),
    "llama_rope_yarn": Case(
        family="llama",
        config={"rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=64)},
        without=({"rope_parameters": PLAIN_ROPE},),
        dtype="float16",
    ),
    "llama_biases": Case(
        family="llama",
        config={"attention_bias": True, "mlp_bias": True},
        without=({"attention_bias": False, "mlp_bias": False},),
    ),
    "llama_sharded": Case(family="llama", config={"tie_word_embeddings": False}, shard_size="40KB"),
    "mistral_window": Case(
        family="mistral", config={"sliding_window": 12}, without=({"sliding_window": None},)
    ),
    "mistral_full": Case(
        family="mistral",
        config={"sliding_window": None, "num_attention_heads": 3},
        spelling=4,
    ),
    "qwen2": Case(
        family="qwen2",
        config={
            "hidden_size": 64,
            "intermediate_size": 48,
            "head_dim": None,
            "tie_word_embeddings": False,
        },
        spelling=4,
    ),
    "qwen2_tied": Case(family="qwen2", config={"hidden_size": 64, "head_dim": None}),
    "qwen3": Case(
        family="qwen3",
        config={"head_dim": 64, "tie_word_embeddings": False, "rms_norm_eps": 1e-6},
        spelling=4,
    ),
    "qwen3_tied": Case(family="qwen3", config={"num_attention_heads": 4, "num_key_value_heads": 2}),
}

# LayerNorm, biases, plain MLPs; positions that are learned, or slopes over the keys.
CLASSIC: dict[str, Case] = {
    "opt_125m": Case(family="opt", spelling=4),
    "opt_350m": Case(  # norms after the residual, no final norm, embeddings of another width
        family="opt",
        config={"do_layer_norm_before": False, "word_embed_proj_dim": 24},
        spelling=4,
    ),
    "gpt2_small": Case(family="gpt2", spelling=4, config={"n_positions": 144}),
    "gpt2_inner": Case(
        family="gpt2",
        config={
            "n_embd": 24,
            "n_inner": 64,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
        },
    ),
    "bloom_7b": Case(family="bloom", config={"n_head": 4, "hidden_size": 32}, spelling=4),
    "bloom_odd_heads": Case(family="bloom", config={"n_head": 6}),  # slopes of 4 heads, then of 8
    "bloom_post_norm_residual": Case(
        family="bloom",
        config={
            "n_head": 4,
            "hidden_size": 32,
            "apply_residual_connection_post_layernorm": True,
            "tie_word_embeddings": False,
        },
        without=({"apply_residual_connection_post_layernorm": False},),
        min_distinct=0.15,  # nothing tells a run of one token from a longer one
        dtype="float16",
    ),
    "gpt_neox_pythia": Case(
        family="gpt_neox",
        config={"rope_parameters": rope("default", partial_rotary_factor=0.25)},
        without=(
            {"use_parallel_residual": False},
            {"rope_parameters": rope("default", partial_rotary_factor=1.0)},
        ),
        spelling=4,
    ),
    "gpt_neox_serial": Case(
        family="gpt_neox",
        config={
            "use_parallel_residual": False,
            "rope_parameters": rope("default", partial_rotary_factor=0.5),
        },
        without=({"use_parallel_residual": True},),
        dtype="float16",
    ),
    "falcon_7b": Case(
        family="falcon", config={"hidden_size": 24}, spelling=4
    ),  # one key/value head, one norm for both
    "falcon_40b": Case(
        family="falcon",
        config={
            "num_attention_heads": 4,
            "hidden_size": 32,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
        },
        spelling=4,
    ),
    "falcon_11b": Case(  # groups of heads, but one norm for both
        family="falcon",
        config={
            "num_attention_heads": 4,
            "hidden_size": 32,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
            "rope_parameters": rope("default", rope_theta=500042.0),
        },
        without=({"rope_parameters": PLAIN_ROPE},),
    ),
    "falcon_rw": Case(  # transformers rounds slope x position to bfloat16: exact at 4 heads
        family="falcon",
        config={
            "num_attention_heads": 4,
            "hidden_size": 32,
            "alibi": True,
            "bias": True,
            "multi_query": False,
            "parallel_attn": False,
        },
        without=({"alibi": False},),
        spelling=4,
        attention="sdpa",  # transformers' eager attention adds ALiBi twice
    ),
    "starcoder2_window": Case(
        family="starcoder2",
        config={"sliding_window": 12, "rope_parameters": rope("default", rope_theta=100000.0)},
        without=({"sliding_window": None}, {"rope_parameters": PLAIN_ROPE}),
        spelling=4,
    ),
    "phi_2": Case(
        family="phi",
        config={"rope_parameters": rope("default", partial_rotary_factor=0.5)},
        without=({"rope_parameters": rope("default", partial_rotary_factor=1.0)},),
        spelling=4,
    ),
    "stablelm_3b": Case(
        family="stablelm",
        config={
            "use_qkv_bias": True,
            "rope_parameters": rope("default", partial_rotary_factor=0.25),
        },
        without=({"rope_parameters": rope("default", partial_rotary_factor=1.0)},),
        spelling=4,
    ),
    "stablelm_12b": Case(  # one norm for both, a norm of its own for every query and key head
        family="stablelm",
        config={
            "num_key_value_heads": 1,
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "rope_parameters": rope("default", partial_rotary_factor=0.25),
        },
        without=({"qk_layernorm": False},),
    ),
}

GEMMA3_TEXT: dict[str, Any] = SMALL | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "sliding_attention": rope("default"),
        "full_attention": rope("linear", rope_theta=1000000.0, factor=8.0),
    },
}

OLMO3_YARN = rope(
    "yarn",
    rope_theta=500000.0,
    factor=8.0,
    beta_fast=32,
    beta_slow=1,
    attention_factor=1.2079441541679836,
    original_max_position_embeddings=32,
)
HUNYUAN_ROPE = rope(
    "dynamic",
    alpha=1000.0,
    beta_fast=32,
    beta_slow=1,
    factor=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
)
MINISTRAL3_ROPE = rope(
    "yarn",
    rope_theta=1000000.0,
    factor=4.0,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    original_max_position_embeddings=32,
    llama_4_scaling_beta=0.8,
)
MINISTRAL3: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": None,
    "rope_parameters": MINISTRAL3_ROPE,
}

# RMS norms and gated MLPs, with something of their own.
MODERN: dict[str, Case] = {
    "gemma_2b": Case(family="gemma", config={"num_attention_heads": 3}, spelling=4),
    "gemma2_9b": Case(
        family="gemma2",
        config={
            "sliding_window": 12,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 20.0,
        },
        without=(
            {"sliding_window": 256},
            {"layer_types": ["sliding_attention"] * 2},
            {"layer_types": ["full_attention", "sliding_attention"]},
            {"query_pre_attn_scalar": 32},
            {"attn_logit_softcapping": None},
            {"final_logit_softcapping": None},
        ),
        spelling=4,
    ),
    "gemma2_uncapped": Case(
        family="gemma2",
        config={
            "head_dim": 64,
            "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 64,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        without=({"layer_types": ["full_attention"] * 2},),
    ),
    "gemma3_text_1b": Case(
        family="gemma3_text",
        config={
            "num_hidden_layers": 3,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "sliding_attention": rope("default"),
                "full_attention": rope("default", rope_theta=1000000.0),
            },
        },
        without=(
            {"sliding_window": 256},
            {"layer_types": ["sliding_attention"] * 3},
            {"query_pre_attn_scalar": 32},
            {
                "rope_parameters": {
                    "sliding_attention": rope("default"),
                    "full_attention": rope("default"),
                }
            },
        ),
        spelling=4,
    ),
    "gemma3_text_4b": Case(  # positions of the layers without a window are divided by the factor
        family="gemma3_text",
        config={
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 32,
            "rope_parameters": {
                "sliding_attention": rope("default"),
                "full_attention": rope("linear", rope_theta=1000000.0, factor=8.0),
            },
        },
        without=(
            {
                "rope_parameters": {
                    "sliding_attention": rope("default"),
                    "full_attention": rope("default", rope_theta=1000000.0),
                }
            },
        ),
    ),
    "gemma3_4b": Case(  # gemma3_text within a model that sees images
        family="gemma3",
        config={
            "text_config": GEMMA3_TEXT,
            "vision_config": VISION | {"model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 1,
        },
        without=({"text_config": GEMMA3_TEXT | {"sliding_window": 256}},),
    ),
    "mistral3_24b": Case(
        family="mistral3",
        config={
            "text_config": SMALL
            | {
                "model_type": "mistral",
                "head_dim": 24,
                "sliding_window": None,
                "tie_word_embeddings": False,
                "rope_parameters": rope("default", rope_theta=1000000000.0),
            },
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
            "image_token_index": 262144,  # no token: text alone
            "tie_word_embeddings": False,
        },
    ),
    "glm_9b": Case(
        family="glm",
        config={
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": rope("default", partial_rotary_factor=0.5),
        },
        without=({"rope_parameters": rope("default", partial_rotary_factor=1.0)},),
        spelling=4,
    ),
    "glm4_9b": Case(  # a norm before and one after each of attention and MLP
        family="glm4",
        config={
            "attention_bias": False,
            "tie_word_embeddings": False,
            "rope_parameters": rope("default", partial_rotary_factor=0.5),
        },
        without=({"rope_parameters": rope("default", partial_rotary_factor=1.0)},),
        spelling=4,
    ),
    "glm4_biases": Case(
        family="glm4",
        config={
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "rope_parameters": rope("default", partial_rotary_factor=0.5),
        },
        without=({"attention_bias": False},),
    ),
    "phi3_mini": Case(family="phi3", spelling=4),
    "phi3_window": Case(
        family="phi3",
        config={"sliding_window": 12, "num_key_value_heads": 1},
        without=({"sliding_window": None},),
    ),
    "phi3_longrope": Case(  # two prompts past the original context; none grows past it
        family="phi3",
        config={
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 256,
            "rope_parameters": rope(
                "longrope",
                short_factor=[1.0, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0],
                long_factor=[1.0, 1.2, 1.6, 2.4, 3.2, 4.0, 5.0, 6.0],
            ),
        },
        without=({"rope_parameters": PLAIN_ROPE},),
        spelling=4,
    ),
    "phi3_4_mini": Case(
        family="phi3",
        config={
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 64,
            "rope_parameters": rope(
                "longrope",
                partial_rotary_factor=0.75,
                short_factor=[1.0, 1.0, 1.0, 1.2, 1.5, 2.0],
                long_factor=[1.0, 1.3, 1.9, 3.0, 4.5, 6.0],
            ),
        },
        without=(
            {"rope_parameters": rope("default", partial_rotary_factor=0.75)},
            {"rope_parameters": PLAIN_ROPE},
        ),
        spelling=4,
    ),
    "olmo2_7b": Case(  # no norm before a product, but after; the norm of all query heads at once
        family="olmo2",
        config={"rope_parameters": rope("default", rope_theta=500000.0)},
        without=({"rope_parameters": PLAIN_ROPE},),
        spelling=4,
    ),
    "olmo2_gqa": Case(
        family="olmo2",
        config={"num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "olmo3_7b": Case(  # windows, whose positions YaRN leaves as they are
        family="olmo3",
        config={
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "sliding_window": 12,
            "rope_parameters": {
                "sliding_attention": rope("default", rope_theta=500000.0),
                "full_attention": OLMO3_YARN,
            },
        },
        without=(
            {"sliding_window": 256},
            {"layer_types": ["sliding_attention"] * 4},
            {"rope_parameters": {"sliding_attention": OLMO3_YARN, "full_attention": OLMO3_YARN}},
        ),
        spelling=4,
    ),
    "exaone4_32b": Case(  # windows in three of four layers; the fourth knows no positions
        family="exaone4",
        config={
            "num_hidden_layers": 4,
            "tie_word_embeddings": False,
            "sliding_window": 12,
            "sliding_window_pattern": "LLLG",
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "rope_parameters": rope(
                "llama3",
                rope_theta=1000000.0,
                factor=16.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        },
        without=(
            {"sliding_window": 256},
            {"layer_types": ["sliding_attention"] * 4},
            {"rope_parameters": PLAIN_ROPE},
        ),
        spelling=4,
    ),
    "exaone4_1_2b": Case(  # no windows: all layers know positions
        family="exaone4",
        config={
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "tie_word_embeddings": False,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 2,
        },
    ),
    "hunyuan_7b": Case(  # norms of heads behind the rotation, whose base has a factor
        family="hunyuan_v1_dense",
        config={
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "tie_word_embeddings": False,
            "rope_parameters": HUNYUAN_ROPE,
        },
        without=(
            {"rope_parameters": PLAIN_ROPE},
            {"rope_parameters": HUNYUAN_ROPE | {"alpha": 10.0}},
        ),
        spelling=4,
    ),
    "seed_oss_36b": Case(  # heads that are wider together than the hidden states
        family="seed_oss",
        config={
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
            "rope_parameters": rope("default", rope_theta=10000000.0),
        },
        without=({"attention_bias": False}, {"rope_parameters": PLAIN_ROPE}),
        spelling=4,
    ),
    "seed_oss_biases": Case(
        family="seed_oss",
        config={"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
        without=({"attention_out_bias": False}, {"mlp_bias": False}),
    ),
    "ministral3_8b": Case(  # queries that grow with the position
        family="ministral3",
        config=MINISTRAL3 | {"tie_word_embeddings": False},
        without=(
            {"rope_parameters": MINISTRAL3_ROPE | {"llama_4_scaling_beta": 0.0}},
            {"rope_parameters": MINISTRAL3_ROPE | {"factor": 1.0}},
        ),
    ),
    "mistral3_3b": Case(  # the same within a model that sees images
        family="mistral3",
        config={
            "text_config": SMALL | MINISTRAL3 | {"model_type": "ministral3"},
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
            "image_token_index": 262144,  # no token: text alone
            "tie_word_embeddings": True,
        },
    ),
    "smollm3_3b": Case(  # the second of every two layers without positions
        family="smollm3",
        config={
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
            "rope_parameters": rope("default", rope_theta=5000000.0),
        },
        without=({"no_rope_layers": [1, 1, 1, 1]}, {"rope_parameters": PLAIN_ROPE}),
        spelling=4,
    ),
    "smollm3_window": Case(  # layers without positions have windows
        family="smollm3",
        config={
            "num_key_value_heads": 1,
            "no_rope_layers": [1, 0],
            "use_sliding_window": True,
            "sliding_window": 24,
            "attention_bias": True,
            "mlp_bias": True,
        },
        without=({"use_sliding_window": False, "layer_types": None}, {"no_rope_layers": [1, 1]}),
    ),
    "granite_8b": Case(
        family="granite",
        config={
            "num_key_value_heads": 1,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.25,
        },
        without=(
            {"embedding_multiplier": 1.0},
            {"attention_multiplier": 0.25},
            {"residual_multiplier": 1.0},
            {"logits_scaling": 1.0},
        ),
        spelling=4,
    ),
    "granite_biases": Case(
        family="granite",
        config={
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
            "logits_scaling": 0.4,
        },
        without=({"attention_bias": False, "mlp_bias": False},),
    ),
    "ernie4_5_0_3b": Case(
        family="ernie4_5",
        config={"rope_parameters": rope("default", rope_theta=500000.0)},
        without=({"rope_parameters": PLAIN_ROPE},),
        spelling=4,
    ),
    "ernie4_5_biases": Case(
        family="ernie4_5",
        config={"use_bias": True, "tie_word_embeddings": False},
        without=({"use_bias": False},),
    ),
    "cohere_35b": Case(
        family="cohere",
        config={
            "logit_scale": 0.7,
            "rope_parameters": rope("default", rope_theta=8000000.0),
        },
        without=({"logit_scale": 1.0}, {"rope_parameters": PLAIN_ROPE}),
        spelling=4,
    ),
    "cohere_qk_norm": Case(
        family="cohere",
        config={
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "use_qk_norm": True,
            "logit_scale": 0.8,
        },
        without=({"use_qk_norm": False},),
    ),
}

YARN = rope(
    "yarn",
    factor=4.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=64,
)
GPT_OSS: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "sliding_window": 12,
    "swiglu_limit": 1.5,
    "rope_parameters": YARN,
}
PHIMOE_ROPE = rope(
    "longrope",
    short_factor=[1.0, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0],
    long_factor=[1.0, 1.2, 1.6, 2.4, 3.2, 4.0, 5.0, 6.0],
    short_mscale=1.24,
    long_mscale=1.3,
    original_max_position_embeddings=160,
)
# Experts in place of MLPs: odd numbers of them, of odd sizes.
EXPERTS: dict[str, Case] = {
    "mixtral_8x7b": Case(
        family="mixtral",
        config={
            "hidden_size": 64,
            "intermediate_size": 24,
            "head_dim": None,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "rope_parameters": rope("default", rope_theta=1000000.0),
        },
        without=({"num_experts_per_tok": 1}, {"num_experts_per_tok": 3}),
        spelling=4,
    ),
    "mixtral_window": Case(
        family="mixtral",
        config={"num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": 12},
        without=({"sliding_window": None},),
    ),
    "qwen2_moe_a2_7b": Case(  # a shared expert behind a gate, shares that do not add up to 1
        family="qwen2_moe",
        config={
            "head_dim": None,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 44,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "tie_word_embeddings": False,
        },
        without=({"norm_topk_prob": True},),
        spelling=4,
    ),
    "qwen2_moe_sparse": Case(  # MLPs and experts, windows, no biases
        family="qwen2_moe",
        config={
            "num_hidden_layers": 4,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 12,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 3,
        },
        without=({"norm_topk_prob": False}, {"sliding_window": 256}),
    ),
    "qwen3_moe_30b": Case(
        family="qwen3_moe",
        config={
            "num_attention_heads": 4,
            "moe_intermediate_size": 12,
            "num_experts": 11,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
        },
        without=({"norm_topk_prob": False},),
        spelling=4,
    ),
    "qwen3_moe_window": Case(
        family="qwen3_moe",
        config={
            "num_hidden_layers": 3,
            "moe_intermediate_size": 20,
            "num_experts": 6,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 12,
        },
        without=({"norm_topk_prob": True}, {"sliding_window": 256}, {"attention_bias": False}),
        dtype="float16",
    ),
    "olmoe_7b": Case(  # one norm over all query heads, and one over all key heads
        family="olmoe",
        config={
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": None,
            "intermediate_size": 28,
            "num_experts": 9,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": False,
        },
        without=({"norm_topk_prob": True},),
        spelling=4,
    ),
    "glm4_moe_355b": Case(  # groups of experts; a layer more in config.json, for drafts
        family="glm4_moe",
        config={
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 20,
            "n_routed_experts": 12,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": rope("default", partial_rotary_factor=0.5),
        },
        without=(
            {"n_group": 1, "topk_group": 1},
            {"topk_group": 3},
            {"routed_scaling_factor": 1.0},
            {"norm_topk_prob": False},
            {"use_qk_norm": False},
            {"rope_parameters": rope("default", partial_rotary_factor=1.0)},
        ),
        spelling=4,
    ),
    "glm4_moe_plain": Case(
        family="glm4_moe",
        config={
            "moe_intermediate_size": 24,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
        },
        without=({"norm_topk_prob": True},),
    ),
    "granitemoe_3b": Case(  # experts of a layer in one tensor
        family="granitemoe",
        config={
            "num_key_value_heads": 1,
            "intermediate_size": 20,
            "tie_word_embeddings": False,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.1,
        },
        without=(
            {"embedding_multiplier": 1.0},
            {"attention_multiplier": 0.25},
            {"residual_multiplier": 1.0},
            {"logits_scaling": 1.0},
            {"num_experts_per_tok": 2},
        ),
        spelling=4,
    ),
    "phimoe_42b": Case(  # two experts by the sparse mixer; LayerNorm and biases
        family="phimoe",
        config={
            "num_key_value_heads": 1,
            "intermediate_size": 20,
            "num_local_experts": 7,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.3,
            "tie_word_embeddings": False,
            "original_max_position_embeddings": 160,
            "rope_parameters": PHIMOE_ROPE,
        },
        without=(
            {"router_jitter_noise": 0.01},
            {"attention_bias": False},
            {"rope_parameters": PHIMOE_ROPE | {"short_mscale": 1.0}},
        ),
        spelling=4,
    ),
    "minimax_m2_230b": Case(  # half of each head rotated, one norm over all heads, no groups
        family="minimax_m2",
        config={
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 20,
            "num_local_experts": 9,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": False,
            "rope_parameters": rope("default", rope_theta=5000000.0, partial_rotary_factor=0.5),
        },
        without=(
            {"num_experts_per_tok": 4},
            {"rope_parameters": rope("default", rope_theta=5000000.0)},
            {"rope_parameters": rope("default", partial_rotary_factor=0.5)},
        ),
        spelling=4,
    ),
    "ernie4_5_moe_21b": Case(
        family="ernie4_5_moe",
        config={
            "num_hidden_layers": 3,
            "moe_intermediate_size": 12,
            "moe_num_experts": 10,
            "moe_num_shared_experts": 2,
            "moe_k": 3,
            "moe_layer_start_index": 1,
            "rope_parameters": rope("default", rope_theta=500000.0),
        },
        without=({"moe_k": 2}, {"rope_parameters": PLAIN_ROPE}),
        spelling=4,
    ),
    "ernie4_5_moe_sparse": Case(  # experts in every other layer of a range, none shared
        family="ernie4_5_moe",
        config={
            "num_hidden_layers": 5,
            "moe_intermediate_size": 20,
            "moe_num_experts": 4,
            "moe_num_shared_experts": 0,
            "moe_k": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 2,
            "tie_word_embeddings": False,
        },
    ),
    "gpt_oss_20b": Case(
        family="gpt_oss",
        config=GPT_OSS,
        without=(
            {"sliding_window": 256},
            {"layer_types": ["full_attention", "sliding_attention"]},
            {"swiglu_limit": 100.0},
            {"swiglu_alpha": 1.0},
            {"rope_parameters": PLAIN_ROPE},
        ),
        spelling=4,
    ),
    "gpt_oss_mxfp4": Case(  # as published: experts in 4 bits
        family="gpt_oss",
        config=GPT_OSS | {"num_hidden_layers": 3, "attention_bias": False, "intermediate_size": 96},
        mxfp4=True,
    ),
}

DEEPSEEK_YARN: dict[str, Any] = {
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 32,
}
GLM4_MOE_LITE: dict[str, Any] = {
    "head_dim": None,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 24,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "moe_intermediate_size": 12,
    "n_routed_experts": 9,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "rope_parameters": rope("default", rope_theta=1000000.0),
}
# Attention over latents, and experts behind dense layers.
DEEPSEEK: dict[str, Case] = {
    "deepseek_v2_lite": Case(  # queries at once, experts of no groups
        family="deepseek_v2",
        config={
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "q_lora_rank": None,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 20,
            "moe_intermediate_size": 20,
            "n_routed_experts": 7,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": rope("yarn", mscale=0.707, mscale_all_dim=0.707, **DEEPSEEK_YARN),
        },
        without=(
            {"rope_parameters": PLAIN_ROPE},
            {"rope_parameters": rope("yarn", attention_factor=1.0, **DEEPSEEK_YARN)},
        ),
        spelling=4,
    ),
    "deepseek_v2": Case(
        family="deepseek_v2",
        config={
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 20,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "moe_intermediate_size": 12,
            "n_routed_experts": 12,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
            "rope_parameters": rope("yarn", mscale=0.707, mscale_all_dim=0.707, **DEEPSEEK_YARN),
        },
        without=(
            {"rope_parameters": PLAIN_ROPE},
            {"topk_method": "greedy"},
            {"topk_group": 1},
            {"routed_scaling_factor": 1.0},
        ),
        spelling=4,
    ),
    "deepseek_v2_dense": Case(  # no experts; biases, which no published one has
        family="deepseek_v2",
        config={
            "num_hidden_layers": 3,
            "first_k_dense_replace": 3,
            "num_key_value_heads": 2,
            "q_lora_rank": 24,
            "kv_lora_rank": 40,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 24,
            "attention_bias": True,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "rope_parameters": rope("default", rope_theta=50000.0),
        },
        without=({"attention_bias": False}, {"rope_parameters": PLAIN_ROPE}),
        dtype="float16",
    ),
    "deepseek_v3": Case(  # as published, with a layer behind the others that drafts
        family="deepseek_v3",
        config={
            "head_dim": None,
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 28,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "moe_intermediate_size": 20,
            "n_routed_experts": 12,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "tie_word_embeddings": False,
            "rope_parameters": rope("yarn", mscale=1.0, mscale_all_dim=1.0, **DEEPSEEK_YARN),
        },
        without=(
            {"rope_parameters": PLAIN_ROPE},
            {"rope_parameters": rope("yarn", attention_factor=1.0, **DEEPSEEK_YARN)},
            {"n_group": 1, "topk_group": 1},
            {"topk_group": 3},
            {"norm_topk_prob": False},
            {"routed_scaling_factor": 1.0},
            {"rope_interleave": False},
        ),
        spelling=4,
    ),
    "deepseek_v3_halves": Case(  # pairs of values that lie half a head apart, one group
        family="deepseek_v3",
        config={
            "head_dim": None,
            "num_key_value_heads": 2,
            "q_lora_rank": None,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 20,
            "qk_rope_head_dim": 12,
            "v_head_dim": 40,
            "moe_intermediate_size": 24,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
        },
        without=({"rope_interleave": True}, {"norm_topk_prob": True}),
    ),
    "glm4_moe_lite_30b": Case(  # DeepSeek V3's attention, an odd number of heads, no groups
        family="glm4_moe_lite",
        config=GLM4_MOE_LITE,
        without=(
            {"rope_parameters": PLAIN_ROPE},
            {"norm_topk_prob": False},
            {"routed_scaling_factor": 1.0},
            {"rope_interleave": False},
        ),
        spelling=4,
    ),
    "glm4_moe_lite_types": Case(  # a dense layer behind one of experts
        family="glm4_moe_lite",
        config=GLM4_MOE_LITE
        | {
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "mlp_layer_types": ["sparse", "dense"],
        },
        without=({"norm_topk_prob": True}, {"rope_interleave": True}),
    ),
    # Blocks of 128 end within the keys of the second head, within the values of the third, and
    # within rows of latents.
    "deepseek_v3_fp8": Case(
        family="deepseek_v3",
        config={
            "head_dim": None,
            "vocab_size": 97,
            "hidden_size": 48,
            "intermediate_size": 144,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "q_lora_rank": 32,
            "kv_lora_rank": 136,
            "qk_nope_head_dim": 60,
            "qk_rope_head_dim": 8,
            "v_head_dim": 32,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "tie_word_embeddings": False,
            "rope_parameters": rope("yarn", mscale=1.0, mscale_all_dim=1.0, **DEEPSEEK_YARN),
        },
        without=({"n_group": 1, "topk_group": 1}, {"rope_interleave": False}),
        spelling=4,
        fp8=True,
    ),
}

CASES = LLAMA | CLASSIC | MODERN | EXPERTS | DEEPSEEK
