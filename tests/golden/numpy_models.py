"""Forward passes in NumPy of the families that transformers has no class for.

Written from the published descriptions and read by nothing but the goldens: no cache, no batches,
one pass over a whole sequence in float64 for each token. A family is a function of config.json,
the weights by their names in the checkpoint, the tokens, and how many of them are the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]
Config = Mapping[str, Any]
Weights = Mapping[str, Matrix]
Forward = Callable[[Config, Weights, Sequence[int], int], Matrix]


# ---- what layers are made of


def linear(weights: Weights, name: str, x: Matrix) -> Matrix:
    """X times the transposed matrix, plus the bias if the checkpoint has one."""
    product = x @ weights[f"{name}.weight"].T
    bias = weights.get(f"{name}.bias")
    return product if bias is None else product + bias


def rms_norm(weights: Weights, name: str, x: Matrix, eps: float) -> Matrix:
    """Rows of root mean square 1, times the weights."""
    size = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return x / size * weights[f"{name}.weight"]


def layer_norm(weights: Weights, name: str, x: Matrix, eps: float) -> Matrix:
    """Rows of mean 0 and variance 1, times the weights, plus the bias."""
    centered = x - x.mean(axis=-1, keepdims=True)
    variance = np.mean(centered * centered, axis=-1, keepdims=True)
    scaled = centered / np.sqrt(variance + eps)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def turned(weights: Weights, name: str, x: Matrix) -> Matrix:
    """As linear, of PaddleNLP's matrices: [in, out]."""
    product = x @ weights[f"{name}.weight"]
    bias = weights.get(f"{name}.bias")
    return product if bias is None else product + bias


def silu(x: Matrix) -> Matrix:
    """X times its logistic."""
    return x / (1 + np.exp(-x))


def gelu_tanh(x: Matrix) -> Matrix:
    """The tanh approximation of GELU."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + np.tanh(inner))


def heads(x: Matrix, num_heads: int) -> Matrix:
    """[num_tokens, num_heads * head_dim] as [num_heads, num_tokens, head_dim]."""
    return x.reshape(len(x), num_heads, -1).transpose(1, 0, 2)


def angles(positions: Matrix, rotary_dim: int, base: float) -> Matrix:
    """[num_tokens, rotary_dim / 2]: by how much each pair of elements turns."""
    exponents = np.arange(0, rotary_dim, 2) / rotary_dim
    return np.outer(positions, base**-exponents)


def rotate_halves(x: Matrix, turns: Matrix) -> Matrix:
    """Element i turned with element i + head_dim / 2."""
    a, b = np.split(x, 2, axis=-1)
    cos, sin = np.cos(turns), np.sin(turns)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rotate_pairs(x: Matrix, turns: Matrix) -> Matrix:
    """Element 2i turned with element 2i + 1."""
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = np.cos(turns), np.sin(turns)
    return np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)


def causal(num_tokens: int) -> Matrix:
    """0 where a token sees another, minus infinity where it comes later."""
    return np.triu(np.full((num_tokens, num_tokens), -np.inf), 1)


def alibi_slopes(num_heads: int) -> Matrix:
    """Press et al., "Train Short, Test Long": a geometric series.

    For a number of heads that is no power of two: the series of the next lower power, then every
    other slope of the next higher one's.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = 2 ** (-8 * np.arange(1, power + 1) / power)
    between = 2 ** (-8 * np.arange(1, 2 * power + 1, 2) / (2 * power))
    return np.concatenate([slopes, between[: num_heads - power]])


def attention(q: Matrix, k: Matrix, v: Matrix, added: Matrix) -> Matrix:
    """Softmax attention of [heads, num_tokens, head_dim]; `added` goes to the scaled scores.

    Query heads share key and value heads in groups that follow each other.
    """
    group = len(q) // len(k)
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1]) + added
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    mixed = shares @ v
    return mixed.transpose(1, 0, 2).reshape(q.shape[1], -1)


def positions_of(tokens: Sequence[int]) -> Matrix:
    """0, 1, 2, ..."""
    return np.arange(len(tokens), dtype=np.float64)


# ---- families


