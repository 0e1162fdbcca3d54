"""LoRA adapters of random weights, for a run whose requests have several."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from predict.adapters.weights import adapted_plans
from predict.errors import UserError, quoted
from predict.loading.model import plan_of, read_spec
from predict.nn.plans import WeightPlan

RANK = 16


def write_adapter(plan: WeightPlan, directory: Path, rank: int, seed: int) -> None:
    """Writes one adapter of this network in PEFT's form, in fp16, for all linears that may have it.

    Its factors make about a third of what the base's linears make, were those of unit gain.
    """
    generator = np.random.default_rng(seed)
    tensors, targets = {}, set()
    for _, _, linear in adapted_plans(plan):
        for prefix, size in zip(linear.prefixes, linear.part_sizes, strict=True):
            width = linear.in_features
            a = generator.standard_normal((rank, width), np.float32) / np.sqrt(width)
            b = generator.standard_normal((size, rank), np.float32) * 0.15 / np.sqrt(rank)
            name = f"base_model.model.{prefix}"
            tensors[f"{name}.lora_A.weight"] = a.astype(np.float16)
            tensors[f"{name}.lora_B.weight"] = b.astype(np.float16)
            targets.add(prefix.rpartition(".")[2])
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(targets),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config) + "\n")


def write_adapters(wanted: str, model: str, folder: Path, seed: int) -> list[str]:
    """Writes NUMBER or NUMBERxRANK adapters of a model's shape; returns them as name=path.

    Raises UserError for other texts.
    """
    number, _, rank = wanted.partition("x")
    sizes = [number, rank or str(RANK)]
    if not all(size.isdecimal() and 1 <= int(size) <= 1024 for size in sizes):
        raise UserError(
            f"--random_adapters {quoted(wanted)} is not supported (allowed: NUMBER or NUMBERxRANK "
            "in whole numbers from 1 to 1024, as in 8x16)"
        )
    plan, _ = plan_of(*read_spec(model))
    for index in range(int(sizes[0])):
        write_adapter(plan, folder / str(index), int(sizes[1]), seed + index)
    return [f"{index}={folder / str(index)}" for index in range(int(sizes[0]))]
