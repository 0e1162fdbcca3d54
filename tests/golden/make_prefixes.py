"""Makes prefixes.json: what models with a tuned prefix answer, by NumPy.

Attention of each token over [prefix; prompt], in float64, the prefix's keys as they are: nothing
rotates them, positions begin with the prompt as in PaddleNLP's training, and ALiBi's distances
count the prefix. Needs torch and transformers 5; the tests that read the file need neither:

    python -m tests.golden.make_prefixes

One entry per case and length: "model" (a folder beside this file), "num_tokens" and "seed" of the
prefix (`random_prefix`), "prompts" and "greedy" (token ids), "min_margin" of the greedy choices.
Without a prefix each network's answers here are those of its golden.json, which transformers made.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from safetensors.torch import load_file

from tests.golden import numpy_models
from tests.golden.golden import Greedy
from tests.golden.numpy_models import (
    Config,
    Forward,
    Matrix,
    Weights,
    alibi_slopes,
    angles,
    baichuan,
    causal,
    chatglm,
    gelu_tanh,
    heads,
    layer_norm,
    linear,
    positions_of,
    rms_norm,
    rotate_halves,
    silu,
)
from tests.golden.prefixes import random_prefix
from tests.support.packed import unpack

HERE = Path(__file__).resolve().parent
LENGTHS = (5, 16, 21, 40)  # no multiple of a block, one of 16, more than a block
NUM_PROMPTS = 4
NUM_NEW_TOKENS = 24
LEAST_MARGIN = 0.01
Shape = tuple[int, int, int]  # layers, heads of keys and of values, their size


def llama(config: Config, weights: Weights, tokens: Sequence[int], _: int) -> Matrix:
    """Llama with grouped heads."""
    eps, base = config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    turns = angles(positions_of(tokens), config["head_dim"], base)
    x = weights["model.embed_tokens.weight"][list(tokens)]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        normed = rms_norm(weights, f"{name}.input_layernorm", x, eps)
        q, k, v = (
            heads(linear(weights, f"{name}.self_attn.{part}_proj", normed), count)
            for part, count in zip("qkv", (num_heads, num_kv_heads, num_kv_heads), strict=True)
        )
        q, k = rotate_halves(q, turns), rotate_halves(k, turns)
        mixed = numpy_models.attention(q, k, v, causal(len(tokens)))
        x = x + linear(weights, f"{name}.self_attn.o_proj", mixed)
        normed = rms_norm(weights, f"{name}.post_attention_layernorm", x, eps)
        gate = silu(linear(weights, f"{name}.mlp.gate_proj", normed))
        up = linear(weights, f"{name}.mlp.up_proj", normed)
        x = x + linear(weights, f"{name}.mlp.down_proj", gate * up)
    return linear(weights, "lm_head", rms_norm(weights, "model.norm", x, eps))


def bloom(config: Config, weights: Weights, tokens: Sequence[int], _: int) -> Matrix:
    """Bloom: ALiBi, a norm behind the embedding, queries, keys and values head by head."""
    eps, num_heads = config["layer_norm_epsilon"], config["num_attention_heads"]
    slopes = alibi_slopes(num_heads)[:, None, None] * positions_of(tokens)
    added = causal(len(tokens)) + slopes
    embedding = weights["word_embeddings.weight"]
    x = layer_norm(weights, "word_embeddings_layernorm", embedding[list(tokens)], eps)
    for layer in range(config["n_layer"]):
        name = f"h.{layer}"
        normed = layer_norm(weights, f"{name}.input_layernorm", x, eps)
        packed = linear(weights, f"{name}.self_attention.query_key_value", normed)
        q, k, v = np.split(heads(packed, num_heads), 3, axis=-1)
        mixed = numpy_models.attention(q, k, v, added)
        x = x + linear(weights, f"{name}.self_attention.dense", mixed)
        normed = layer_norm(weights, f"{name}.post_attention_layernorm", x, eps)
        inner = gelu_tanh(linear(weights, f"{name}.mlp.dense_h_to_4h", normed))
        x = x + linear(weights, f"{name}.mlp.dense_4h_to_h", inner)
    return layer_norm(weights, "ln_f", x, eps) @ embedding.T


CASES: dict[str, tuple[Forward, Shape]] = {
    "llama_gqa": (llama, (2, 1, 32)),
    "bloom_7b": (bloom, (2, 4, 8)),
    "chatglm_6b": (chatglm, (2, 3, 16)),
    "baichuan_7b": (baichuan, (2, 2, 16)),
    "baichuan_13b": (baichuan, (2, 6, 8)),
}


@contextmanager
def behind(prefix: Matrix) -> Iterator[None]:
    """Lets the networks' attention see a prefix [layers, 2, heads, P, D] before all tokens.

    What is added to a score grows by a slope from one key to the next; the prefix's go on with it.
    """
    attention = numpy_models.attention
    layers = itertools.cycle(prefix)
    distances = np.arange(-prefix.shape[3], 0)

    def attend(q: Matrix, k: Matrix, v: Matrix, added: Matrix) -> Matrix:
        keys, values = next(layers)
        added = np.broadcast_to(added, (len(q), *added.shape[-2:]))
        slopes = added[:, -1:, 1:2] - added[:, -1:, :1]  # of prompts of two tokens and more
        before = added[:, :, :1] + slopes * distances
        whole = np.concatenate([before, added], axis=-1)
        k, v = np.concatenate([keys, k], axis=1), np.concatenate([values, v], axis=1)
        return attention(q, k, v, whole)

    with mock.patch.object(numpy_models, "attention", attend):
        yield


def generate(
    forward: Forward, config: Config, weights: Weights, prompt: Sequence[int], num_tokens: int
) -> Greedy:
    """The greedy continuation of a prompt."""
    tokens, logits = list(prompt), []
    for _ in range(num_tokens):
        logits.append(forward(config, weights, tokens, len(prompt))[-1].astype(np.float32))
        tokens.append(int(logits[-1].argmax()))
    return Greedy(tokens[len(prompt) :], np.stack(logits))


def entry(name: str, num_tokens: int) -> dict[str, Any]:
    """The answers of a case behind the first prefix that leaves no close choice."""
    forward, shape = CASES[name]
    config = json.loads((HERE / name / "config.json").read_text())
    golden = json.loads((HERE / name / "golden.json").read_text())
    stored = load_file(HERE / name / "model.safetensors")
    weights = {key: tensor.double().numpy() for key, tensor in stored.items()}
    plain = [generate(forward, config, weights, prompt, 8) for prompt in golden["prompts"][:2]]
    assert [each.token_ids for each in plain] == [row[:8] for row in golden["greedy"][:2]]
    prompts = [prompt for prompt in golden["prompts"] if len(prompt) > 1][-NUM_PROMPTS:]
    for seed in itertools.count():
        with behind(random_prefix(shape, num_tokens, seed).astype(np.float64)):
            found = [generate(forward, config, weights, p, NUM_NEW_TOKENS) for p in prompts]
        margin = min(each.min_margin for each in found)
        if margin >= LEAST_MARGIN:
            break
    answers = [each.token_ids for each in found]
    with_none = [row[:NUM_NEW_TOKENS] for row in golden["greedy"][-len(prompts) :]]
    assert any(one != other for one, other in zip(answers, with_none, strict=True))
    return {
        "model": name,
        "shape": shape,
        "num_tokens": num_tokens,
        "seed": seed,
        "min_margin": margin,
        "prompts": prompts,
        "greedy": answers,
    }


def main() -> None:
    """Writes prefixes.json."""
    unpack(HERE)
    entries = [entry(name, length) for name in CASES for length in LENGTHS]
    for each in entries:
        print(f"{each['model']}, {each['num_tokens']} tokens: margin {each['min_margin']:.4f}")
    lines = ",\n".join(json.dumps(each) for each in entries)
    (HERE / "prefixes.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
