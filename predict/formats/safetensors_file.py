"""Writing safetensors files from NumPy arrays, with the dtypes that NumPy lacks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.nn.checkpoint import NUMPY_DTYPES

ALIGNMENT = 8  # bytes; the header is padded to it with spaces, as the format's own writer does


def write(
    path: Path,
    tensors: Mapping[str, tuple[str, npt.NDArray[Any]]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes name -> (safetensors dtype, array); bfloat16 as uint16, e4m3 as uint8.

    metadata: default {"format": "pt"}, which transformers asks for. The file appears whole, under
    its name, at the end. Raises ValueError where an array does not have the dtype's NumPy type.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    end = 0
    for name, (dtype, array) in tensors.items():
        if array.dtype != np.dtype(NUMPY_DTYPES[dtype]):
            raise ValueError(f"{name}: {dtype} needs {NUMPY_DTYPES[dtype]}, got {array.dtype}")
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in tensors.values():
            np.ascontiguousarray(array).tofile(file)
    os.replace(partial, path)
