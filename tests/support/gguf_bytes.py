"""GGUF files by their bytes, good ones and those that lie."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

UINT8, UINT32, INT32, FLOAT32, BOOL, TEXT, ARRAY, UINT64 = 0, 4, 5, 6, 7, 8, 9, 10
F32, Q8_0 = 0, 8  # types of tensors


def text(value: str | bytes, size: int | None = None) -> bytes:
    """A text behind its length; size: what that says instead."""
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data) if size is None else size) + data


def number(kind: int, value: Any) -> bytes:
    """A number of a type."""
    return struct.pack("<" + {0: "B", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q"}[kind], value)


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    """A key with its value, packed already."""
    return text(key) + struct.pack("<I", kind) + value


def packed(key: str, value: Any) -> bytes:
    """A key with a value of the type that Python's suggests."""
    if isinstance(value, bool):
        return entry(key, BOOL, number(BOOL, value))
    if isinstance(value, int):
        return entry(key, UINT32, number(UINT32, value))
    if isinstance(value, float):
        return entry(key, FLOAT32, number(FLOAT32, value))
    if isinstance(value, str):
        return entry(key, TEXT, text(value))
    return entry(key, ARRAY, array(value))


def array(values: Sequence[Any]) -> bytes:
    """A list of texts, or of numbers of one kind."""
    first = values[0]
    kind = TEXT if isinstance(first, str) else FLOAT32 if isinstance(first, float) else INT32
    kind = BOOL if isinstance(first, bool) else kind
    each = (text(v) if isinstance(v, str) else number(kind, v) for v in values)
    return struct.pack("<IQ", kind, len(values)) + b"".join(each)


def tensor(name: str, shape: Sequence[int], kind: int = F32, offset: int = 0) -> bytes:
    """A tensor's entry; shape as the file has it, the innermost dimension first."""
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


@dataclass(frozen=True)
class File:
    """The parts of a file, each of which may be replaced."""

    metadata: Mapping[str, Any] = field(default_factory=lambda: {"general.architecture": "llama"})
    keys: bytes = b""  # more of them
    num_keys: int | None = None
    tensors: Sequence[bytes] = (
        tensor("a", (4, 2)),
        tensor("b", (32,), Q8_0, 32),
    )
    num_tensors: int | None = None
    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32
    data: bytes = bytes(32 + 34 + 30)

    def packed(self) -> bytes:
        """The file."""
        more = 1 if self.keys else 0
        num_keys = len(self.metadata) + more if self.num_keys is None else self.num_keys
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        head = self.magic + struct.pack("<IQQ", self.version, num_tensors, num_keys)
        body = b"".join(packed(key, value) for key, value in self.metadata.items())
        made = head + body + self.keys + b"".join(self.tensors)
        return made + bytes(-len(made) % self.alignment) + self.data
