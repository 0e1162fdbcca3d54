"""Reading the files of tensors that torch.save writes, without running anything that they say.

A file is a zip archive that packs nothing: `<folder>/data.pkl` is a pickle whose tensors are
pieces (first value, sizes, strides) of storages, and `<folder>/data/<key>` is a storage's values.
Tensors may share a storage. Of a tensor only its place is kept, until it is read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from predict.errors import UserError
from predict.loading.arrays import (
    Computed,
    Shape,
    StoredArray,
    TensorInfo,
    checked_shape,
    item_bytes,
    listed,
)
from predict.loading.pickle_machine import (
    COMMON_CALLS,
    Dialect,
    Machine,
    Named,
    PickleCall,
    RefusedError,
    Unread,
    kind_of,
    visible_name,
)
from predict.loading.zip_directory import ZipEntry, ZipError, read_zip_directory
from predict.system.files import open_regular

# Safetensors' dtypes, and PyTorch's names of their storages and of themselves.
_TYPES = (
    ("F64", "Double", "float64"),
    ("F32", "Float", "float32"),
    ("F16", "Half", "float16"),
    ("BF16", "BFloat16", "bfloat16"),
    ("I64", "Long", "int64"),
    ("I32", "Int", "int32"),
    ("I16", "Short", "int16"),
    ("I8", "Char", "int8"),
    ("U8", "Byte", "uint8"),
    ("BOOL", "Bool", "bool"),
)
STORAGES = {f"torch.{storage}Storage": dtype for dtype, storage, _ in _TYPES}
UNTYPED = "torch.storage.UntypedStorage"  # of bytes; its tensors say their dtypes
DTYPES = {f"torch.{name}": dtype for dtype, _, name in _TYPES} | {
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.float8_e8m0fnu": "F8_E8M0",
}
OLD_FORMAT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # PyTorch's before 1.6 begins so
SAVE_AGAIN = "load it with torch.load(..., weights_only=True) and torch.save it again"


@dataclass(frozen=True)
class Storage:
    """What a persistent id names: a key of the archive, and how many values it has."""

    dtype: str  # empty: bytes
    key: str
    count: int
    kind = "a storage"


@dataclass(frozen=True)
class Tensor:
    """A tensor of a pickle; offset and strides in values."""

    storage: Storage
    dtype: str
    shape: Shape
    strides: tuple[int, ...]
    offset: int
    kind = "a tensor"


def read_torch(path: Path) -> dict[str, StoredArray]:
    """The tensors of a file of torch.save by name; numbers and texts beside them are left out.

    Raises UserError for anything that is no such file, naming the operation, the function or the
    claim that is refused.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            _check_begin(file)
            entries = read_zip_directory(file, size)
            folder = _folder_of(entries)
            _check_byte_order(file, entries.get(f"{folder}/byteorder"))
            pickled = entries[f"{folder}/data.pkl"]
            file.seek(pickled.offset)
            value = Machine(file, pickled.offset + pickled.num_bytes, TORCH).run()
        if not isinstance(value, dict):
            raise RefusedError(f"it holds {kind_of(value)}, not names and tensors")
        return {
            name: _placed(name, tensor, path, entries, folder)
            for name, found in value.items()
            if isinstance(name, str) and (tensor := _as_tensor(name, found)) is not None
        }
    except (RefusedError, ZipError) as error:
        raise UserError(f"{path} is not a file of tensors that PyTorch saved: {error}") from None


def _check_begin(file: BinaryIO) -> None:
    head = file.read(len(OLD_FORMAT))
    if head == OLD_FORMAT:
        raise RefusedError(
            f"it is in PyTorch's format from before version 1.6, which is not read; {SAVE_AGAIN}"
        )
    if not head.startswith(b"PK"):
        raise RefusedError("it is no zip archive")


def _folder_of(entries: Mapping[str, ZipEntry]) -> str:
    """The one folder of the archive that has a pickle."""
    pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    code = [name for name in entries if "/code/" in name or name.endswith("/constants.pkl")]
    if code:
        raise RefusedError(
            f"it is a TorchScript program ({listed(code[:1])}), not tensors; save its state_dict()"
        )
    if len(pickles) != 1:
        raise RefusedError(f"it has {len(pickles)} entries <folder>/data.pkl, not one")
    return pickles[0].removesuffix("/data.pkl")


def _check_byte_order(file: BinaryIO, entry: ZipEntry | None) -> None:
    if entry is None:
        return  # older than the entry: little-endian
    file.seek(entry.offset)
    order = file.read(min(entry.num_bytes, 8))
    if order != b"little":
        raise RefusedError(f"its byte order is {order!r} (allowed: little); {SAVE_AGAIN}")


def _as_tensor(name: str, value: Any) -> Tensor | None:
    """A value as a tensor; None for what is none, and may be there."""
    if isinstance(value, Tensor):
        return value
    is_plain = value is None or isinstance(value, (bool, int, float))
    if is_plain or (isinstance(value, Unread) and value.is_text):
        return None
    raise RefusedError(
        f"{visible_name(name)} is {kind_of(value)}, not a tensor; save the state_dict alone"
    )


