"""`<prefix>.pdiparams` of an exported program: its headers, checked before Paddle reads them.

One tensor after another, in the order of their names, each: uint32 0; uint64 number of LoD levels
(0); uint32 0; int32 bytes of a TensorDesc; the TensorDesc (protobuf: 1 element type, 2 dims); the
elements. Paddle believes these headers, and the file's length is none of its concerns. So each
must be, byte for byte, the one that the program's type of the tensor makes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path

from predict.errors import UserError
from predict.loading.program_check import ELEMENTS, EXPORT, TensorType

_HEADER = struct.Struct("<IQIi")
_BY_NAME = {name: (number, size) for name, number, size in ELEMENTS.values()}


def check_parameters(path: Path, parameters: Mapping[str, TensorType]) -> None:
    """Raises UserError where the file does not hold exactly these tensors, whole."""
    if not path.is_file():
        raise UserError(f"{path} is not a file; {EXPORT}")
    with path.open("rb") as file:
        size, at = path.stat().st_size, 0
        for name, wanted in sorted(parameters.items()):
            header = _header(wanted)
            file.seek(at)
            if file.read(len(header)) != header:
                raise UserError(
                    f"{path} has no header of a tensor at byte {at}, where {name} ({wanted}) is "
                    f"to be; the file is cut short or was changed; {EXPORT}"
                )
            at += len(header) + math.prod(wanted.shape) * _BY_NAME[wanted.dtype][1]
            if at > size:
                raise UserError(
                    f"{path} has {size} bytes, and {name} ({wanted}) would end at byte {at}; the "
                    f"file is cut short; {EXPORT}"
                )
        if at != size:
            raise UserError(f"{path} has {size} bytes, and its tensors end at byte {at}; {EXPORT}")


def _header(kind: TensorType) -> bytes:
    """What Paddle writes ahead of a tensor's elements."""
    described = b"\x08" + _varint(_BY_NAME[kind.dtype][0])
    described += b"".join(b"\x10" + _varint(dim) for dim in kind.shape)
    return _HEADER.pack(0, 0, 0, len(described)) + described


def _varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])
