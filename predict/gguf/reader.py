"""The header of a GGUF file: metadata, and where each tensor lies.

Little-endian, versions 2 and 3: magic, version, counts; keys with typed values; a name, dimensions,
type and offset for each tensor; then the tensors, in this order, each from a multiple of
general.alignment on. Every count, length and offset is held against what is left of the file
before anything of its size is made. Source: the GGUF specification of ggml.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TypeAlias

from predict.errors import UserError, quoted
from predict.system.files import open_regular
from predict.system.spans import misplaced

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 1 << 28  # of a vocabulary of 256,000 tokens with its merges: 12 MB
MAX_TENSORS = 1 << 17
MAX_KEYS = 1 << 16
MAX_DIMS = 4
MAX_TEXTS = 1 << 22  # in a list: of tokens
MAX_NAME_BYTES = 1 << 10
MAX_TENSOR_BYTES = 2**63 - 1
DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 16
MIN_KEY_BYTES = 8 + 4 + 1  # a key's length, a type, a value
MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # a name's length, dimensions, a type, an offset

Numbers: TypeAlias = "array[int] | array[float]"
# Metadata: a number, a truth value, a text, or a list of some of these.
Value: TypeAlias = "int | float | bool | str | list[str] | list[bool] | Numbers"
# Numbers by type, as Python's arrays call them.
NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    10: "Q",
    11: "q",
    12: "d",
}
BOOL, TEXT, ARRAY = 7, 8, 9
# Types whose bytes are values, as ggml and safetensors call them.
PLAIN = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8")


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies: rows of blocks, each of so many values in so many bytes."""

    file: Path
    kind: str  # ggml's name of its type: Q4_K
    shape: tuple[int, ...]  # as NumPy has it: the innermost dimension last
    offset: int  # bytes from the start of the file
    block: int  # values
    block_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of the values along the last dimension."""
        return self.shape[-1] // self.block * self.block_bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GgufFile:
    """What a file says of itself."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]


@functools.cache
def types() -> Mapping[int, tuple[str, int, int]]:
    """By number: a type's name, the values of a block, and its bytes; of those that are read."""
    import gguf
    import numpy as np

    found: dict[int, tuple[str, int, int]] = {}
    for kind, (block, num_bytes) in gguf.GGML_QUANT_SIZES.items():
        with contextlib.suppress(NotImplementedError):  # types of sums, which no file holds
            if kind.name not in PLAIN:
                gguf.quants.dequantize(np.zeros((1, num_bytes), np.uint8), kind)
            found[int(kind)] = kind.name, block, num_bytes
    return found


