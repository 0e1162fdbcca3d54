"""The golden checkpoints of families that transformers has no class for, as a table.

config.json has the keys of the published checkpoints, the tensors their names and layouts.
numpy_models.py computes them; twins.py checks it by what transformers has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.golden.families import PROMPT_LENS, TOKENS
from tests.golden.numpy_models import (
    Config,
    Forward,
    baichuan,
    causal,
    chatglm,
    chatglm2,
    ernie,
    gpt,
    internlm2,
    minicpm,
    qwen,
    rotate_halves,
)

Shapes = dict[str, tuple[int, ...]]
VOCAB_SIZE = 211


@dataclass(frozen=True, kw_only=True)
class NumpyCase:
    """One golden checkpoint.

    Each of `without` switches one feature off: values of config.json (None: no such key), and
    functions that stand in for those of numpy_models by their names.
    """

    forward: Forward
    shapes: Callable[[Config], Shapes]
    config: Mapping[str, Any]
    without: tuple[Mapping[str, Any], ...] = ()
    prompt_lens: tuple[int, ...] = PROMPT_LENS
    matrix: float = 1.5  # sizes of the random values, as in hf_models.Scales
    attention_output: float = 1.5
    bias: float = 0.3
    embedding: float = 3.0
    last_norm: float = 1.0
    min_distinct: float = 0.3
    transposed: bool = False  # matrices are [in, out]


def llama_shapes(config: Config, layer: str, names: Mapping[str, str]) -> Shapes:
    """The shapes of a layer like Llama's under other names."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads", num_heads)
    kv = hidden // num_heads * num_kv_heads
    shapes = {
        "q": (hidden, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "qkv": (hidden + 2 * kv, hidden),
        "o": (hidden, hidden),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
        "norm1": (hidden,),
        "norm2": (hidden,),
    }
    return {f"{layer}.{name}.weight": shapes[part] for part, name in names.items()}


def model_shapes(config: Config, layers: str, names: Mapping[str, str], ends: Shapes) -> Shapes:
    """The shapes of layers like Llama's and of what comes before and after them."""
    shapes = dict(ends)
    for layer in range(config["num_hidden_layers"]):
        shapes |= llama_shapes(config, f"{layers}.{layer}", names)
    return shapes


def end_shapes(config: Config, embedding: str, norm: str, head: str | None) -> Shapes:
    """The shapes of the embedding, the last norm and the head."""
    hidden = config["hidden_size"]
    shapes: Shapes = {f"{embedding}.weight": (VOCAB_SIZE, hidden), f"{norm}.weight": (hidden,)}
    if head is not None:
        shapes[f"{head}.weight"] = (VOCAB_SIZE, hidden)
    return shapes


MLP = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}


