"""Tiny encoders, embedding models and rerankers, and what transformers found for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from predict import LLM

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
