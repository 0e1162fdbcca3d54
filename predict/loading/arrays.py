"""Tensors that lie in files: what the readers of all formats give, each read when it is asked for.

A format's reader gives arrays by name. Views of other arrays turn, cut and join them: a checkpoint
in parts, or with matrices in one, is read as any other, one tensor at a time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from predict.errors import UserError
from predict.system.files import json_type, open_regular

# bfloat16 has no NumPy dtype; Paddle reads uint16 arrays as bfloat16.
NUMPY_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "F8_E8M0": np.uint8,
}
# By NumPy's code, "<f4": the dtypes of arrays that other programs write low byte first.
NUMPY_CODES = {
    np.dtype(NUMPY_DTYPES[name]).str: name for name in NUMPY_DTYPES if not name.startswith("F8_")
}
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
STORED_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # of --dtype
MAX_LISTED = 12
MAX_SHOWN = 100  # characters of a name or value from a file
MAX_DIMS = 32
COMPARED_BYTES = 1 << 24  # at a time
MAX_TENSOR_BYTES = 2**63 - 1
Indices: TypeAlias = "npt.NDArray[np.int64] | slice"
Shape: TypeAlias = "tuple[int, ...]"
Place: TypeAlias = "tuple[Path, int]"  # a file, and a byte in it


class StoredArray(Protocol):
    """One tensor, not read yet."""

    @property
    def dtype(self) -> str:
        """Safetensors' name of it."""

    @property
    def shape(self) -> Shape:
        """Sizes as `read` gives them."""

    @property
    def places(self) -> tuple[Place, ...]:
        """Where its bytes begin, file by file."""

    def read(self) -> npt.NDArray[Any]:
        """The values, bfloat16 as uint16, float8 as uint8; maybe a view of more than them.

        Raises UserError where a file has changed.
        """


def item_bytes(dtype: str) -> int:
    """Bytes of a value of a safetensors dtype."""
    return np.dtype(NUMPY_DTYPES[dtype]).itemsize


def num_bytes(array: StoredArray) -> int:
    """Bytes of the values."""
    return math.prod(array.shape) * item_bytes(array.dtype)


@dataclass(frozen=True)
class TensorInfo:
    """A tensor whose values lie in a file as they are read, one behind the other."""

    file: Path
    dtype: str
    shape: Shape
    offset: int  # bytes from the start of the file

    @property
    def num_bytes(self) -> int:
        return num_bytes(self)

    @property
    def places(self) -> tuple[Place, ...]:
        return ((self.file, self.offset),)

    def read(self) -> npt.NDArray[Any]:
        """See StoredArray. A copy that the caller may free at once.

        Not a memory map: its pages would count as this process's memory until the last tensor.
        """
        dtype = NUMPY_DTYPES[self.dtype]
        return values_at(self.file, self.offset, dtype, math.prod(self.shape)).reshape(self.shape)

    def rows(self, begin: int, end: int) -> TensorInfo:
        """Some of the first axis."""
        size = math.prod(self.shape[1:]) * item_bytes(self.dtype)
        shape = (end - begin, *self.shape[1:])
        return TensorInfo(self.file, self.dtype, shape, self.offset + begin * size)

    def piece(self, index: int) -> TensorInfo:
        """The tensor at `index` along the first axis."""
        row = self.rows(index, index + 1)
        return TensorInfo(row.file, row.dtype, row.shape[1:], row.offset)


def values_at(path: Path, offset: int, dtype: Any, count: int) -> npt.NDArray[Any]:
    """[count] values of a NumPy type from a byte on. Raises UserError where the file is shorter."""
    with open_regular(path) as file:
        file.seek(offset)
        values = np.fromfile(file, dtype, count)
    if values.size != count:
        raise UserError(f"{path} is shorter than when it was opened; copy it again")
    return values


@dataclass(frozen=True, eq=False)
class View:
    """An array made of another one; as it is here, that one."""

    array: StoredArray

    @property
    def dtype(self) -> str:
        return self.array.dtype

    @property
    def shape(self) -> Shape:
        return self.array.shape

    @property
    def places(self) -> tuple[Place, ...]:
        return self.array.places

    def read(self) -> npt.NDArray[Any]:
        return self.array.read()


@dataclass(frozen=True, eq=False)
class Turned(View):
    """A matrix [out, in] that is stored as [in, out]."""

    @property
    def shape(self) -> Shape:
        return self.array.shape[::-1]

    def read(self) -> npt.NDArray[Any]:
        return self.array.read().T


class LastRead:
    """The values of the array that was read last, for those that are cut out of it in turns.

    They are kept until they were asked for as often as was said, or another array is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._array: StoredArray | None = None
        self._values: npt.NDArray[Any] | None = None
        self._left = 0

    def read(self, array: StoredArray, num_uses: int) -> npt.NDArray[Any]:
        """The array's values, which stay as they are; num_uses: how often they will be wanted."""
        with self._lock:
            values = self._values if self._array is array else None
            if values is None:
                self._array = self._values = None  # before the next ones take their place
                values = array.read()
                self._array, self._values, self._left = array, values, num_uses
            self._left -= 1
            if self._left < 1:
                self._array = self._values = None
            return values


@dataclass(frozen=True, eq=False)
class Shared(View):
    """An array that `num_uses` others are cut out of, read once for those that follow closely."""

    last: LastRead
    num_uses: int

    def read(self) -> npt.NDArray[Any]:
        """See StoredArray. Not to be changed: others get the same values."""
        return self.last.read(self.array, self.num_uses)


