"""Tiny checkpoints that are made of names and shapes alone, so that none need be stored."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from predict.loading import safetensors_writer

if TYPE_CHECKING:
    from numpy.typing import NDArray


def made_tensor(name: str, shape: Sequence[int], seed: int) -> NDArray[Any]:
    """Random values in bfloat16's bits, the same for the same name, shape and seed.

    RandomState's numbers are the same in every version of NumPy.
    """
    random = np.random.RandomState((zlib.crc32(name.encode()) + seed) % (1 << 32))
    noise = random.standard_normal(tuple(shape))
    if len(shape) == 1 and ("norm" in name or "ln_" in name):
        values = 1 + 0.2 * noise if name.endswith("weight") else 0.2 * noise
    elif len(shape) == 1:
        values = 0.2 * noise
    elif "embed_tokens" in name:
        values = noise
    elif "experts" in name:
        values = noise * 1.3 / np.sqrt(min(shape[1:]))
    else:
        values = noise * 1.3 / np.sqrt(np.prod(shape[1:]))
    return safetensors_writer.as_stored(values, "BF16")


def write_checkpoint(path: Path, shapes: Mapping[str, Sequence[int]], seed: int) -> None:
    """Writes made tensors of these names and shapes to a file of safetensors."""
    tensors = {name: ("BF16", made_tensor(name, shape, seed)) for name, shape in shapes.items()}
    safetensors_writer.write(path, tensors)
