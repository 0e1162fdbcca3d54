"""Copies of golden checkpoints with other tensors, or other values in config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from predict.loading.checkpoint import Checkpoint
from predict.loading.safetensors_writer import write
from tests.support.golden import GOLDEN

Tensors = dict[str, tuple[str, Any]]  # a dtype of safetensors, and values


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
