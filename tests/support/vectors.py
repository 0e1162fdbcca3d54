"""Tiny encoders, embedding models and rerankers, and what transformers found for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from predict import LLM
from predict.loading.safetensors_reader import read_header
from predict.loading.safetensors_writer import write

FOLDER = Path(__file__).resolve().parent.parent / "golden_encoders"
FOUND: Any = np.load(FOLDER / "golden.npz")  # see tests/golden_encoders/make.py
SAID: Any = json.loads((FOLDER / "texts.json").read_text())
CASES = tuple(sorted(SAID["tokens"]))
ENCODERS = tuple(case for case in CASES if "qwen3" not in case)
RERANKERS = tuple(case for case in CASES if "reranker" in case)
IDS: list[list[int]] = [FOUND[f"ids/{n}"].tolist() for n in range(8)]
OPERATORS: dict[str, dict[str, Any]] = {
    "plain": {"inference_model": False},
    "fused": {"inference_model": True, "attention": "append"},
}


def llm_of(case: str, operators: str = "fused", **settings: Any) -> LLM:
    given = {"max_length": 512, "batch_size": 8, **OPERATORS[operators], **settings}
    return LLM(FOLDER / case, **given)


def nothing_is_held(llm: LLM) -> bool:
    """Whether all blocks are free again."""
    manager = llm.engine.scheduler.block_manager
    manager.check({})
    return manager.num_free_blocks + manager.num_used_blocks == manager.num_blocks


def write_wide(case: str, folder: Path, head_dim: int, gain: float = 1.0) -> Path:
    """A checkpoint like a tiny one, of random weights, whose heads are as wide as real ones.

    gain: by how much a matrix makes random values larger.
    """
    config = json.loads((FOLDER / case / "config.json").read_text())
    hidden, inner = config["num_attention_heads"] * head_dim, 2 * head_dim
    sizes = {8: head_dim, 16: 2 * head_dim, 32: hidden, 48: inner, 96: 3 * hidden}
    config |= {"hidden_size": hidden, "intermediate_size": inner}
    if "head_dim" in config:
        config |= {"head_dim": head_dim, "query_pre_attn_scalar": head_dim}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    draws, made = np.random.default_rng(7), {}
    for name, tensor in read_header(FOLDER / case / "model.safetensors").items():
        shape = [sizes.get(size, size) for size in tensor.shape]
        if ".Wi." in name:
            shape[0] = 2 * inner
        values = draws.standard_normal(shape, np.float32) * np.float32(gain * shape[-1] ** -0.5)
        made[name] = ("F32", values if len(shape) > 1 else values + np.float32("gemma" not in case))
    write(folder / "model.safetensors", made)
    return folder
