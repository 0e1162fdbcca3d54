"""Checkpoints of expert families with random weights, of sizes that groups of 32 divide."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.checkpoints import write_random
from tests.support.golden import GOLDEN
from tests.support.tiny import TOKENIZER

SIZES: dict[str, Any] = {
    "vocab_size": 342,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
# The golden checkpoint whose config.json is changed, by family.
FAMILIES = {
    "mixtral": "mixtral_8x7b",
    "qwen2_moe": "qwen2_moe_a2_7b",
    "qwen3_moe": "qwen3_moe_30b",
    "olmoe": "olmoe_7b",
    "glm4_moe": "glm4_moe_355b",
    "ernie4_5_moe": "ernie4_5_moe_21b",
    "gpt_oss": "gpt_oss_20b",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
}


def write_experts(folder: Path, family: str, changes: dict[str, Any] | None = None) -> Path:
    """A checkpoint of two layers of a family, with a tokenizer."""
    values = json.loads((GOLDEN / FAMILIES[family] / "config.json").read_text())
    values |= {key: value for key, value in SIZES.items() if values.get(key) is not None}
    values |= {"torch_dtype": "float32", **(changes or {})}
    if "layer_types" in values:
        values["layer_types"] = values["layer_types"][:2]
    generator = np.random.default_rng(5)
    write_random(folder, values, lambda name, shape: _values(generator, name, shape))
    for path in TOKENIZER.glob("tokenizer*.json"):
        shutil.copy(path, folder / path.name)
    return folder


def _values(generator: np.random.Generator, name: str, shape: tuple[int, ...]) -> Any:
    """Some channels of norms are large, as calibration expects them."""
    values = generator.standard_normal(shape, dtype=np.float32)
    if "norm" in name:
        values = 1 + 0.1 * values
        values[::17] *= 20.0
        return values
    if name.endswith("correction_bias"):
        return 0.01 * values
    return values * np.float32(0.06)
