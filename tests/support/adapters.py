"""LoRA adapters in PEFT's form, random ones, for tests and benchmarks of the CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

LINEARS = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
# By name: rank, and what it changes.
SEVEN: dict[str, dict[str, Any]] = {
    "four": {"rank": 4},
    "eight": {"rank": 8, "targets": ("q_proj", "v_proj")},
    "sixteen": {"rank": 16, "layers": (1,)},
    "odd": {"rank": 13, "targets": ("o_proj", "down_proj")},
    "wide": {"rank": 64},
    "gates": {"rank": 16, "targets": ("gate_proj", "k_proj")},
    "late": {"rank": 24, "targets": ("up_proj", "q_proj"), "layers": (0,)},
}


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """[out, in] of each linear of a Llama-shaped config."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    return {
        "q_proj": (query, hidden),
        "k_proj": (key, hidden),
        "v_proj": (key, hidden),
        "o_proj": (hidden, query),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }


Products = dict[str, tuple[Any, Any]]  # A [rank, in] and B [out, rank], by the linear's name


def save_products(directory: Path, products: Products, rank: int, **settings: Any) -> Path:
    """Writes an adapter of these products, in PEFT's form; returns the directory."""
    tensors = {
        f"base_model.model.{name}.lora_{letter}.weight": values.astype(np.float32)
        for name, pair in products.items()
        for letter, values in zip("AB", pair, strict=True)
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    made = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, **settings}
    (directory / "adapter_config.json").write_text(json.dumps(made))
    return directory


def write_adapter(
    directory: Path,
    config: dict[str, Any],
    rank: int,
    seed: int,
    targets: Sequence[str] = tuple(LINEARS),
    layers: Sequence[int] | None = None,
    scale: float = 0.3,
) -> Path:
    """Writes an adapter of a Llama-shaped model; returns the directory. layers: None for all."""
    generator = np.random.default_rng(seed)
    products: Products = {}
    for layer in range(config["num_hidden_layers"]) if layers is None else layers:
        for name in targets:
            out, width = shapes_of(config)[name]
            a = generator.standard_normal((rank, width), np.float32) / np.sqrt(width)
            b = generator.standard_normal((out, rank), np.float32) * scale / np.sqrt(rank)
            products[f"model.layers.{layer}.{LINEARS[name]}.{name}"] = (a, b)
    return save_products(directory, products, rank, target_modules=list(targets))


def write_seven(root: Path, config: dict[str, Any]) -> dict[str, Path]:
    """Writes the adapters of SEVEN; their folders by name."""
    return {
        name: write_adapter(root / name, config, seed=index, **form)
        for index, (name, form) in enumerate(SEVEN.items())
    }