def read_gguf(path: Path) -> GgufFile:
    """The header of a GGUF file. Raises UserError for a file that is none, cut short or damaged."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        header = _Header(file, path, size)
        num_tensors, num_keys = header.counts()
        metadata: dict[str, Value] = {}
        for _ in range(num_keys):
            key = header.name("a key")
            if key in metadata:
                raise header.broken(f"it has the key {quoted(key)} twice")
            metadata[key] = header.value(key)
        entries: dict[str, GgufTensor] = {}
        for _ in range(num_tensors):
            name = header.name("a tensor's name")
            if name in entries:
                raise header.broken(f"it has the tensor {quoted(name)} twice")
            entries[name] = header.entry(name)
        start = file.tell()
    alignment = _alignment(header, metadata)
    start += -start % alignment
    return GgufFile(path, metadata, _placed(header, entries, start, alignment, size))


class _Header:
    """Reads a file from its front, as far as it and MAX_HEADER_BYTES reach."""

    def __init__(self, file: BinaryIO, path: Path, size: int):
        self._file = file
        self.path = path
        self._left = min(size, MAX_HEADER_BYTES)
        self._is_limited = size > MAX_HEADER_BYTES

    def broken(self, why: str) -> UserError:
        return UserError(f"{self.path} is not a whole GGUF file: {why}; copy it again")

    def counts(self) -> tuple[int, int]:
        """The numbers of tensors and of keys, which are behind magic and version."""
        magic = self._take(4, "its first bytes")
        if magic != MAGIC:
            raise self.broken(f"it begins with {magic!r}, and GGUF files with {MAGIC!r}")
        version = self._number(4)
        if version not in VERSIONS:
            known = ", ".join(map(str, VERSIONS))
            if version & 0xFFFF == 0:
                raise UserError(
                    f"{self.path} is a big-endian GGUF file, and little-endian ones are read; "
                    "convert it with the gguf package: gguf-convert-endian FILE little"
                )
            raise UserError(
                f"{self.path} is a GGUF file of version {version} (readable: {known}); convert "
                "the model again with a newer llama.cpp"
            )
        tensors, keys = self._number(8), self._number(8)
        claims = (
            (tensors, MIN_TENSOR_BYTES, MAX_TENSORS, "tensors"),
            (keys, MIN_KEY_BYTES, MAX_KEYS, "keys"),
        )
        for count, least, most, what in claims:
            self._check_room(count * least, f"{count} {what}")
            if count > most:
                raise self.broken(f"it claims {count} {what} (at most {most} are read)")
        return tensors, keys

    def name(self, what: str) -> str:
        """A text of at most MAX_NAME_BYTES bytes, not empty."""
        text = self._text(what, MAX_NAME_BYTES)
        if not text:
            raise self.broken(f"{what} is empty")
        return text

    def value(self, key: str) -> Value:
        """The value of a key, behind its type."""
        kind, what = self._number(4), f"the value of {quoted(key)}"
        if kind == ARRAY:
            return self._array(what)
        if kind == TEXT:
            return self._text(what, MAX_HEADER_BYTES)
        return self._numbers(kind, 1, what)[0]

    def entry(self, name: str) -> GgufTensor:
        """A tensor, whose offset is from the first byte of the first one on."""
        shown = quoted(name)
        num_dims = self._number(4)
        if not 0 < num_dims <= MAX_DIMS:
            raise self.broken(f"{shown} has {num_dims} dimensions (allowed: 1 to {MAX_DIMS})")
        shape = tuple(self._number(8) for _ in range(num_dims))[::-1]
        if 0 in shape:
            raise self.broken(f"{shown} has the shape {list(shape)}, and no values")
        number, offset = self._number(4), self._number(8)
        if number not in types():
            raise UserError(
                f"{self.path}: {shown} is of type {type_name(number)}, which is not supported "
                f"(readable: {', '.join(name for name, *_ in types().values())}); use the model in "
                "one of these types"
            )
        kind, block, block_bytes = types()[number]
        if shape[-1] % block:
            raise self.broken(
                f"{shown} has rows of {shape[-1]} values, and {kind} comes in blocks of {block}"
            )
        if math.prod(shape) // block * block_bytes > MAX_TENSOR_BYTES:
            raise self.broken(f"{shown} of the shape {list(shape)} has more than 2**63 bytes")
        return GgufTensor(self.path, kind, shape, offset, block, block_bytes)

    def _array(self, what: str) -> Value:
        kind, count = self._number(4), self._number(8)
        if kind == ARRAY:
            raise self.broken(f"{what} is a list of lists, which no key has")
        if kind == TEXT:
            self._check_room(8 * count, f"{what}: {count} texts")
            if count > MAX_TEXTS:
                raise self.broken(f"{what} claims {count} texts (allowed: {MAX_TEXTS})")
            return [self._text(what, MAX_HEADER_BYTES) for _ in range(count)]
        return self._numbers(kind, count, what)

    def _numbers(self, kind: int, count: int, what: str) -> list[bool] | Numbers:
        if kind == BOOL:
            data = self._take(count, what)
            if data.translate(None, b"\0\1"):
                raise self.broken(f"{what} is {max(data)}, and neither true (1) nor false (0)")
            return [byte == 1 for byte in data]
        if kind not in NUMBERS:
            known = ", ".join(map(str, sorted((*NUMBERS, BOOL, TEXT, ARRAY))))
            raise self.broken(f"{what} is of type {kind} (known: {known})")
        values: Numbers = array(NUMBERS[kind])
        values.frombytes(self._take(count * values.itemsize, what))
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def _text(self, what: str, most: int) -> str:
        size = self._number(8)
        if size > most:
            raise self.broken(f"{what} claims {size} bytes (allowed: {most})")
        try:
            return self._take(size, what).decode()
        except UnicodeDecodeError:
            raise self.broken(f"{what} is not UTF-8 text") from None

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size, "a number"), "little")

    def _take(self, size: int, what: str) -> bytes:
        if size > self._left:
            self._check_room(size, what)
        data = self._file.read(size)
        if len(data) != size:
            raise self.broken(f"it ended at {what} while it was read")
        self._left -= size
        return data

    def _check_room(self, size: int, what: str) -> None:
        if size > self._left:
            limit = "are read of a header" if self._is_limited else "are left of the file"
            raise self.broken(f"{what} would take {size} bytes, and {self._left} {limit}")


def type_name(number: int) -> str:
    """The name that ggml has for a type, else its number."""
    import gguf

    try:
        return str(gguf.GGMLQuantizationType(number).name)
    except ValueError:
        return str(number)


def _alignment(header: _Header, metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):  # type: ignore[operator]
        raise header.broken(
            f"general.alignment is {quoted(value)} (allowed: powers of two up to {MAX_ALIGNMENT})"
        )
    assert isinstance(value, int)
    return value


def _placed(
    header: _Header, entries: Mapping[str, GgufTensor], start: int, alignment: int, size: int
) -> dict[str, GgufTensor]:
    """The tensors; UserError unless they lie one behind the other, as far as the file reaches."""
    made = {name: replace(entry, offset=start + entry.offset) for name, entry in entries.items()}
    parts = ((tensor.offset, tensor.num_bytes, name) for name, tensor in made.items())
    complaint = misplaced(parts, start, size, alignment) if made else None
    if complaint:
        raise header.broken(complaint)
    return made
