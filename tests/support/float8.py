"""Checkpoints of float8 in blocks of 128 x 128, and what their codes stand for."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.loading.safetensors_writer import write
from predict.schemes._e4m3 import values_of
from tests.support.checkpoints import Tensors

Array = npt.NDArray[Any]
# The golden, and its linears that make keys and values of latents.
CASE = "deepseek_v3_fp8"
LATENTS = re.compile(r".*\.kv_b_proj")
SCALE = "_scale_inv"
BLOCK = 128


def written(folder: Path, source: Path, tensors: Tensors, quantization: Any = None) -> Path:
    """A copy of the source with other tensors, and another quantization_config where one is given.

    The last one is left out of config.json where no tensor is of codes.
    """
    shutil.copytree(source, folder)
    write(folder / "model.safetensors", tensors)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    if quantization is not None:
        values["quantization_config"] = quantization
    if all(dtype != "F8_E4M3" for dtype, _ in tensors.values()):
        values.pop("quantization_config", None)
    path.write_text(json.dumps(values))
    return folder


def values_of_blocks(codes: Array, scale: Array) -> Array:
    values = values_of(codes)
    assert scale.shape == tuple(-(-size // BLOCK) for size in codes.shape)
    for (row, column), factor in np.ndenumerate(scale):
        rows, columns = (slice(at * BLOCK, (at + 1) * BLOCK) for at in (row, column))
        values[rows, columns] *= factor
    return values


def plain_values(tensors: Tensors) -> dict[str, Array]:
    """The matrices of codes, by the names of their linears."""
    return {
        name.removesuffix(".weight"): values_of_blocks(codes, tensors[name + SCALE][1])
        for name, (dtype, codes) in tensors.items()
        if dtype == "F8_E4M3"
    }


def with_codes_of(tensors: Tensors, kept: re.Pattern[str]) -> Tensors:
    """The tensors, every matrix of codes but those of these linears in float32."""
    made = dict(tensors)
    for name, values in plain_values(tensors).items():
        if not kept.fullmatch(name):
            made[f"{name}.weight"] = "F32", values
            del made[f"{name}.weight{SCALE}"]
    return made
