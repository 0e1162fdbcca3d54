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


def save_params(path: Path, weights: dict[str, npt.NDArray[Any]]) -> None:
    """What paddle.save makes of a layer's weights."""
    import paddle

    paddle.save({name: paddle.to_tensor(value) for name, value in weights.items()}, str(path))


def write_config(folder: Path, **values: Any) -> None:
    """A prefix_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prefix_config.json").write_text(json.dumps(values))
