"""Copies of golden checkpoints with other tensors or values in config.json, and random ones."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from predict.config.quantization import QuantSettings
from predict.loading.build import expected_tensors
from predict.loading.checkpoint import Checkpoint
from predict.loading.layouts.online import Online
from predict.loading.model import read_spec
from predict.loading.safetensors_writer import write
from predict.loading.sources import RandomSource
from predict.models import weight_names
from predict.nn.plans import plan_weights
from tests.support.golden import GOLDEN

Tensors = dict[str, tuple[str, Any]]  # a dtype of safetensors, and values
EXPERT = re.compile(r"(.*\.experts)\.([0-9]+)\.(.*)\.weight")


def stored(folder: Path) -> Tensors:
    """The tensors of a checkpoint by Hugging Face's names, as `write` takes them."""
    checkpoint = Checkpoint(folder)
    return {name: (info.dtype, checkpoint.read(name)) for name, info in checkpoint.tensors.items()}


def changed(case: str, folder: Path, tensors: Tensors | None = None, **changes: Any) -> Path:
    """A copy of a golden checkpoint; None takes a key out of its config.json."""
    shutil.copytree(GOLDEN / case, folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    if tensors is not None:
        write(folder / "model.safetensors", tensors)
    return folder


def write_random(
    folder: Path, config: dict[str, Any], values: Callable[[str, tuple[int, ...]], Any]
) -> Path:
    """A float32 checkpoint of any family. values: makes those of a name and a shape."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    spec, reader = read_spec(folder)
    plan = plan_weights(spec, weight_names(reader))
    shapes = expected_tensors(plan, Online(RandomSource(0), QuantSettings(), plan))
    made = {name: ("F32", values(name, shape)) for name, shape in shapes.items()}
    write(folder / "model.safetensors", made)
    return folder


def joined(tensors: Tensors) -> Tensors:
    """One tensor for all experts of a layer, gate and up in one: transformers 5's in memory."""
    made: Tensors = {}
    experts: dict[str, dict[int, dict[str, Any]]] = {}
    for name, (dtype, values) in tensors.items():
        match = EXPERT.fullmatch(name.replace("block_sparse_moe", "mlp"))
        if match is None:
            made[name.replace("block_sparse_moe", "mlp")] = dtype, values
            continue
        linear = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(match[3], match[3])
        experts.setdefault(match[1], {}).setdefault(int(match[2]), {})[linear] = values
    (stored_as,) = {dtype for name, (dtype, _) in tensors.items() if EXPERT.fullmatch(name)}
    for prefix, of in experts.items():
        each = [of[number] for number in range(len(of))]
        both = [np.concatenate([one["gate_proj"], one["up_proj"]]) for one in each]
        made[f"{prefix}.gate_up_proj"] = stored_as, np.stack(both)
        made[f"{prefix}.down_proj"] = stored_as, np.stack([one["down_proj"] for one in each])
    return made
