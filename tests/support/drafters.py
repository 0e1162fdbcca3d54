"""Tiny drafters of hidden states in published layouts, and what they draft by plain NumPy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from tests.support.tiny import CONFIG, tensors

Array = npt.NDArray[Any]
Tensors = dict[str, Any]
HIDDEN, VOCAB, INNER = CONFIG["hidden_size"], CONFIG["vocab_size"], CONFIG["intermediate_size"]
LAYERS = 6  # of the target
NUM_DRAFT_TOKENS = 120  # of reduced vocabularies
LAYER = "layers.0."


def write_head(directory: Path, config: Mapping[str, Any], made: Tensors, name: str = "") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    arrays = {key: np.ascontiguousarray(value) for key, value in made.items()}
    save_file(arrays, directory / (name or "model.safetensors"))
    return directory


def _random(shapes: Mapping[str, Sequence[int]], seed: int) -> Tensors:
    generator = np.random.default_rng(seed)
    made: Tensors = {}
    for name, shape in shapes.items():
        values = generator.standard_normal(shape, dtype=np.float32)
        made[name] = 1 + 0.1 * values if name.endswith("norm.weight") else 0.15 * values
    return made


def _layer(at: str, width: int, hidden: int = HIDDEN) -> dict[str, tuple[int, ...]]:
    query = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    key = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    return {
        f"{at}self_attn.q_proj.weight": (query, width),
        f"{at}self_attn.k_proj.weight": (key, width),
        f"{at}self_attn.v_proj.weight": (key, width),
        f"{at}self_attn.o_proj.weight": (hidden, query),
        f"{at}post_attention_layernorm.weight": (hidden,),
        f"{at}mlp.gate_proj.weight": (INNER, hidden),
        f"{at}mlp.up_proj.weight": (INNER, hidden),
        f"{at}mlp.down_proj.weight": (hidden, INNER),
    }


HEAD_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    **{key: CONFIG[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")},
    **{key: CONFIG[key] for key in ("num_key_value_heads", "head_dim", "vocab_size")},
    "num_hidden_layers": 1,
    "rms_norm_eps": CONFIG["rms_norm_eps"],
    "max_position_embeddings": 512,
}


def eagle1(seed: int = 1, own_embedding: bool = True, hidden: int = HIDDEN) -> Tensors:
    shapes: dict[str, Sequence[int]] = {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,)}
    if own_embedding:
        shapes["embed_tokens.weight"] = (VOCAB, hidden)
    return _random(shapes | _layer(LAYER, hidden, hidden), seed)


def eagle3(seed: int = 2, num_taps: int = 3, at: str = "midlayer.", more: Any = ()) -> Tensors:
    shapes: dict[str, Sequence[int]] = {
        f"{at}hidden_norm.weight": (HIDDEN,),
        f"{at}input_layernorm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (NUM_DRAFT_TOKENS, HIDDEN),
        **dict(more),
    }
    if num_taps:
        shapes["fc.weight"] = (HIDDEN, num_taps * HIDDEN)
    made = _random(shapes | _layer(at, 2 * HIDDEN), seed)
    ids = np.sort(np.random.default_rng(seed).permutation(VOCAB)[:NUM_DRAFT_TOKENS])
    made["d2t"] = ids - np.arange(NUM_DRAFT_TOKENS)
    made["t2d"] = np.isin(np.arange(VOCAB), ids)
    return made


def medusa(num_heads: int = 3, num_layers: int = 1, seed: int = 3, shared: bool = False) -> Tensors:
    shapes: dict[str, Sequence[int]] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            shapes[f"{head}.{layer}.linear.weight"] = (HIDDEN, HIDDEN)
            shapes[f"{head}.{layer}.linear.bias"] = (HIDDEN,)
        if not shared:
            shapes[f"{head}.{num_layers}.weight"] = (VOCAB, HIDDEN)
    return _random(shapes, seed)


# The same by NumPy: rows one after another, each over all rows before it.


def rms(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"]) * weight


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def rotated(x: Array, positions: Array, theta: float, interleaved: bool) -> Array:
    """[T, heads, D], pairs (i, i + D/2), or (2i, 2i + 1)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / theta ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else np.split(x, 2, axis=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    return np.stack(turned, -1).reshape(x.shape) if interleaved else np.concatenate(turned, -1)


def attention(
    x: Array,
    weights: Tensors,
    at: str,
    head_dim: int = CONFIG["head_dim"],
    theta: float = 10000.0,
    interleaved: bool = False,
) -> Array:
    """Of all rows [T, width] to [T, H], causal, without its norm and its sum."""
    positions = np.arange(len(x))
    q, k, v = (
        (x @ weights[f"{at}self_attn.{name}_proj.weight"].T).reshape(len(x), -1, head_dim)
        for name in "qkv"
    )
    q, k = (rotated(each, positions, theta, interleaved) for each in (q, k))
    groups = q.shape[1] // k.shape[1]
    k, v = (np.repeat(each, groups, axis=1) for each in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) * head_dim**-0.5
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    mixed = np.einsum("hts,shd->thd", shares, v).reshape(len(x), -1)
    made: Array = mixed @ weights[f"{at}self_attn.o_proj.weight"].T
    return made


def mlp(x: Array, weights: Tensors, at: str) -> Array:
    gate, up, down = (weights[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    made: Array = (silu(x @ gate.T) * (x @ up.T)) @ down.T
    return made


class Target:
    """A tiny Llama by NumPy."""

    def __init__(self, config: Mapping[str, Any], seed: int = 0):
        made = tensors({**CONFIG, **config}, seed)
        self.weights = {name: value.astype(np.float64) for name, value in made.items()}
        self.num_layers = {**CONFIG, **config}["num_hidden_layers"]
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.head = self.weights["lm_head.weight"]

    def states(self, token_ids: Sequence[int]) -> list[Array]:
        """The embedding, what each layer gives, and the final state behind the norm."""
        hidden, weights = self.embedding[list(token_ids)], self.weights
        states = [hidden]
        for layer in range(self.num_layers):
            at = f"model.layers.{layer}."
            x = rms(hidden, weights[f"{at}input_layernorm.weight"])
            hidden = hidden + attention(x, weights, at)
            x = rms(hidden, weights[f"{at}post_attention_layernorm.weight"])
            hidden = hidden + mlp(x, weights, at)
            states.append(hidden)
        return [*states, rms(hidden, weights["model.norm.weight"])]


def _plain(made: Tensors) -> Tensors:
    return {
        name.removeprefix("model.").replace("midlayer.", LAYER): value.astype(np.float64)
        for name, value in made.items()
    }


def chained(rows: Any, states: Array, tokens: Sequence[int], count: int) -> list[Array]:
    """The logits of `count` drafts. rows(states, tokens): outputs that are fed on, and logits.

    states: [T, H] of places 0..T-1. tokens: T + 1; the row of place i has token i + 1.
    """
    known, found = list(tokens), []
    for _ in range(count):
        fed, logits = rows(states, known[1:])
        found.append(logits[-1])
        known.append(int(logits[-1].argmax()))
        states = np.concatenate([states, fed[-1:]])
    return found


def eagle1_logits(made: Tensors, target: Target, tokens: Sequence[int], count: int) -> list[Array]:
    weights = _plain(made)
    table = weights.get("embed_tokens.weight", target.embedding)

    def rows(states: Array, behind: Sequence[int]) -> tuple[Array, Array]:
        both = np.concatenate([table[list(behind)], states], 1)
        x = both @ weights["fc.weight"].T + weights["fc.bias"]
        x = x + attention(x, weights, LAYER)
        x = x + mlp(rms(x, weights[f"{LAYER}post_attention_layernorm.weight"]), weights, LAYER)
        return x, x @ target.head.T

    return chained(rows, target.states(tokens[:-1])[-1], tokens, count)


def eagle3_logits(
    made: Tensors,
    target: Target,
    tokens: Sequence[int],
    count: int,
    layers: Sequence[int] = (2, LAYERS // 2, LAYERS - 3),
    feeds_normed: bool = False,
    adds_normed: bool = False,
) -> list[Array]:
    """layers: hidden_states[i] of transformers; (): the final state."""
    weights, all_states = _plain(made), target.states(tokens[:-1])
    ids = np.arange(NUM_DRAFT_TOKENS) + made["d2t"]
    taps = [all_states[layer] for layer in layers]
    if "fc_norm.0.weight" in weights:
        taps = [rms(x, weights[f"fc_norm.{index}.weight"]) for index, x in enumerate(taps)]
    first = np.concatenate(taps, 1) if taps else all_states[-1]
    if "input_norm.weight" in weights:
        first = rms(first, weights["input_norm.weight"])
    if taps:
        first = first @ weights["fc.weight"].T

    def rows(states: Array, behind: Sequence[int]) -> tuple[Array, Array]:
        token = rms(target.embedding[list(behind)], weights[f"{LAYER}input_layernorm.weight"])
        normed = rms(states, weights[f"{LAYER}hidden_norm.weight"])
        x = normed if adds_normed else states
        x = x + attention(np.concatenate([token, normed], 1), weights, LAYER)
        x = x + mlp(rms(x, weights[f"{LAYER}post_attention_layernorm.weight"]), weights, LAYER)
        out = rms(x, weights["norm.weight"])
        logits = np.full((len(x), VOCAB), -np.inf)
        logits[:, ids] = out @ weights.get("lm_head.weight", target.embedding[ids]).T
        return out if feeds_normed else x, logits

    return chained(rows, first, tokens, count)


def medusa_logits(
    made: Tensors, target: Target, tokens: Sequence[int], count: int, num_layers: int = 1
) -> list[Array]:
    weights, state = _plain(made), target.states(tokens[:-1])[-1][-1]
    found = []
    for head in range(count):
        x = state
        for layer in range(num_layers):
            name = f"{head}.{layer}.linear"
            x = x + silu(x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])
        logits = x @ weights.get(f"{head}.{num_layers}.weight", target.head).T
        if "token_map" in made:
            logits[~np.isin(np.arange(VOCAB), made["token_map"])] = -np.inf
        found.append(logits)
    return found


MTP_CASES = {"deepseek_v3": "model.layers.2.", "glm4_moe_355b": "model.layers.2."}
MTP_PROMPT = [5, 17, 3, 88, 120, 44, 9, 150, 7, 61, 33, 70, 90, 14, 73, 28, 11, 99, 100, 54, 23]


def mtp_tensors(there: Mapping[str, Array], last: str) -> Tensors:
    """A layer that drafts, behind the last one, whose names begin with `last`: of its shapes.

    With copies of the embedding and the head, as published checkpoints have them.
    """
    at = f"model.layers.{int(last.split('.')[2]) + 1}."
    hidden = there["model.norm.weight"].shape[0]
    shapes: dict[str, Sequence[int]] = {
        f"{at}{name.removeprefix(last)}": value.shape
        for name, value in sorted(there.items())
        if name.startswith(last)
    }
    norms = (f"{at}{name}.weight" for name in ("enorm", "hnorm", "shared_head.norm"))
    shapes |= dict.fromkeys(norms, (hidden,)) | {f"{at}eh_proj.weight": (hidden, 2 * hidden)}
    made = _random(shapes, 7)
    made[f"{at}embed_tokens.weight"] = there["model.embed_tokens.weight"]
    made[f"{at}shared_head.head.weight"] = there["lm_head.weight"]
    return made


def ernie_tensors(config: Mapping[str, Any], seed: int = 8) -> Tensors:
    """ERNIE 4.5's layer for multi-token prediction: a dense one."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    at, inner = "model.mtp_block.0.", config["intermediate_size"]
    query, key = heads * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, Sequence[int]] = {
        "model.mtp_emb_norm.0.weight": (hidden,),
        "model.mtp_hidden_norm.0.weight": (hidden,),
        "model.mtp_linear_proj.0.weight": (hidden, 2 * hidden),
        f"{at}input_layernorm.weight": (hidden,),
        f"{at}post_attention_layernorm.weight": (hidden,),
        f"{at}self_attn.q_proj.weight": (query, hidden),
        f"{at}self_attn.k_proj.weight": (key, hidden),
        f"{at}self_attn.v_proj.weight": (key, hidden),
        f"{at}self_attn.o_proj.weight": (hidden, query),
        f"{at}mlp.gate_proj.weight": (inner, hidden),
        f"{at}mlp.up_proj.weight": (inner, hidden),
        f"{at}mlp.down_proj.weight": (hidden, inner),
    }
    made = _random(shapes, seed)
    return {n: 1 + 0.1 * v if "_norm.0." in n else v for n, v in made.items()}


def ernie_logits(
    made: Tensors,
    config: Mapping[str, Any],
    shared: Mapping[str, Array],
    states: Array,
    tokens: Sequence[int],
    count: int,
) -> list[Array]:
    """shared: the model's embedding, head and last norm. states: of all places but the last."""
    weights = _plain(made)
    table, head, norm = (shared[name].astype(np.float64) for name in ("table", "head", "norm"))
    heads, epsilon = config["num_attention_heads"], config["rms_norm_eps"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    at = "mtp_block.0."

    def normed(x: Array, weight: Array) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight

    def rows(states: Array, behind: Sequence[int]) -> tuple[Array, Array]:
        token = normed(table[list(behind)], weights["mtp_emb_norm.0.weight"])
        state = normed(states, weights["mtp_hidden_norm.0.weight"])
        x = np.concatenate([token, state], 1) @ weights["mtp_linear_proj.0.weight"].T
        y = normed(x, weights[f"{at}input_layernorm.weight"])
        x = x + attention(y, weights, at, head_dim, config["rope_theta"], interleaved=True)
        x = x + mlp(normed(x, weights[f"{at}post_attention_layernorm.weight"]), weights, at)
        out = normed(x, norm)
        return out, out @ head.T

    return chained(rows, states, tokens, count)
