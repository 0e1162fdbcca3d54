"""Reading the files that paddle.save writes, without running anything that they say.

Paddle 2.1 and later write a tensor as (name, array), 2.0 as an array; protocols 2 and 3 cut arrays
of more than 1 GiB into slices. Only the arrays' places in the file are kept: `PickledArray.read`
reads one.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.errors import UserError
from predict.loading.arrays import NUMPY_DTYPES, Place, checked_shape
from predict.loading.pickle_machine import (
    PADDLE,
    Array,
    Dtype,
    Machine,
    Named,
    RefusedError,
    Unread,
    kind_of,
    piece_bytes,
    visible_name,
)
from predict.system.files import open_regular

SLICED = "UnpackBigParamInfor@@"  # Paddle's list of the arrays that it cut into slices


@dataclass(frozen=True)
class PickledArray:
    """Where an array lies, and how; `dtype` is safetensors' name."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Unread, ...]  # one behind the other
    is_fortran: bool = False

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple((self.file, piece.offset) for piece in self.pieces)

    def read(self) -> npt.NDArray[Any]:
        """The values, a copy; bfloat16 as uint16. Raises UserError for a file that has changed."""
        with open_regular(self.file) as file:
            data = b"".join(piece_bytes(file, piece) for piece in self.pieces)
        values = np.frombuffer(data, NUMPY_DTYPES[self.dtype])
        return values.reshape(self.shape, order="F" if self.is_fortran else "C")


def read_params(path: Path) -> dict[str, PickledArray]:
    """The arrays of a file of paddle.save by name; its other values (numbers, texts) are left out.

    Raises UserError for anything that is no such file, naming the operation, the function or the
    claim that is refused.
    """
    try:
        with open_regular(path) as file:
            if file.read(2) == b"PK":
                raise RefusedError(
                    "it is a zip archive, as PyTorch writes; if it is PyTorch's, call it "
                    "pytorch_model.bin"
                )
            file.seek(0)
            value = Machine(file, os.fstat(file.fileno()).st_size, PADDLE).run()
        if not isinstance(value, dict):
            raise RefusedError(f"it holds {kind_of(value)}, not names and arrays")
        return _arrays(value, path)
    except RefusedError as error:
        raise UserError(f"{path} is not a file of arrays that Paddle saved: {error}") from None


def _arrays(values: dict[Any, Any], path: Path) -> dict[str, PickledArray]:
    sliced = values.pop(SLICED, {})
    found = {
        name: array
        for name, value in values.items()
        if isinstance(name, str) and (array := _as_array(name, value, path)) is not None
    }
    if not isinstance(sliced, dict):
        raise RefusedError(f"{SLICED} is {kind_of(sliced)}, not an object of names")
    for name, entry in sliced.items():
        if not isinstance(name, str) or name in found:
            raise RefusedError(f"it has the name {visible_name(str(name))} twice")
        found[name] = _joined(name, entry, found)
    return found


def _as_array(name: str, value: Any, path: Path) -> PickledArray | None:
    """A value as an array; None for what is none, and may be there."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Array):
        value = value[1]  # Paddle's own name of the tensor, and its values
    if isinstance(value, Array) and value.piece is not None:
        return PickledArray(path, value.dtype, value.shape, (value.piece,), value.is_fortran)
    if isinstance(value, (Array, Dtype, Named)) or (
        isinstance(value, Unread) and not value.is_text
    ):
        raise RefusedError(f"{visible_name(name)} is {kind_of(value)}, not a tensor")
    return None


def _joined(name: str, entry: Any, found: dict[str, PickledArray]) -> PickledArray:
    """The array whose slices are among `found`, which they leave."""
    parts = entry.get("slices") if isinstance(entry, dict) else None
    if not isinstance(parts, list) or not parts:
        raise RefusedError(f"{SLICED} does not list the slices of {visible_name(name)}")
    # Paddle numbers them, so that no name needs reading.
    arrays = [found.pop(f"{name}@@.{index}", None) for index in range(len(parts))]
    kinds = {(array.dtype, len(array.shape)) for array in arrays if array is not None}
    if None in arrays or len(kinds) != 1 or next(iter(kinds))[1] != 1:
        raise RefusedError(f"the {len(parts)} slices of {visible_name(name)} are not all there")
    whole = [array for array in arrays if array is not None]
    try:
        shape, _ = checked_shape(entry.get("OriginShape"), whole[0].dtype)
    except ValueError as error:
        raise RefusedError(f"the shape of {visible_name(name)} {error}") from None
    count = sum(array.shape[0] for array in whole)
    if math.prod(shape) != count:
        raise RefusedError(f"the slices of {visible_name(name)} hold {count} values, not {shape}")
    pieces = tuple(piece for array in whole for piece in array.pieces)
    return PickledArray(whole[0].file, whole[0].dtype, shape, pieces)
