"""Prefixes as PaddleNLP saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from predict import LLM, SamplingParams
from tests.golden.prefixes import random_prefix
from tests.support.golden import GOLDEN

Floats = npt.NDArray[np.float32]
ENTRIES: list[dict[str, Any]] = json.loads((GOLDEN / "prefixes.json").read_text())
NAMED = {f"{entry['model']}, {entry['num_tokens']} tokens": entry for entry in ENTRIES}
TINY = (2, 2, 32)  # layers, heads and head_dim of tests.support.tiny


def write_prefix(folder: Path, shape: tuple[int, int, int], num_tokens: int, seed: int = 0) -> Path:
    """A folder with the pre_caches.npy of a random prefix; shape: layers, heads, head_dim."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "pre_caches.npy", random_prefix(shape, num_tokens, seed))
    return folder


def npy(folder: Path, entry: dict[str, Any]) -> Path:
    shape, length, seed = entry["shape"], entry["num_tokens"], entry["seed"]
    return write_prefix(folder, tuple(shape), length, seed)


def check(llm: LLM, entry: dict[str, Any], adapter: str | None = None) -> None:
    wanted = entry["greedy"]
    params = SamplingParams(
        max_new_tokens=len(wanted[0]), temperature=0.0, ignore_eos=True, adapter=adapter
    )
    outputs = llm.generate(entry["prompts"], params)
    assert [list(output.token_ids) for output in outputs] == wanted


def encoder_weights(
    shape: tuple[int, int, int], num_tokens: int, inner: int | None
) -> dict[str, Floats]:
    """Weights of PaddleNLP's prefix encoder; inner: of its projection, None: it has none."""
    num_layers, num_heads, head_dim = shape
    width, rng = num_heads * head_dim, np.random.default_rng(5)
    sizes: dict[str, tuple[int, ...]] = {"0.weight": (num_tokens, 2 * num_layers * width)}
    if inner is not None:
        sizes = {
            "0.weight": (num_tokens, width),
            "1.weight": (width, inner),
            "1.bias": (inner,),
            "3.weight": (inner, 2 * num_layers * width),
            "3.bias": (2 * num_layers * width,),
        }
    return {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}


def encoded(weights: dict[str, Floats], shape: tuple[int, int, int]) -> Floats:
    """What the encoder makes of them, value by value: [layers, 2, heads, tokens, head_dim]."""
    num_layers, num_heads, head_dim = shape
    rows = weights["0.weight"]
    if "1.weight" in weights:
        rows = np.tanh(rows @ weights["1.weight"] + weights["1.bias"])
        rows = rows @ weights["3.weight"] + weights["3.bias"]
    found = np.empty((num_layers, 2, num_heads, len(rows), head_dim), np.float32)
    for token, row in enumerate(rows):
        values = iter(row)
        for which in range(2):  # the keys of all layers, then the values of all layers
            for layer in range(num_layers):
                for head in range(num_heads):
                    found[layer, which, head, token] = [next(values) for _ in range(head_dim)]
    return found


# Along which axis PaddleNLP's parallel layers split a weight: the table by tokens, the first
# product by its outputs, the second by its inputs.
SPLITS = {"0.weight": 0, "1.weight": 1, "1.bias": 0, "3.weight": 0}


def split_weights(weights: dict[str, Floats], num_ranks: int) -> list[dict[str, Floats]]:
    """What each of the ranks of a training has of an encoder's weights."""
    parts: list[dict[str, Floats]] = [{} for _ in range(num_ranks)]
    for name, value in weights.items():
        axis = min(SPLITS.get(name, -1), value.ndim - 1)
        pieces = [value] * num_ranks if name not in SPLITS else np.split(value, num_ranks, axis)
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece
    return parts


def trained(weights: dict[str, Floats], shape: tuple[int, int, int], num_ranks: int) -> Floats:
    """[layers, 2, heads, tokens, head_dim] what the ranks of a training see, side by side.

    Each takes its piece of what the encoder makes for all layers of its heads.
    """
    num_layers, num_heads, head_dim = shape
    rows = weights["0.weight"]
    if "1.weight" in weights:
        parts = split_weights(weights, num_ranks)
        rows = np.concatenate([part["0.weight"] for part in parts])
        inner = [np.tanh(rows @ part["1.weight"] + part["1.bias"]) for part in parts]
        products = [each @ part["3.weight"] for each, part in zip(inner, parts, strict=True)]
        rows = sum(products[1:], products[0]) + weights["3.bias"]
    of_rank = (num_layers, num_heads // num_ranks, head_dim)
    pieces = np.split(rows, num_ranks, axis=1)
    return np.concatenate([encoded({"0.weight": each}, of_rank) for each in pieces], axis=2)


def save_params(path: Path, weights: dict[str, npt.NDArray[Any]]) -> None:
    """What paddle.save makes of a layer's weights."""
    import paddle

    paddle.save({name: paddle.to_tensor(value) for name, value in weights.items()}, str(path))


def write_config(folder: Path, **values: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prefix_config.json").write_text(json.dumps(values))
