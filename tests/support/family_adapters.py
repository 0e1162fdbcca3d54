"""LoRA adapters of golden checkpoints: of every linear that requests' ones may change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import safe_open

from tests.support.adapters import Products, save_products
from tests.support.golden import GOLDEN

HEADS = "kv_b_proj"  # what makes keys and values of latents
# Parts of names of matrices that are no linears of attention or MLPs, or of other networks.
OTHERS = (
    *("embed", "wte", "wpe", "lm_head", "output_layer", "output.weight", "norm", "project"),
    *("expert", "router", ".mlp.gate.", "block_sparse_moe", "vision_tower", "multi_modal"),
)
TRANSPOSED = ("gpt2",)  # stored [in, out]


def linears_of(case: str, with_heads: bool = False) -> dict[str, tuple[int, int]]:
    """[out, in] of each linear, by its name in the checkpoint."""
    left_out = OTHERS if with_heads else (*OTHERS, HEADS)
    found: dict[str, tuple[int, int]] = {}
    for path in sorted((GOLDEN / case).glob("*.safetensors")):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                shape = file.get_slice(name).get_shape()
                is_matrix = len(shape) == 2 and name.endswith(".weight")
                if is_matrix and not any(part in name for part in left_out):
                    out, width = shape[::-1] if case.startswith(TRANSPOSED) else shape
                    found[name.removesuffix(".weight")] = (out, width)
    return found


def write_family_adapter(
    directory: Path, case: str, seed: int, rank: int = 5, with_heads: bool = False
) -> Path:
    """Writes an adapter of a golden checkpoint; returns the directory."""
    generator = np.random.default_rng(seed)
    products: Products = {}
    for name, (out, width) in linears_of(case, with_heads).items():
        a = generator.standard_normal((rank, width)) / np.sqrt(width)
        products[name] = (a, generator.standard_normal((out, rank)) * 0.3 / np.sqrt(rank))
    is_turned = case.startswith(TRANSPOSED)
    return save_products(
        directory, products, rank, target_modules="all-linear", fan_in_fan_out=is_turned
    )