def baichuan(config: Config, weights: Weights, tokens: Sequence[int], _: int) -> Matrix:
    """Baichuan: Llama with one matrix for queries, keys and values, stacked in this order.

    The 7B models rotate, the 13B ones (whose config.json has no max_position_embeddings) slope.
    Baichuan 2 (z_loss_weight in its config.json) has a head whose rows are of length 1.
    """
    eps, num_heads = config["rms_norm_eps"], config["num_attention_heads"]
    num_tokens = len(tokens)
    slopes = alibi_slopes(num_heads)[:, None, None] * positions_of(tokens)
    rotary = "max_position_embeddings" in config
    added = causal(num_tokens) + (0 if rotary else slopes)
    turns = angles(positions_of(tokens), config["hidden_size"] // num_heads, 10000.0)
    x = weights["model.embed_tokens.weight"][list(tokens)]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        normed = rms_norm(weights, f"{name}.input_layernorm", x, eps)
        packed = linear(weights, f"{name}.self_attn.W_pack", normed)
        q, k, v = (heads(part, num_heads) for part in np.split(packed, 3, axis=-1))
        if rotary:
            q, k = rotate_halves(q, turns), rotate_halves(k, turns)
        x = x + linear(weights, f"{name}.self_attn.o_proj", attention(q, k, v, added))
        normed = rms_norm(weights, f"{name}.post_attention_layernorm", x, eps)
        gate = silu(linear(weights, f"{name}.mlp.gate_proj", normed))
        up = linear(weights, f"{name}.mlp.up_proj", normed)
        x = x + linear(weights, f"{name}.mlp.down_proj", gate * up)
    x = rms_norm(weights, "model.norm", x, eps)
    head = weights["lm_head.weight"]
    if "z_loss_weight" in config:
        head = head / np.linalg.norm(head, axis=-1, keepdims=True)
    return x @ head.T


def qwen(config: Config, weights: Weights, tokens: Sequence[int], prompt_len: int) -> Matrix:
    """Qwen (the first): biases on queries, keys and values, MLPs of half intermediate_size.

    With use_dynamic_ntk the base of the rotary angles grows with the prompt, in steps, once it is
    longer than seq_length; tokens generated later keep the base of their prompt. With
    use_logn_attn a query past seq_length is scaled by the logarithm of its position to that base.
    """
    eps, num_heads = config["layer_norm_epsilon"], config["num_attention_heads"]
    head_dim, seq_length = config["kv_channels"], config["seq_length"]
    alpha = 1
    if config["use_dynamic_ntk"]:
        alpha = max(2 ** math.ceil(math.log2(prompt_len / seq_length) + 1) - 1, 1)
    base = config["rotary_emb_base"] * alpha ** (head_dim / (head_dim - 2))
    turns = angles(positions_of(tokens), head_dim, base)
    logn = np.ones(len(tokens))
    if config["use_logn_attn"]:
        logn = np.maximum(np.log(positions_of(tokens) + 1) / math.log(seq_length), 1)
    x = weights["transformer.wte.weight"][list(tokens)]
    for layer in range(config["num_hidden_layers"]):
        name = f"transformer.h.{layer}"
        normed = rms_norm(weights, f"{name}.ln_1", x, eps)
        packed = linear(weights, f"{name}.attn.c_attn", normed)
        q, k, v = (heads(part, num_heads) for part in np.split(packed, 3, axis=-1))
        q, k = rotate_halves(q, turns) * logn[:, None], rotate_halves(k, turns)
        mixed = attention(q, k, v, causal(len(tokens)))
        x = x + linear(weights, f"{name}.attn.c_proj", mixed)
        normed = rms_norm(weights, f"{name}.ln_2", x, eps)
        up = linear(weights, f"{name}.mlp.w1", normed)
        gate = silu(linear(weights, f"{name}.mlp.w2", normed))
        x = x + linear(weights, f"{name}.mlp.c_proj", up * gate)
    return linear(weights, "lm_head", rms_norm(weights, "transformer.ln_f", x, eps))


def prefix_mask(num_tokens: int, num_prefix: int) -> Matrix:
    """As causal, but all see the first `num_prefix` tokens."""
    mask = causal(num_tokens)
    mask[:, :num_prefix] = 0
    return mask


def positions_2d(num_tokens: int, mask_position: int, start: int) -> tuple[Matrix, Matrix]:
    """Positions of a ChatGLM prompt whose <bos> is at `start`, and its block positions."""
    positions = np.arange(num_tokens, dtype=np.float64)
    blocks = np.maximum(positions - start + 1, 0)
    return np.where(positions < start, positions, mask_position), blocks


def chatglm(config: Config, weights: Weights, tokens: Sequence[int], prompt_len: int) -> Matrix:
    """ChatGLM-6B: positions in two dimensions, prompts that see each other both ways.

    A prompt ends with a mask token and <bos>. Tokens before <bos> have positions 0, 1, ... and
    block positions 0; <bos> and what follows have the position of the mask token and block
    positions 1, 2, .... The first half of a head rotates by the position, the other by the block
    position. Every token sees all tokens before <bos>. A sublayer is added to its own normed
    input times sqrt(2 * num_layers).
    """
    eps, num_heads, num_layers = (
        config[key] for key in ("layernorm_epsilon", "num_attention_heads", "num_layers")
    )
    head_dim = config["hidden_size"] // num_heads
    prompt = list(tokens[:prompt_len])
    start = prompt.index(config["bos_token_id"])
    mask_token = config["gmask_token_id"]
    if mask_token not in prompt:
        mask_token = config["mask_token_id"]
    both = positions_2d(len(tokens), prompt.index(mask_token), start)
    turns = [angles(positions, head_dim // 2, 10000.0) for positions in both]
    added = prefix_mask(len(tokens), start)
    alpha = math.sqrt(2 * num_layers)

    def rotate(x: Matrix) -> Matrix:
        parts = zip(np.split(x, 2, axis=-1), turns, strict=True)
        return np.concatenate([rotate_halves(part, turn) for part, turn in parts], axis=-1)

    x = weights["transformer.word_embeddings.weight"][list(tokens)]
    for layer in range(num_layers):
        name = f"transformer.layers.{layer}"
        normed = layer_norm(weights, f"{name}.input_layernorm", x, eps)
        packed = linear(weights, f"{name}.attention.query_key_value", normed)
        q, k, v = np.split(heads(packed, num_heads), 3, axis=-1)  # of each head: q, k, v
        mixed = attention(rotate(q), rotate(k), v, added)
        x = normed * alpha + linear(weights, f"{name}.attention.dense", mixed)
        normed = layer_norm(weights, f"{name}.post_attention_layernorm", x, eps)
        inner = gelu_tanh(linear(weights, f"{name}.mlp.dense_h_to_4h", normed))
        x = normed * alpha + linear(weights, f"{name}.mlp.dense_4h_to_h", inner)
    x = layer_norm(weights, "transformer.final_layernorm", x, eps)
    return linear(weights, "lm_head", x)


def chatglm2(config: Config, weights: Weights, tokens: Sequence[int], _: int) -> Matrix:
    """ChatGLM2, ChatGLM3 and GLM-4 (of their own code): half of a head rotates, in pairs.

    One matrix has the rows of all queries, then of all keys, then of all values; one has those of
    the MLP's gate, then of what it gates. rope_ratio multiplies the base of the angles.
    """
    eps, num_heads = config["layernorm_epsilon"], config["num_attention_heads"]
    head_dim, num_kv_heads = config["kv_channels"], config["multi_query_group_num"]
    base = 10000.0 * config.get("rope_ratio", 1)
    turns = angles(positions_of(tokens), head_dim // 2, base)

    def rotate(x: Matrix) -> Matrix:
        rotated, rest = np.split(x, 2, axis=-1)
        return np.concatenate([rotate_pairs(rotated, turns), rest], axis=-1)

    x = weights["transformer.embedding.word_embeddings.weight"][list(tokens)]
    for layer in range(config["num_layers"]):
        name = f"transformer.encoder.layers.{layer}"
        normed = rms_norm(weights, f"{name}.input_layernorm", x, eps)
        packed = linear(weights, f"{name}.self_attention.query_key_value", normed)
        ends = np.cumsum([num_heads * head_dim, num_kv_heads * head_dim])
        counts = (num_heads, num_kv_heads, num_kv_heads)
        q, k, v = map(heads, np.split(packed, ends, axis=-1), counts)
        mixed = attention(rotate(q), rotate(k), v, causal(len(tokens)))
        x = x + linear(weights, f"{name}.self_attention.dense", mixed)
        normed = rms_norm(weights, f"{name}.post_attention_layernorm", x, eps)
        gate, up = np.split(linear(weights, f"{name}.mlp.dense_h_to_4h", normed), 2, axis=-1)
        x = x + linear(weights, f"{name}.mlp.dense_4h_to_h", silu(gate) * up)
    x = rms_norm(weights, "transformer.encoder.final_layernorm", x, eps)
    return linear(weights, "transformer.output_layer", x)


def internlm2(config: Config, weights: Weights, tokens: Sequence[int], _: int) -> Matrix:
    """InternLM2: Llama by other names; wqkv has each key head's queries, then its key and value."""
    eps, num_heads = config["rms_norm_eps"], config["num_attention_heads"]
    num_kv_heads, hidden_size = config["num_key_value_heads"], config["hidden_size"]
    head_dim, group = hidden_size // num_heads, num_heads // num_kv_heads
    turns = angles(positions_of(tokens), head_dim, config["rope_theta"])
    x = weights["model.tok_embeddings.weight"][list(tokens)]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        normed = rms_norm(weights, f"{name}.attention_norm", x, eps)
        packed = linear(weights, f"{name}.attention.wqkv", normed)
        grouped = packed.reshape(len(tokens), num_kv_heads, group + 2, head_dim)
        q = heads(grouped[:, :, :group].reshape(len(tokens), -1), num_heads)
        k, v = (grouped[:, :, group + i].transpose(1, 0, 2) for i in (0, 1))
        q, k = rotate_halves(q, turns), rotate_halves(k, turns)
        mixed = attention(q, k, v, causal(len(tokens)))
        x = x + linear(weights, f"{name}.attention.wo", mixed)
        normed = rms_norm(weights, f"{name}.ffn_norm", x, eps)
        gate = silu(linear(weights, f"{name}.feed_forward.w1", normed))
        up = linear(weights, f"{name}.feed_forward.w3", normed)
        x = x + linear(weights, f"{name}.feed_forward.w2", gate * up)
    return linear(weights, "output", rms_norm(weights, "model.norm", x, eps))


def minicpm(config: Config, weights: Weights, tokens: Sequence[int], _: int) -> Matrix:
    """MiniCPM: Llama whose embeddings, branches and last hidden states are scaled."""
    eps, num_heads = config["rms_norm_eps"], config["num_attention_heads"]
    num_layers, hidden_size = config["num_hidden_layers"], config["hidden_size"]
    branch = config["scale_depth"] / math.sqrt(num_layers)
    turns = angles(positions_of(tokens), hidden_size // num_heads, 10000.0)
    x = weights["model.embed_tokens.weight"][list(tokens)] * config["scale_emb"]
    for layer in range(num_layers):
        name = f"model.layers.{layer}"
        normed = rms_norm(weights, f"{name}.input_layernorm", x, eps)
        counts = (num_heads, config["num_key_value_heads"], config["num_key_value_heads"])
        q, k, v = (
            heads(linear(weights, f"{name}.self_attn.{part}_proj", normed), count)
            for part, count in zip("qkv", counts, strict=True)
        )
        q, k = rotate_halves(q, turns), rotate_halves(k, turns)
        mixed = attention(q, k, v, causal(len(tokens)))
        x = x + branch * linear(weights, f"{name}.self_attn.o_proj", mixed)
        normed = rms_norm(weights, f"{name}.post_attention_layernorm", x, eps)
        gate = silu(linear(weights, f"{name}.mlp.gate_proj", normed))
        up = linear(weights, f"{name}.mlp.up_proj", normed)
        x = x + branch * linear(weights, f"{name}.mlp.down_proj", gate * up)
    x = rms_norm(weights, "model.norm", x, eps) / (hidden_size / config["dim_model_base"])
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return linear(weights, head, x)


def gpt(config: Config, weights: Weights, tokens: Sequence[int], _: int) -> Matrix:
    """PaddleNLP's GPT: GPT-2 whose queries, keys and values are apart, or together head by head."""
    eps, num_heads = 1e-5, config["num_attention_heads"]
    word = weights["gpt.embeddings.word_embeddings.weight"]
    x = word[list(tokens)] + weights["gpt.embeddings.position_embeddings.weight"][: len(tokens)]
    for layer in range(config["num_hidden_layers"]):
        name = f"gpt.decoder.layers.{layer}"
        normed = layer_norm(weights, f"{name}.norm1", x, eps)
        if config.get("fuse_attention_qkv", False):
            packed = heads(turned(weights, f"{name}.self_attn.qkv_proj", normed), num_heads)
            q, k, v = np.split(packed, 3, axis=-1)
        else:
            q, k, v = (
                heads(turned(weights, f"{name}.self_attn.{part}_proj", normed), num_heads)
                for part in "qkv"
            )
        mixed = attention(q, k, v, causal(len(tokens)))
        x = x + turned(weights, f"{name}.self_attn.out_proj", mixed)
        normed = layer_norm(weights, f"{name}.norm2", x, eps)
        inner = gelu_tanh(turned(weights, f"{name}.linear1", normed))
        x = x + turned(weights, f"{name}.linear2", inner)
    return layer_norm(weights, "gpt.decoder.norm", x, eps) @ word.T


def spread_positions(num_tokens: int) -> Matrix:
    """Where ERNIE 3.5 SE's tokens stand, having been trained with gaps between them."""
    return 8 * np.arange(num_tokens, dtype=np.float64) + 7


def ernie(config: Config, weights: Weights, tokens: Sequence[int], _: int) -> Matrix:
    """ERNIE 3.5 SE: attention and a gated MLP side by side, their matrices in one.

    With parallel_attn_hatf the first layer has attention alone, the last one the MLP alone. One
    matrix makes queries, keys and values (head by head), the gate and what it gates; another takes
    the MLP's inner values, then the mixed values.
    """
    eps, num_heads = config["layer_norm_eps"], config["num_attention_heads"]
    hidden, num_layers = config["hidden_size"], config["num_hidden_layers"]
    positions = positions_of(tokens)
    if config["enable_random_position_ids"]:
        positions = spread_positions(len(tokens))
    turns = angles(positions, hidden // num_heads, 10000.0)

    def mix(q: Matrix, k: Matrix, v: Matrix) -> Matrix:
        added = causal(len(tokens))
        return attention(rotate_halves(q, turns), rotate_halves(k, turns), v, added)

    x = weights["ernie.embed_tokens.weight"][list(tokens)]
    for layer in range(num_layers):
        name = f"ernie.layers.{layer}"
        if f"{name}.self_attn_mlp.o_proj.weight" in weights:
            normed = layer_norm(weights, f"{name}.input_layernorm", x, eps)
            packed = turned(weights, f"{name}.self_attn_mlp.qkv_gate_up_proj", normed)
            ends = [3 * hidden, 3 * hidden + config["intermediate_size"]]
            packed, gate, up = np.split(packed, ends, axis=-1)
            mixed = mix(*np.split(heads(packed, num_heads), 3, axis=-1))
            both = np.concatenate([silu(gate) * up, mixed], axis=-1)
            x = x + turned(weights, f"{name}.self_attn_mlp.o_proj", both)
        elif layer == 0:
            normed = layer_norm(weights, f"{name}.input_layernorm", x, eps)
            q, k, v = (
                heads(turned(weights, f"{name}.self_attn.{part}_proj", normed), num_heads)
                for part in "qkv"
            )
            x = x + turned(weights, f"{name}.self_attn.o_proj", mix(q, k, v))
        else:
            normed = layer_norm(weights, f"{name}.post_attention_layernorm", x, eps)
            gate = silu(turned(weights, f"{name}.mlp.gate_proj", normed))
            up = turned(weights, f"{name}.mlp.up_proj", normed)
            x = x + turned(weights, f"{name}.mlp.down_proj", gate * up)
    return turned(weights, "lm_head", layer_norm(weights, "ernie.norm", x, eps))
