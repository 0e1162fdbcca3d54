"""`<prefix>.pdiparams` of an exported program: its headers, checked before Paddle reads them.

One tensor after another, in the order of their names, each: uint32 0; uint64 number of LoD levels
(0); uint32 0; int32 bytes of a TensorDesc; the TensorDesc (protobuf: 1 element type, 2 dims); the
elements. Paddle believes these headers, and the file's length is none of its concerns.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from predict.errors import UserError
from predict.loading.program_check import ELEMENTS, EXPORT, TensorType

_HEADER = struct.Struct("<IQIi")
_MAX_DESCRIPTION = 128  # bytes; nine dims of a TensorDesc take 101 at most
_BY_NUMBER = {number: (name, size) for name, number, size in ELEMENTS.values()}


def check_parameters(path: Path, parameters: Mapping[str, TensorType]) -> None:
    """Raises UserError where the file does not hold exactly these tensors, whole."""
    if not path.is_file():
        raise UserError(f"{path} is not a file; {EXPORT}")
    with path.open("rb") as file:
        size = path.stat().st_size
        for name in sorted(parameters):
            at = file.tell()
            found = _read_header(file)
            wanted = parameters[name]
            if found is None:
                raise UserError(
                    f"{path} has no header of a tensor at byte {at}, where {name} ({wanted}) is "
                    f"to be; the file is cut short or was changed; {EXPORT}"
                )
            if found != wanted:
                raise UserError(
                    f"{path} holds {found} at byte {at}, and the program takes {name} as {wanted}; "
                    f"{EXPORT}"
                )
            end = file.tell() + _num_bytes(wanted)
            if end > size:
                raise UserError(
                    f"{path} has {size} bytes, and {name} ({wanted}) would end at byte {end}; the "
                    f"file is cut short; {EXPORT}"
                )
            file.seek(end)
        if file.tell() != size:
            raise UserError(
                f"{path} has {size} bytes, and its tensors end at byte {file.tell()}; {EXPORT}"
            )


def _num_bytes(kind: TensorType) -> int:
    return math.prod(kind.shape) * next(
        size for name, size in _BY_NUMBER.values() if name == kind.dtype
    )


def _read_header(file: BinaryIO) -> TensorType | None:
    """The next tensor's type; None where there is no such header."""
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size:
        return None
    *zeros, length = _HEADER.unpack(head)
    if any(zeros) or not 0 < length <= _MAX_DESCRIPTION:
        return None
    description = file.read(length)
    return _tensor_type(description) if len(description) == length else None


def _tensor_type(description: bytes) -> TensorType | None:
    element, shape = None, []
    for number, value in _fields(description):
        if number == 1:
            element = _BY_NUMBER.get(value)
        elif number == 2 and 0 <= value < 1 << 40:
            shape.append(value)
        else:
            return None
    return None if element is None else TensorType(element[0], tuple(shape))


def _fields(data: bytes) -> Iterator[tuple[int, int]]:
    """Numbers and values of a protobuf message of varints; (0, 0) for anything else in it."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while at < len(data):
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
        return -1

    while at < len(data):
        key = varint()
        yield (key >> 3, varint()) if key & 7 == 0 else (0, 0)