def _placed(
    name: str, tensor: Tensor, path: Path, entries: Mapping[str, ZipEntry], folder: str
) -> StoredArray:
    """Where a tensor lies in the file; RefusedError where its storage does not hold it."""
    key = f"{folder}/data/{tensor.storage.key}"
    entry, shown = entries.get(key), visible_name(name)
    if entry is None:
        raise RefusedError(f"it lacks the entry {visible_name(key)}, the values of {shown}")
    item = item_bytes(tensor.dtype)
    claimed = tensor.storage.count * (item if tensor.storage.dtype else 1)
    if claimed > entry.num_bytes:
        raise RefusedError(
            f"the storage of {shown} should have {claimed} bytes, and its entry has "
            f"{entry.num_bytes}"
        )
    last = tensor.offset + _span(tensor.shape, tensor.strides)
    count = math.prod(tensor.shape)
    # Strides of 0 repeat values: a small file could stand for more than any memory.
    if max(last, count) * item > claimed:
        raise RefusedError(
            f"{shown} of shape {list(tensor.shape)} takes {max(last, count) * item} bytes, and its "
            f"storage has {claimed}"
        )
    offset = entry.offset + tensor.offset * item
    if count == 0 or tensor.strides == _packed(tensor.shape, tensor.strides):
        return TensorInfo(path, tensor.dtype, tensor.shape, offset)
    values = TensorInfo(path, tensor.dtype, (_span(tensor.shape, tensor.strides),), offset)
    return Computed(tensor.dtype, tensor.shape, values.places, partial(_strided, values, tensor))


def _strided(values: TensorInfo, tensor: Tensor) -> npt.NDArray[Any]:
    """The values of a tensor, which do not lie one behind the other."""
    strides = [stride * item_bytes(tensor.dtype) for stride in tensor.strides]
    return np.lib.stride_tricks.as_strided(values.read(), tensor.shape, strides)


def _span(shape: Shape, strides: tuple[int, ...]) -> int:
    """Values from a tensor's first to its last, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def _packed(shape: Shape, strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of values one behind the other; those of sizes of 1, as they are."""
    made: list[int] = []
    step = 1
    for size, own in zip(reversed(shape), reversed(strides), strict=True):
        made.append(own if size == 1 else step)
        step *= size
    return tuple(reversed(made))


def _storage(machine: Machine, _: Any) -> None:
    """BINPERSID: ("storage", type, key, device, number of values)."""
    found = machine.pop()
    if not isinstance(found, tuple) or len(found) != 5:
        raise RefusedError(f"it asks for an object by {kind_of(found)}, not for a storage")
    word, kind, key, _, count = found
    if not isinstance(word, Unread) or machine.text(word, "a persistent id") != "storage":
        raise RefusedError(f"it asks for an object by {kind_of(word)}, not for a storage")
    if not isinstance(kind, Named) or kind.name not in (*STORAGES, UNTYPED):
        shown = kind.name if isinstance(kind, Named) else kind_of(kind)
        raise RefusedError(f"a storage is of {shown} (readable: {', '.join(STORAGES)})")
    if type(count) is not int or count < 0:
        raise RefusedError("the size of a storage is no whole number, 0 or more")
    machine.push(Storage(STORAGES.get(kind.name, ""), machine.text(key, "a storage's key"), count))


def _tensor(
    machine: Machine, storage: Storage, offset: Any, sizes: Any, strides: Any, *rest: Any
) -> Tensor:
    """_rebuild_tensor_v2(storage, offset, sizes, strides, needs gradients, hooks[, metadata])."""
    if not storage.dtype:
        raise RefusedError("it makes a tensor of a storage of bytes, not of one with a type")
    return _made(storage, storage.dtype, offset, sizes, strides)


def _typed_tensor(
    machine: Machine, storage: Storage, offset: Any, sizes: Any, strides: Any, *rest: Any
) -> Tensor:
    """_rebuild_tensor_v3: as version 2, and its dtype behind the hooks."""
    dtype = rest[2].name
    if storage.dtype or dtype not in DTYPES:
        raise RefusedError(
            f"a tensor has dtype {dtype} (readable: {', '.join(DTYPES)}), or a storage with a type"
        )
    return _made(storage, DTYPES[dtype], offset, sizes, strides)


def _made(storage: Storage, dtype: str, offset: int, sizes: Any, steps: tuple[Any, ...]) -> Tensor:
    try:
        shape, _ = checked_shape(sizes, dtype)
    except ValueError as error:
        raise RefusedError(f"a tensor's shape {error}") from None
    numbers = (offset, *steps)
    if len(steps) != len(shape) or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
        raise RefusedError("a tensor's strides and offset are no whole numbers, 0 or more")
    return Tensor(storage, dtype, shape, steps, offset)


def _attributes(machine: Machine, _: Any) -> None:
    """BUILD: a state_dict has its modules' versions as an attribute, which say nothing here."""
    state, target = machine.pop(), machine.pop()
    if not isinstance(target, dict) or not isinstance(state, dict):
        raise RefusedError(f"it sets the state of {kind_of(target)} to {kind_of(state)}")
    machine.push(target)


_OF_TENSOR = (Storage, int, tuple, tuple, object, object)
CALLS = {
    **COMMON_CALLS,
    "torch._utils._rebuild_tensor_v2": PickleCall(_tensor, (*_OF_TENSOR, object), optional=1),
    "torch._utils._rebuild_tensor_v3": PickleCall(
        _typed_tensor, (*_OF_TENSOR, Named, object), optional=1
    ),
    # A parameter: its tensor, whether it needs gradients, and hooks.
    "torch._utils._rebuild_parameter": PickleCall(
        lambda machine, tensor, *_: tensor, (Tensor, object, object)
    ),
}
TORCH = Dialect(
    "PyTorch",
    CALLS,
    frozenset({*STORAGES, UNTYPED, *DTYPES}),
    {"BINPERSID": _storage, "BUILD": _attributes},
)
