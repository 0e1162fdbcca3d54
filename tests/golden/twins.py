"""Checks of numpy_models.py: the same weights under other names in models that transformers has.

Not for goldens: a twin has not all features, and is compared in what it has.

- Baichuan: Llama. ALiBi as an additive mask, without rotation.
- Qwen: Qwen2, with the base of the angles that the length gives; without the scaling of queries.
- ChatGLM-6B: Bloom with residuals from the normed input; its ALiBi instead of two-dimensional
  positions. A branch by alpha is the same as the residual times alpha, to a norm.
- ChatGLM2: GLM. InternLM2: Llama. MiniCPM: Granite. PaddleNLP's GPT: GPT-2.
- ERNIE 3.5 SE: StableLM with parallel blocks, those that it lacks being zero; no other biases than
  those of queries, keys, values and norms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from tests.golden import numpy_models
from tests.golden.numpy_models import Config, Matrix, Weights

Renamed = dict[str, Matrix]
TOLERANCE = 2e-4  # of logits of size 10, in float32


def check_twin(config: Config, weights: Weights, tokens: Sequence[int]) -> None:
    """Raise AssertionError unless transformers computes the same logits."""
    ours, twins = CHECKS[family_of(config)](config, weights, tokens)
    np.testing.assert_allclose(ours, twins, rtol=TOLERANCE, atol=TOLERANCE)


def family_of(config: Config) -> str:
    """model_type, and which of those that share one."""
    if "multi_query_attention" in config:
        return "chatglm2"
    return str(config["model_type"])


def build(model_type: str, weights: Renamed, **values: Any) -> Any:
    """The model of transformers with the weights, in float32."""
    config = AutoConfig.for_model(
        model_type, bos_token_id=None, eos_token_id=None, pad_token_id=None, **values
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    read = {name: tensor for name, tensor in weights.items() if "inv_freq" not in name}
    state = {name: torch.tensor(tensor).float() for name, tensor in read.items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state[_input_name(state)]
    model.load_state_dict(state)
    return model


def _input_name(state: Mapping[str, Any]) -> str:
    return next(name for name in state if "embed" in name or "wte" in name)


def run(model: Any, tokens: Sequence[int], **inputs: Any) -> Matrix:
    """Logits [num_tokens, vocab_size]."""
    with torch.no_grad():
        logits = model(torch.tensor([list(tokens)]), **inputs).logits[0]
    return np.asarray(logits.double().numpy())


def renamed(weights: Weights, pairs: Mapping[str, str]) -> Renamed:
    """The weights by other names: each part of a name that is a key becomes its value."""
    result = {}
    for old, tensor in weights.items():
        name = old
        for part, other in pairs.items():
            name = name.replace(part, other)
        result[name] = tensor
    return result


def split(weights: Renamed, suffix: str, names: Sequence[str], sizes: Sequence[int]) -> Renamed:
    """The weights with every tensor "<layer>.<suffix>..." cut into rows for each of `names`."""
    result = {}
    for name, tensor in weights.items():
        if f".{suffix}." not in name:
            result[name] = tensor
            continue
        parts = np.split(tensor, np.cumsum(sizes)[:-1])
        for part, values in zip(names, parts, strict=True):
            result[name.replace(suffix, part)] = values
    return result


def llama_values(config: Config, base: float) -> dict[str, Any]:
    """The arguments of Llama's config and of those that follow it."""
    num_heads = config["num_attention_heads"]
    values = {
        key: config[key]
        for key in ("hidden_size", "num_hidden_layers", "tie_word_embeddings", "vocab_size")
    }
    return values | {
        "intermediate_size": config["intermediate_size"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": config.get("num_key_value_heads", num_heads),
        "rms_norm_eps": config.get("rms_norm_eps", config.get("layer_norm_epsilon")),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(base)},
    }


Q_K_V = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
QKV_WEIGHTS = tuple(f"{name}.weight" for name in Q_K_V)
Both = tuple[Matrix, Matrix]


