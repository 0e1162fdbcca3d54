"""Writing safetensors files from NumPy arrays, with the dtypes that NumPy lacks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.loading.arrays import NUMPY_DTYPES
from predict.system.outputs import whole_file

ALIGNMENT = 8  # bytes; the header is padded to it with spaces, as the format's own writer does


def write(
    path: Path,
    tensors: Mapping[str, tuple[str, npt.NDArray[Any]]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes name -> (safetensors dtype, array); bfloat16 as uint16, e4m3 as uint8.

    metadata: default {"format": "pt"}, which transformers asks for. The file appears whole, under
    its name, at the end, when its bytes are on the disk. Raises ValueError where an array does not
    have the dtype's NumPy type.
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
    with whole_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()  # tofile writes past Python's buffer
        for _, array in tensors.values():
            np.ascontiguousarray(array).tofile(file)