@dataclass(frozen=True, eq=False)
class Part(View):
    """Rows and columns of a matrix [out, in], or elements of a vector [out]."""

    rows: Indices = field(default_factory=lambda: slice(None))
    columns: slice = field(default_factory=lambda: slice(None))

    @property
    def shape(self) -> Shape:
        cuts: tuple[Indices, ...] = (self.rows, self.columns)
        sizes = (
            len(np.empty(size, np.bool_)[cut])
            for size, cut in zip(self.array.shape, cuts, strict=False)
        )
        return (*sizes, *self.array.shape[2:])

    def read(self) -> npt.NDArray[Any]:
        """See StoredArray. A copy: of the whole others may be cut out."""
        cut = (self.rows, self.columns)[: len(self.array.shape)]
        return np.array(self.array.read()[cut], order="C")


@dataclass(frozen=True, eq=False)
class Piece(View):
    """What lies at an index of an array's first axis."""

    index: int

    @property
    def shape(self) -> Shape:
        return self.array.shape[1:]

    def read(self) -> npt.NDArray[Any]:
        piece: npt.NDArray[Any] = self.array.read()[self.index]
        return piece


@dataclass(frozen=True, eq=False)
class Computed:
    """An array that is made, mostly of others, when it is read."""

    dtype: str
    shape: Shape
    places: tuple[Place, ...]  # of the others
    read: Callable[[], npt.NDArray[Any]]


def places_of(arrays: Iterable[StoredArray]) -> tuple[Place, ...]:
    """Where the bytes of all of them begin."""
    return tuple(place for array in arrays for place in array.places)


def joined_along(
    axis: int, arrays: Sequence[StoredArray], widths: tuple[int, ...] = ()
) -> Computed:
    """Arrays of one dtype, one behind the other along an axis.

    widths: each array holds matrices of these sizes, side by side along the axis: all the first
    ones come first. Empty: one. Raises ValueError where the arrays do not fit together.
    """
    first = arrays[0]
    across = {(a.dtype, len(a.shape), a.shape[:axis], a.shape[axis + 1 :]) for a in arrays}
    if len(across) != 1 or len(first.shape) <= axis:
        kinds = " and ".join(sorted({f"{a.dtype} {list(a.shape)}"[:MAX_SHOWN] for a in arrays}))
        raise ValueError(f"its parts do not fit together: {kinds}")
    sizes = [array.shape[axis] for array in arrays]
    if widths and ({*sizes} != {sum(widths)} or min(widths) < 0):
        raise ValueError(f"a part does not hold {len(widths)} matrices of {list(widths)} outputs")
    shape = (*first.shape[:axis], sum(sizes), *first.shape[axis + 1 :])

    def read() -> npt.NDArray[Any]:
        whole = np.empty(shape, NUMPY_DTYPES[first.dtype])
        target, at = np.moveaxis(whole, axis, 0), 0
        for index, array in enumerate(arrays):  # one part at a time beside the whole
            values, begin = np.moveaxis(array.read(), axis, 0), 0
            for width in widths or (len(values),):
                place = begin * len(arrays) + index * width if widths else at
                target[place : place + width] = values[begin : begin + width]
                begin += width
            at += len(values)
        return whole

    return Computed(first.dtype, shape, places_of(arrays), read)


def same(arrays: Sequence[StoredArray], name: str) -> Computed:
    """An array that several files hold, each whole. name: for messages.

    Reading it raises UserError where the files do not agree, bit by bit.
    """
    first, *others = arrays

    def read() -> npt.NDArray[Any]:
        values = first.read()
        for other in others:
            if other.dtype != first.dtype or not are_same(other.read(), values):
                files = [array.places[0][0].name for array in (first, other)]
                raise UserError(
                    f"{first.places[0][0].parent}: {files[0]} and {files[1]} hold different values "
                    f"of {name[:MAX_SHOWN]}, which all parts must have alike; the files are "
                    "not of one checkpoint, or this tensor is split in a way that is not known "
                    "here: merge it with PaddleNLP's tools/merge_tp_and_pp_params.py"
                )
        return values

    return Computed(first.dtype, first.shape, places_of(arrays), read)


def are_same(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Whether two arrays have the same bits; in pieces, since a table of tokens may be large."""
    if one.shape != other.shape:
        return False
    first, second = (
        np.asarray(each, order="C").reshape(-1).view(np.uint8) for each in (one, other)
    )
    return all(
        np.array_equal(first[at : at + COMPARED_BYTES], second[at : at + COMPARED_BYTES])
        for at in range(0, len(first), COMPARED_BYTES)
    )


def checked_shape(shape: Any, dtype: str) -> tuple[Shape, int]:
    """A shape that a file claims, and the bytes of a tensor of that shape and safetensors dtype.

    Raises ValueError that says what is wrong with it.
    """
    if not isinstance(shape, (list, tuple)):
        raise ValueError(f"is {json_type(shape)}, not a list of sizes")
    if len(shape) > MAX_DIMS:
        raise ValueError(f"has {len(shape)} dimensions (at most {MAX_DIMS} are read)")
    for size in shape:
        if type(size) is not int or size < 0:
            shown = size if isinstance(size, (bool, int, float)) else json_type(size)
            raise ValueError(f"has the size {shown}; sizes are whole numbers, 0 or more")
    item = item_bytes(dtype)
    # Empty dimensions apart: NumPy multiplies the others, too.
    if math.prod(max(size, 1) for size in shape) * item > MAX_TENSOR_BYTES:
        raise ValueError("has more elements than 64 bits count")
    return tuple(shape), math.prod(shape) * item


def listed(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(name[:MAX_SHOWN] for name in names[:MAX_LISTED]) + more