def check_baichuan(config: Config, weights: Weights, tokens: Sequence[int]) -> Both:
    """Llama; with ALiBi: positions that are all 0, and slopes as a mask of each head."""
    ours = numpy_models.baichuan(config, weights, tokens, len(tokens))
    hidden, num_tokens = config["hidden_size"], len(tokens)
    split_weights = split(dict(weights), "self_attn.W_pack", Q_K_V, [hidden] * 3)
    if "z_loss_weight" in config:
        head = torch.tensor(split_weights["lm_head.weight"])
        split_weights["lm_head.weight"] = torch.nn.functional.normalize(head).numpy()
    model = build("llama", split_weights, **llama_values(config, 10000.0))
    if "max_position_embeddings" in config:
        return ours, run(model, tokens)
    num_heads = config["num_attention_heads"]
    ones = torch.ones(1, num_tokens, dtype=torch.int64)
    alibi = build_alibi_tensor(ones, num_heads, torch.float32).view(1, num_heads, 1, num_tokens)
    later = torch.full((num_tokens, num_tokens), -torch.inf).triu(1)
    positions = torch.zeros(1, num_tokens, dtype=torch.int64)
    return ours, run(model, tokens, attention_mask=alibi + later, position_ids=positions)


def check_qwen(config: Config, weights: Weights, tokens: Sequence[int]) -> Both:
    """Qwen2 with the base of a prompt of this length."""
    plain = {**config, "use_logn_attn": False}
    ours = numpy_models.qwen(plain, weights, tokens, len(tokens))
    steps = 0  # how often seq_length doubles until the prompt is within it
    while len(tokens) > config["seq_length"] * 2**steps:
        steps += 1
    alpha, dim = 2 ** (steps + 1) - 1, config["kv_channels"]
    pairs = {
        "transformer.wte": "model.embed_tokens",
        "transformer.h.": "model.layers.",
        "transformer.ln_f": "model.norm",
        "attn.c_attn": "self_attn.c_attn",
        "attn.c_proj": "self_attn.o_proj",
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "mlp.w1": "mlp.up_proj",
        "mlp.w2": "mlp.gate_proj",
        "mlp.c_proj": "mlp.down_proj",
    }
    names = renamed(weights, pairs)
    names = split(names, "self_attn.c_attn", Q_K_V, [config["hidden_size"]] * 3)
    values = llama_values(config, 10000.0 * alpha ** (dim / (dim - 2)))
    values["intermediate_size"] //= 2
    return ours, run(build("qwen2", names, **values), tokens)


def check_chatglm(config: Config, weights: Weights, tokens: Sequence[int]) -> Both:
    """Bloom: everything but positions and the mask of the prompt."""
    num_heads, eps = config["num_attention_heads"], config["layernorm_epsilon"]
    slopes = numpy_models.alibi_slopes(num_heads)[:, None, None]

    def sloped(num_tokens: int, _: int) -> Matrix:
        return numpy_models.causal(num_tokens) + slopes * np.arange(num_tokens)

    with (
        mock.patch.object(numpy_models, "rotate_halves", lambda x, _: x),
        mock.patch.object(numpy_models, "prefix_mask", sloped),
    ):
        ours = numpy_models.chatglm(config, weights, tokens, len(tokens))
    alpha = math.sqrt(2 * config["num_layers"])
    branches = (".attention.dense.", ".mlp.dense_4h_to_h.")
    scaled = {
        name: tensor / (alpha if any(branch in name for branch in branches) else 1)
        for name, tensor in weights.items()
    }
    pairs = {
        "transformer.layers.": "transformer.h.",
        ".attention.": ".self_attention.",
        "final_layernorm": "ln_f",
    }
    names = renamed(scaled, pairs)
    for kind, fill in (("weight", np.ones), ("bias", np.zeros)):
        names[f"transformer.word_embeddings_layernorm.{kind}"] = fill(config["hidden_size"])
    model = build(
        "bloom",
        with_inner_size(names, 4 * config["hidden_size"]),
        hidden_size=config["hidden_size"],
        n_layer=config["num_layers"],
        n_head=num_heads,
        vocab_size=config["vocab_size"],
        layer_norm_epsilon=eps,
        apply_residual_connection_post_layernorm=True,
    )
    model.transformer.word_embeddings_layernorm = torch.nn.Identity()
    for number, layer in enumerate(model.transformer.h):  # of what alpha divides
        layer.input_layernorm.eps = eps / (alpha**2 if number else 1)
        layer.post_attention_layernorm.eps = eps / alpha**2
    model.transformer.ln_f.eps = eps / alpha**2
    return ours, run(model, tokens)


def with_inner_size(weights: Renamed, inner_size: int) -> Renamed:
    """The weights with MLPs of `inner_size`, filled up with elements that do nothing."""
    result = dict(weights)
    for name, tensor in weights.items():
        if "dense_h_to_4h" in name:
            missing = [(0, inner_size - len(tensor))] + [(0, 0)] * (tensor.ndim - 1)
            result[name] = np.pad(tensor, missing)
        elif name.endswith("dense_4h_to_h.weight"):
            result[name] = np.pad(tensor, [(0, 0), (0, inner_size - tensor.shape[1])])
    return result