def baichuan_shapes(config: Config) -> Shapes:
    """The tensors of Baichuan."""
    names = {"qkv": "self_attn.W_pack", "o": "self_attn.o_proj", **MLP, **NORMS}
    ends = end_shapes(config, "model.embed_tokens", "model.norm", "lm_head")
    if "max_position_embeddings" in config:
        half = config["hidden_size"] // config["num_attention_heads"] // 2
        for layer in range(config["num_hidden_layers"]):  # stored, but nobody reads it
            ends[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = (half,)
    return model_shapes(config, "model.layers", names, ends)


def minicpm_shapes(config: Config) -> Shapes:
    """The tensors of MiniCPM."""
    names = {part: f"self_attn.{part}_proj" for part in "qkvo"} | MLP | NORMS
    head = None if config["tie_word_embeddings"] else "lm_head"
    ends = end_shapes(config, "model.embed_tokens", "model.norm", head)
    return model_shapes(config, "model.layers", names, ends)


def internlm2_shapes(config: Config) -> Shapes:
    """The tensors of InternLM2."""
    names = {
        "qkv": "attention.wqkv",
        "o": "attention.wo",
        "gate": "feed_forward.w1",
        "up": "feed_forward.w3",
        "down": "feed_forward.w2",
        "norm1": "attention_norm",
        "norm2": "ffn_norm",
    }
    ends = end_shapes(config, "model.tok_embeddings", "model.norm", "output")
    return model_shapes(config, "model.layers", names, ends)


def qwen_shapes(config: Config) -> Shapes:
    """The tensors of the first Qwen; its MLPs have half of intermediate_size."""
    names = {
        "qkv": "attn.c_attn",
        "o": "attn.c_proj",
        "up": "mlp.w1",
        "gate": "mlp.w2",
        "down": "mlp.c_proj",
        "norm1": "ln_1",
        "norm2": "ln_2",
    }
    halved = {**config, "intermediate_size": config["intermediate_size"] // 2}
    ends = end_shapes(config, "transformer.wte", "transformer.ln_f", "lm_head")
    shapes = model_shapes(halved, "transformer.h", names, ends)
    for layer in range(config["num_hidden_layers"]):
        shapes[f"transformer.h.{layer}.attn.c_attn.bias"] = (3 * config["hidden_size"],)
    return shapes


def chatglm_shapes(config: Config) -> Shapes:
    """The tensors of ChatGLM-6B: everything but the embedding and the head has biases."""
    hidden, inner = config["hidden_size"], config["inner_hidden_size"]
    matrices = {
        "attention.query_key_value": (3 * hidden, hidden),
        "attention.dense": (hidden, hidden),
        "mlp.dense_h_to_4h": (inner, hidden),
        "mlp.dense_4h_to_h": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    parts: Shapes = {"final_layernorm": (hidden,)}
    for layer in range(config["num_layers"]):
        parts |= {f"layers.{layer}.{name}": shape for name, shape in matrices.items()}
    shapes: Shapes = {
        "lm_head.weight": (VOCAB_SIZE, hidden),
        "transformer.word_embeddings.weight": (VOCAB_SIZE, hidden),
    }
    for name, shape in parts.items():
        shapes[f"transformer.{name}.weight"] = shape
        shapes[f"transformer.{name}.bias"] = shape[:1]
    quarter = hidden // config["num_attention_heads"] // 4
    for layer in range(config["num_layers"]):  # stored, but nobody reads it
        shapes[f"transformer.layers.{layer}.attention.rotary_emb.inv_freq"] = (quarter,)
    return shapes


def chatglm2_shapes(config: Config) -> Shapes:
    """The tensors of ChatGLM2 and later."""
    hidden, inner = config["hidden_size"], config["ffn_hidden_size"]
    width = config["num_attention_heads"] * config["kv_channels"]
    packed = width + 2 * config["multi_query_group_num"] * config["kv_channels"]
    shapes: Shapes = {  # the published ones have inv_freq, but nobody reads it
        "transformer.embedding.word_embeddings.weight": (VOCAB_SIZE, hidden),
        "transformer.encoder.final_layernorm.weight": (hidden,),
        "transformer.output_layer.weight": (VOCAB_SIZE, hidden),
        "transformer.rotary_pos_emb.inv_freq": (config["kv_channels"] // 4,),
    }
    for layer in range(config["num_layers"]):
        name = f"transformer.encoder.layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.mlp.dense_4h_to_h.weight": (hidden, inner),
            f"{name}.mlp.dense_h_to_4h.weight": (2 * inner, hidden),
            f"{name}.post_attention_layernorm.weight": (hidden,),
            f"{name}.self_attention.dense.weight": (hidden, width),
            f"{name}.self_attention.query_key_value.bias": (packed,),
            f"{name}.self_attention.query_key_value.weight": (packed, hidden),
        }
    return shapes


def gpt_shapes(config: Config) -> Shapes:
    """The tensors of PaddleNLP's GPT."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    fused = config.get("fuse_attention_qkv", False)
    matrices: Shapes = {"self_attn.qkv_proj": (hidden, 3 * hidden)}
    if not fused:
        matrices = {f"self_attn.{part}_proj": (hidden, hidden) for part in "qkv"}
    matrices |= {
        "self_attn.out_proj": (hidden, hidden),
        "linear1": (hidden, inner),
        "linear2": (inner, hidden),
        "norm1": (hidden,),
        "norm2": (hidden,),
    }
    shapes: Shapes = {
        "gpt.embeddings.word_embeddings.weight": (VOCAB_SIZE, hidden),
        "gpt.embeddings.position_embeddings.weight": (config["max_position_embeddings"], hidden),
        "gpt.decoder.norm.weight": (hidden,),
        "gpt.decoder.norm.bias": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        for name, shape in matrices.items():
            shapes[f"gpt.decoder.layers.{layer}.{name}.weight"] = shape
            shapes[f"gpt.decoder.layers.{layer}.{name}.bias"] = shape[-1:]
    return shapes


def ernie_shapes(config: Config) -> Shapes:
    """The tensors of ERNIE 3.5 SE."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    num_layers = config["num_hidden_layers"]
    parts: Shapes = {"ernie.norm": (hidden,), "lm_head": (hidden, VOCAB_SIZE)}
    for layer in range(num_layers):
        name = f"ernie.layers.{layer}"
        if config["parallel_attn_hatf"] and layer == 0:
            parts |= {f"{name}.self_attn.{part}_proj": (hidden, hidden) for part in "qkvo"}
        elif config["parallel_attn_hatf"] and layer == num_layers - 1:
            parts |= {f"{name}.mlp.{part}_proj": (hidden, inner) for part in ("gate", "up")}
            parts |= {f"{name}.mlp.down_proj": (inner, hidden)}
            parts |= {f"{name}.post_attention_layernorm": (hidden,)}
            continue
        else:
            packed = 3 * hidden + 2 * inner
            parts |= {f"{name}.self_attn_mlp.qkv_gate_up_proj": (hidden, packed)}
            parts |= {f"{name}.self_attn_mlp.o_proj": (inner + hidden, hidden)}
        parts |= {f"{name}.input_layernorm": (hidden,)}
    shapes: Shapes = {"ernie.embed_tokens.weight": (VOCAB_SIZE, hidden)}
    for name, shape in parts.items():
        shapes[f"{name}.weight"] = shape
        if config["use_bias"] or len(shape) == 1:
            shapes[f"{name}.bias"] = shape[-1:]
    return shapes


BAICHUAN: dict[str, Any] = {
    "architectures": ["BaichuanForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 48,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "model_max_length": 256,
    "model_type": "baichuan",
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
    **TOKENS,
}
QWEN: dict[str, Any] = {
    "architectures": ["QWenLMHeadModel"],
    "attn_dropout_prob": 0.0,
    "bf16": False,
    "emb_dropout_prob": 0.0,
    "fp16": False,
    "fp32": False,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "kv_channels": 16,
    "layer_norm_epsilon": 1e-6,
    "max_position_embeddings": 512,
    "model_type": "qwen",
    "no_bias": True,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "onnx_safe": None,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "scale_attn_weights": True,
    "seq_length": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_dynamic_ntk": True,
    "use_flash_attn": "auto",
    "use_logn_attn": True,
    "vocab_size": VOCAB_SIZE,
    **TOKENS,
}
CHATGLM: dict[str, Any] = {
    "architectures": ["ChatGLMModel"],
    "bos_token_id": 207,
    "eos_token_id": 208,
    "gmask_token_id": 206,
    "hidden_size": 48,
    "inner_hidden_size": 64,
    "layernorm_epsilon": 1e-5,
    "mask_token_id": 205,
    "max_sequence_length": 256,
    "model_type": "chatglm",
    "num_attention_heads": 3,
    "num_layers": 2,
    "pad_token_id": 3,
    "position_encoding_2d": True,
    "pre_seq_len": None,
    "prefix_projection": False,
    "quantization_bit": 0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}
CHATGLM2: dict[str, Any] = {
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["ChatGLMModel"],
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "ffn_hidden_size": 40,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "hidden_size": 32,
    "kv_channels": 8,
    "layernorm_epsilon": 1e-5,
    "model_type": "chatglm",
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 4,
    "num_layers": 2,
    "original_rope": True,
    "padded_vocab_size": VOCAB_SIZE,
    "post_layer_norm": True,
    "rmsnorm": True,
    "seq_length": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
    **TOKENS,
}
INTERNLM2: dict[str, Any] = {
    "architectures": ["InternLM2ForCausalLM"],
    "attn_implementation": "eager",
    "bias": False,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "max_position_embeddings": 256,
    "model_type": "internlm2",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
    **TOKENS,
}
MINICPM: dict[str, Any] = {
    "architectures": ["MiniCPMForCausalLM"],
    "dim_model_base": 144,
    "hidden_act": "silu",
    "hidden_size": 48,
    "initializer_range": 0.1,
    "intermediate_size": 40,
    "max_position_embeddings": 256,
    "model_type": "minicpm",
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "scale_depth": 2.0,
    "scale_emb": 2,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
    **TOKENS,
}
GPT: dict[str, Any] = {
    "architectures": ["GPTForCausalLM"],
    "attention_probs_dropout_prob": 0.1,
    "dtype": "float32",
    "eol_token_id": 3,
    "fuse_attention_qkv": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 48,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "max_position_embeddings": 144,
    "model_type": "gpt",
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "paddlenlp_version": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "type_vocab_size": 1,
    "vocab_size": VOCAB_SIZE,
    **TOKENS,
}
ERNIE: dict[str, Any] = {
    "architectures": ["Ernie35ForCausalLM"],
    "enable_random_position_ids": True,
    "fuse_linear": False,
    "fuse_ln": False,
    "hidden_size": 32,
    "ignored_index": -100,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "layer_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "model_type": "ernie",
    "num_attention_heads": 2,
    "num_hidden_layers": 4,
    "paddlenlp_version": None,
    "parallel_attn_hatf": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_bias": True,
    "use_flash_attention": True,
    "vocab_size": VOCAB_SIZE,
    "weight_share_add_bias": True,
    **TOKENS,
}
NUMPY_CASES: dict[str, NumpyCase] = {
    "gpt_paddlenlp": NumpyCase(
        forward=gpt,
        shapes=gpt_shapes,
        config=GPT,
        transposed=True,
        matrix=3.0,
        attention_output=9.0,
        bias=0.2,
    ),
    "gpt_paddlenlp_fused": NumpyCase(
        forward=gpt,
        shapes=gpt_shapes,
        config=GPT | {"fuse_attention_qkv": True, "hidden_size": 32, "num_attention_heads": 2},
        transposed=True,
        matrix=3.0,
        attention_output=9.0,
        bias=0.2,
    ),
    "ernie_3_5_se": NumpyCase(
        forward=ernie,
        shapes=ernie_shapes,
        config=ERNIE,
        transposed=True,
        without=({"enable_random_position_ids": False},),
        matrix=2.0,
        attention_output=4.0,
        bias=0.2,
    ),
    "ernie_3_5_se_parallel": NumpyCase(
        forward=ernie,
        shapes=ernie_shapes,
        config=ERNIE
        | {
            "enable_random_position_ids": False,
            "num_hidden_layers": 2,
            "parallel_attn_hatf": False,
            "use_bias": False,
        },
        transposed=True,
        matrix=2.0,
        attention_output=4.0,
    ),
    "baichuan_7b": NumpyCase(
        forward=baichuan,
        shapes=baichuan_shapes,
        config=BAICHUAN
        | {
            "architectures": ["BaiChuanForCausalLM"],
            "hidden_size": 32,
            "max_position_embeddings": 256,
            "num_attention_heads": 2,
        },
    ),
    "baichuan_13b": NumpyCase(
        forward=baichuan,
        shapes=baichuan_shapes,
        config=BAICHUAN,
        without=({"alibi_slopes": np.zeros}, {"max_position_embeddings": 256}),
        attention_output=3.0,
    ),
    "baichuan_2_13b": NumpyCase(
        forward=baichuan,
        shapes=baichuan_shapes,
        config=BAICHUAN | {"hidden_size": 32, "num_attention_heads": 4, "z_loss_weight": 0},
        without=({"alibi_slopes": np.zeros}, {"z_loss_weight": None}),
        attention_output=3.0,
        last_norm=3.0,
    ),
    "qwen_7b": NumpyCase(forward=qwen, shapes=qwen_shapes, config=QWEN),
    "qwen_long": NumpyCase(  # prompts within, near and far past seq_length; one grows past it
        forward=qwen,
        shapes=qwen_shapes,
        config=QWEN | {"seq_length": 32},
        without=({"use_dynamic_ntk": False}, {"use_logn_attn": False}),
        prompt_lens=(1, 5, 17, 43, 103),
    ),
    "chatglm_6b": NumpyCase(
        forward=chatglm,
        shapes=chatglm_shapes,
        config=CHATGLM,
        without=(
            {"prefix_mask": lambda num_tokens, _: causal(num_tokens)},
            {"positions_2d": lambda n, mask, start: (np.arange(n), np.zeros(n))},
        ),
        prompt_lens=(2, 5, 17, 67, 103),
        matrix=3.0,
        attention_output=9.0,
    ),
    "chatglm_2_6b": NumpyCase(
        forward=chatglm2,
        shapes=chatglm2_shapes,
        config=CHATGLM2,
        without=({"rotate_pairs": rotate_halves},),
    ),
    "chatglm_glm4": NumpyCase(  # its heads are wider than hidden_size / num_attention_heads
        forward=chatglm2,
        shapes=chatglm2_shapes,
        config=CHATGLM2
        | {
            "kv_channels": 32,
            "layernorm_epsilon": 1.5625e-07,
            "multi_query_group_num": 1,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "rope_ratio": 500,
        },
        without=({"rotate_pairs": rotate_halves}, {"rope_ratio": 1}),
    ),
    "internlm2_7b": NumpyCase(
        forward=internlm2,
        shapes=internlm2_shapes,
        config=INTERNLM2,
        without=({"rope_theta": 10000},),
    ),
    "minicpm_2b": NumpyCase(
        forward=minicpm,
        shapes=minicpm_shapes,
        config=MINICPM,
        without=({"scale_emb": 1}, {"scale_depth": 1.0}, {"dim_model_base": 48}),
        embedding=1.0,
    ),
    "minicpm_gqa": NumpyCase(
        forward=minicpm,
        shapes=minicpm_shapes,
        config=MINICPM
        | {
            "dim_model_base": 24,
            "num_key_value_heads": 1,
            "scale_depth": 1.4,
            "scale_emb": 12,
            "tie_word_embeddings": False,
        },
        without=({"scale_emb": 1}, {"scale_depth": 1.0}, {"dim_model_base": 48}),
        embedding=0.5,
        last_norm=16.0,
    ),
}
