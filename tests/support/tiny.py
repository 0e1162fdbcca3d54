"""Tiny random checkpoints for tests, made without torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.support.paths import ROOT

TOKENIZER = ROOT / "tests" / "data" / "tokenizers" / "byte_level"
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 199,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


def tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """float32 tensors under Hugging Face names for a Llama-shaped config."""
    generator = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (hidden,),
            at + "post_attention_layernorm.weight": (hidden,),
            at + "self_attn.q_proj.weight": (query, hidden),
            at + "self_attn.k_proj.weight": (key, hidden),
            at + "self_attn.v_proj.weight": (key, hidden),
            at + "self_attn.o_proj.weight": (hidden, query),
            at + "mlp.gate_proj.weight": (inner, hidden),
            at + "mlp.up_proj.weight": (inner, hidden),
            at + "mlp.down_proj.weight": (hidden, inner),
        }
    made = {}
    for name, shape in shapes.items():
        values = generator.standard_normal(shape, dtype=np.float32)
        made[name] = 1 + 0.1 * values if len(shape) == 1 else 0.15 * values
    return made


def write(directory: Path, changes: dict[str, Any] | None = None, seed: int = 0) -> Path:
    config = {**CONFIG, **(changes or {})}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors(config, seed), directory / "model.safetensors")
    return directory


def write_with_tokenizer(directory: Path) -> Path:
    """Writes a model of 512 tokens and a byte-level tokenizer; returns the directory."""
    write(directory, {"vocab_size": 512})
    for path in TOKENIZER.glob("*.json"):
        if path.name != "config.json":
            shutil.copy(path, directory / path.name)
    return directory


def write_config(directory: Path, changes: dict[str, Any]) -> Path:
    """A folder with config.json alone, for weights that are made up."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return directory