def check_chatglm2(config: Config, weights: Weights, tokens: Sequence[int]) -> Both:
    """GLM of transformers, with the matrix of queries, keys and values in three."""
    ours = numpy_models.chatglm2(config, weights, tokens, len(tokens))
    pairs = {
        "transformer.embedding.word_embeddings": "model.embed_tokens",
        "transformer.encoder.layers.": "model.layers.",
        "transformer.encoder.final_layernorm": "model.norm",
        "transformer.output_layer": "lm_head",
        "self_attention.query_key_value": "self_attn.qkv",
        "self_attention.dense": "self_attn.o_proj",
        "mlp.dense_h_to_4h": "mlp.gate_up_proj",
        "mlp.dense_4h_to_h": "mlp.down_proj",
    }
    names = renamed(weights, pairs)
    head_dim = config["kv_channels"]
    counts = [config["num_attention_heads"]] + [config["multi_query_group_num"]] * 2
    names = split(names, "self_attn.qkv", Q_K_V, [count * head_dim for count in counts])
    model = build(
        "glm",
        names,
        hidden_size=config["hidden_size"],
        intermediate_size=config["ffn_hidden_size"],
        num_hidden_layers=config["num_layers"],
        num_attention_heads=counts[0],
        num_key_value_heads=counts[1],
        head_dim=head_dim,
        rms_norm_eps=config["layernorm_epsilon"],
        attention_bias=True,
        vocab_size=config["vocab_size"],
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0 * config.get("rope_ratio", 1),
            "partial_rotary_factor": 0.5,
        },
    )
    return ours, run(model, tokens)


def check_internlm2(config: Config, weights: Weights, tokens: Sequence[int]) -> Both:
    """Llama, with the rows of wqkv gathered by what they are."""
    ours = numpy_models.internlm2(config, weights, tokens, len(tokens))
    num_kv_heads = config["num_key_value_heads"]
    group = config["num_attention_heads"] // num_kv_heads
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    rows = np.arange((group + 2) * num_kv_heads * head_dim)
    owner = rows // head_dim % (group + 2)  # which of a key head's queries, or its key or value
    order = np.concatenate([rows[owner < group], rows[owner == group], rows[owner == group + 1]])
    gathered = {n: tensor[order] if "wqkv" in n else tensor for n, tensor in weights.items()}
    pairs = {
        "model.tok_embeddings": "model.embed_tokens",
        "output.weight": "lm_head.weight",
        "attention.wqkv": "self_attn.qkv",
        "attention.wo": "self_attn.o_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
    }
    sizes = [size * num_kv_heads * head_dim for size in (group, 1, 1)]
    names = split(renamed(gathered, pairs), "self_attn.qkv", Q_K_V, sizes)
    model = build("llama", names, **llama_values(config, config["rope_theta"]))
    return ours, run(model, tokens)


def check_minicpm(config: Config, weights: Weights, tokens: Sequence[int]) -> Both:
    """Granite, whose multipliers are the scales."""
    ours = numpy_models.minicpm(config, weights, tokens, len(tokens))
    num_layers, hidden_size = config["num_hidden_layers"], config["hidden_size"]
    model = build(
        "granite",
        dict(weights),
        **llama_values(config, 10000.0),
        embedding_multiplier=float(config["scale_emb"]),
        residual_multiplier=config["scale_depth"] / num_layers**0.5,
        logits_scaling=hidden_size / config["dim_model_base"],
        attention_multiplier=(hidden_size / config["num_attention_heads"]) ** -0.5,
    )
    return ours, run(model, tokens)


