"""Reading the headers of safetensors files: where each tensor lies, every claim checked."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

from predict.errors import UserError
from predict.loading.arrays import MAX_SHOWN, NUMPY_DTYPES, TensorInfo, checked_shape
from predict.system.files import json_type, open_regular, parse_json
from predict.system.spans import misplaced

MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file.

    Raises UserError for a truncated or broken file, and as the format's own library does where
    tensors overlap, or bytes belong to none: nothing can be hidden in such a file.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise _broken(path, f"it has {size} bytes")
        (header_size,) = struct.unpack("<Q", prefix)
        if header_size > min(size - 8, MAX_HEADER_BYTES):
            raise _broken(path, f"its header claims {header_size} bytes of {size}")
        header = parse_json(file.read(header_size), f"the header of {path}")
    if not isinstance(header, dict):
        raise _broken(path, f"its header is {json_type(header)}, not an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _broken(path, "its __metadata__ is not an object of texts")
    start = 8 + header_size
    tensors = {name: _tensor_info(path, name, entry, start) for name, entry in header.items()}
    parts = ((info.offset, info.num_bytes, name) for name, info in tensors.items())
    if complaint := misplaced(parts, start, size):
        raise _broken(path, complaint)
    return tensors


def _broken(path: Path, why: str) -> UserError:
    return UserError(f"{path} is not a whole safetensors file: {why}; copy it again")


def _tensor_info(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    """What the header says of one tensor; start: the first byte behind the header."""
    shown = repr(name[:MAX_SHOWN])
    values = entry if isinstance(entry, dict) else {}
    missing = [key for key in ("dtype", "shape", "data_offsets") if key not in values]
    if missing:
        raise _broken(path, f"its entry for {shown} has no {' and no '.join(missing)}")
    dtype, offsets = values["dtype"], values["data_offsets"]
    if not isinstance(dtype, str) or dtype not in NUMPY_DTYPES:
        got = dtype[:MAX_SHOWN] if isinstance(dtype, str) else json_type(dtype)
        raise UserError(f"{path}: {shown} has dtype {got} (readable: {', '.join(NUMPY_DTYPES)})")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(offset) is int and offset >= 0 for offset in offsets)
    ):
        raise _broken(path, f"the data_offsets of {shown} are not two whole numbers, 0 or more")
    try:
        shape, num_bytes = checked_shape(values["shape"], dtype)
    except ValueError as error:
        raise _broken(path, f"the shape of {shown} {error}") from None
    begin, end = offsets
    if end - begin != num_bytes:
        raise _broken(
            path,
            f"{shown} lies in bytes {start + begin} to {start + end}, and {dtype} "
            f"{str(list(shape))[:MAX_SHOWN]} needs {num_bytes}",
        )
    return TensorInfo(path, dtype, shape, start + begin)
