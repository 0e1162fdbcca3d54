"""Tiny models over quantized caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from predict import LLM, EngineConfig, SamplingParams
from tests.support import tiny

CACHE_TYPES = ("dynamic", "static", "fp8", "int4")
# A window and GQA; the second one's rows have odd halves in int4.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "window, head_dim 20": {"model_type": "mistral", "sliding_window": 24, "head_dim": 20},
}
PROMPTS = [[5 + i, *range(7, 7 + 9 * i), 3] for i in range(1, 6)]
# Ways to cut the same requests into steps.
COMPOSITIONS: tuple[dict[str, Any], ...] = (
    {"batch_size": 1},
    {"batch_size": 4, "attention": "block", "block_size": 64},
    {"batch_size": 5, "attention": "append", "max_num_batched_tokens": 7},
    # Too few blocks for five sequences at once: some are preempted and computed again.
    {"batch_size": 5, "attention": "append", "num_cache_blocks": 8},
)


def write_scales(directory: Path, num_layers: int, **scales: list[float]) -> Path:
    """cachekv_scales.json, as PaddleNLP has it; k, v: the largest values of each head."""
    values = {
        f"llama.layers.{layer}.self_attn.cache{which}_matmul.activation_quanter": of_heads
        for layer in range(num_layers)
        for which, of_heads in scales.items()
    }
    (directory / "cachekv_scales.json").write_text(json.dumps(values))
    return directory


def model(directory: Path, changes: dict[str, Any]) -> Path:
    """A tiny checkpoint with scales of its caches."""
    scales = [4.0, 4.0, 3.5, 3.0]
    return write_scales(tiny.write(directory, changes), 2, k=scales, v=scales)


def config(directory: Path, **changes: Any) -> EngineConfig:
    values = {
        "dtype": "float32",
        "max_length": 96,
        "block_size": 16,
        "inference_model": True,
        **changes,
    }
    return EngineConfig(model_name_or_path=str(directory), **values)


def greedy(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[tuple[int, ...]]:
    params = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)
    return [output.token_ids for output in llm.generate(prompts, params)]