def check_gpt(config: Config, weights: Weights, tokens: Sequence[int]) -> Both:
    """GPT-2, which stores its matrices [in, out], too."""
    ours = numpy_models.gpt(config, weights, tokens, len(tokens))
    num_heads, hidden = config["num_attention_heads"], config["hidden_size"]
    pairs = {
        "gpt.embeddings.word_embeddings": "transformer.wte",
        "gpt.embeddings.position_embeddings": "transformer.wpe",
        "gpt.decoder.layers.": "transformer.h.",
        "gpt.decoder.norm": "transformer.ln_f",
        "norm1": "ln_1",
        "norm2": "ln_2",
        "self_attn.out_proj": "attn.c_proj",
        "self_attn.": "attn.",
        "linear1": "mlp.c_fc",
        "linear2": "mlp.c_proj",
    }
    names = renamed(weights, pairs)
    for layer in range(config["num_hidden_layers"]):
        at = f"transformer.h.{layer}.attn"
        for kind in ("weight", "bias"):
            packed = names.pop(f"{at}.qkv_proj.{kind}", None)
            if packed is None:
                parts = [names.pop(f"{at}.{part}_proj.{kind}") for part in "qkv"]
            else:
                lead = packed.shape[:-1]
                by_head = packed.reshape(*lead, num_heads, 3, hidden // num_heads)
                parts = [by_head[..., part, :].reshape(*lead, -1) for part in range(3)]
            names[f"{at}.c_attn.{kind}"] = np.concatenate(parts, axis=-1)
    model = build(
        "gpt2",
        names,
        n_embd=hidden,
        n_inner=config["intermediate_size"],
        n_layer=config["num_hidden_layers"],
        n_head=num_heads,
        n_positions=config["max_position_embeddings"],
        vocab_size=config["vocab_size"],
    )
    return ours, run(model, tokens)


def check_ernie(config: Config, weights: Weights, tokens: Sequence[int]) -> Both:
    """StableLM: a layer without attention, or without MLP, is one whose product makes zeros."""
    num_heads, hidden = config["num_attention_heads"], config["hidden_size"]
    inner, num_layers = config["intermediate_size"], config["num_hidden_layers"]
    plain = {name: tensor for name, tensor in weights.items() if keeps_bias(name)}
    for name in [name for name in plain if name.endswith("qkv_gate_up_proj.bias")]:
        plain[name] = np.where(np.arange(len(plain[name])) < 3 * hidden, plain[name], 0)
    ours = numpy_models.ernie(config, plain, tokens, len(tokens))
    zeros = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    names: Renamed = {
        f"model.layers.{layer}.{name}.weight": np.zeros(shape)
        for layer in range(num_layers)
        for name, shape in zeros.items()
    }
    if config["use_bias"]:
        biases = [name.replace("weight", "bias") for name in names if name.endswith(QKV_WEIGHTS)]
        for name in biases:
            names[name] = np.zeros(hidden)
    for old, tensor in plain.items():
        name = old.replace("ernie.", "model.").replace("post_attention_", "input_")
        layer, _, product = name.partition(".self_attn_mlp.")
        is_matrix = tensor.ndim == 2 and "embed" not in name
        rows = tensor.T if is_matrix else tensor
        if product.startswith("o_proj"):
            names[f"{layer}.mlp.down_proj.weight"] = rows[:, :inner]
            names[f"{layer}.self_attn.o_proj.weight"] = rows[:, inner:]
        elif product:
            kind = product.partition(".")[2]
            by_head = rows[: 3 * hidden].reshape(num_heads, 3, hidden // num_heads, *rows.shape[1:])
            for number, part in enumerate("qkv"):
                own = by_head[:, number].reshape(hidden, *rows.shape[1:])
                names[f"{layer}.self_attn.{part}_proj.{kind}"] = own
            if kind == "weight":
                gate_up = rows[3 * hidden :]
                names[f"{layer}.mlp.gate_proj.weight"] = gate_up[:inner]
                names[f"{layer}.mlp.up_proj.weight"] = gate_up[inner:]
        else:
            names[name] = rows
    model = build(
        "stablelm",
        names,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        layer_norm_eps=config["layer_norm_eps"],
        use_qkv_bias=config["use_bias"],
        use_parallel_residual=True,
        vocab_size=config["vocab_size"],
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
        },
    )
    positions = torch.arange(len(tokens))
    if config["enable_random_position_ids"]:
        positions = 8 * positions + 7
    return ours, run(model, tokens, position_ids=positions[None])


def keeps_bias(name: str) -> bool:
    """Whether a tensor of ERNIE's has a place in StableLM."""
    kept = ("norm", "q_proj.", "k_proj.", "v_proj.", "qkv_gate_up_proj.")
    return name.endswith("weight") or any(part in name for part in kept)


CHECKS = {
    "baichuan": check_baichuan,
    "ernie": check_ernie,
    "gpt": check_gpt,
    "chatglm": check_chatglm,
    "chatglm2": check_chatglm2,
    "internlm2": check_internlm2,
    "minicpm": check_minicpm,
    "qwen": check_qwen,
}
