"""Memory that processes share, and rings of messages in it.

Words of 32 bits are stored and loaded whole and in order: x86-64, which the library is built for,
keeps the order of a process's stores. Imports no Paddle.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 202)  # the system call's number
_WAIT, _WAKE = 0, 1
_LIBC = ctypes.CDLL(None, use_errno=True)
SLEEP_SECONDS = 0.02  # a waiting process then looks whether the others are still there
LINE = 64  # bytes of a word, so that no two share a line of the cache
PAGE = 4096
_LENGTH = struct.Struct("<Q")
Look = Callable[[], None]  # raises where waiting makes no sense any more
Buffer = bytes | bytearray | memoryview


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Words:
    """32-bit counters of a mapping, one a line."""

    def __init__(self, memory: mmap.mmap, offset: int):
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + offset
        self._memory = memory  # stays mapped

    def load(self, index: int) -> int:
        """A word's value."""
        return ctypes.c_uint32.from_address(self._address + LINE * index).value

    def store(self, index: int, value: int) -> None:
        """Writes a word, modulo 2**32, and wakes who waits for it."""
        address = self._address + LINE * index
        ctypes.c_uint32.from_address(address).value = value & 0xFFFFFFFF
        _LIBC.syscall(_FUTEX, ctypes.c_void_p(address), _WAKE, 0x7FFFFFFF, None, None, 0)

    def wait(self, index: int, seen: int) -> None:
        """Returns when the word is not `seen`, or SLEEP_SECONDS later."""
        address = ctypes.c_void_p(self._address + LINE * index)
        timeout = _Time(0, int(SLEEP_SECONDS * 1e9))
        value = ctypes.c_uint32(seen)
        _LIBC.syscall(_FUTEX, address, _WAIT, value, ctypes.byref(timeout), None, 0)


class Ring:
    """Messages of one writer, in order, for each of its readers. Both ends see all of this."""

    def __init__(self, memory: mmap.mmap, offset: int, capacity: int, num_readers: int):
        """The ring at `offset` of a mapping. capacity: bytes, a power of two."""
        self._words = Words(memory, offset)
        begin = offset + PAGE
        self._data = memoryview(memory)[begin : begin + capacity]
        self._capacity, self._readers = capacity, range(1, 1 + num_readers)
        self._done = 0  # bytes that this end has written or read, modulo 2**32

    @staticmethod
    def num_bytes(capacity: int) -> int:
        """Bytes of a mapping that a ring takes."""
        return PAGE + capacity

    def write(self, parts: Sequence[Buffer], look: Look) -> None:
        """Writes one message, which may be longer than the ring. Raises what `look` raises."""
        size = sum(memoryview(part).nbytes for part in parts)
        parts = (_LENGTH.pack(size), *parts)
        for part in parts if size > PAGE else (b"".join(parts),):  # few copies, or few parts
            self._write(memoryview(part).cast("B"), look)
        self._words.store(0, self._done)

    def _write(self, part: memoryview, look: Look) -> None:
        while len(part):
            room = self._room()
            while not room:
                self._words.store(0, self._done)  # what is there may be read
                slowest = max(self._readers, key=self._behind)
                self._words.wait(slowest, (self._done - self._capacity) & 0xFFFFFFFF)
                look()
                room = self._room()
            at = self._done % self._capacity
            length = min(room, len(part), self._capacity - at)
            self._data[at : at + length] = part[:length]
            part = part[length:]
            self._done = (self._done + length) & 0xFFFFFFFF

    def _behind(self, reader: int) -> int:
        """Bytes that a reader has not read."""
        return (self._done - self._words.load(reader)) & 0xFFFFFFFF

    def _room(self) -> int:
        return self._capacity - max(map(self._behind, self._readers))

    def has_message(self) -> bool:
        """Whether a reader's next message has begun to come."""
        return self._words.load(0) != self._done

    def read(self, reader: int, look: Look) -> memoryview:
        """The next message of a reader (0, 1, ...). Raises what `look` raises."""
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size, reader, look))
        return memoryview(self._read(size, reader, look))

    def _read(self, size: int, reader: int, look: Look) -> bytearray:
        found, start = bytearray(size), 0
        while start < size:
            there = (self._words.load(0) - self._done) & 0xFFFFFFFF
            while not there:
                self._words.wait(0, self._done)
                look()
                there = (self._words.load(0) - self._done) & 0xFFFFFFFF
            at = self._done % self._capacity
            length = min(there, size - start, self._capacity - at)
            found[start : start + length] = self._data[at : at + length]
            start += length
            self._done = (self._done + length) & 0xFFFFFFFF
            self._words.store(1 + reader, self._done)
        return found


DOWN_BYTES, UP_BYTES = 1 << 22, 1 << 20  # of the rings to the ranks, and of each one back


class Channels(NamedTuple):
    """The rings between a front and its ranks, and a word of progress for each rank."""

    down: Ring  # from the front to all ranks
    up: Sequence[Ring]  # from each rank to the front
    progress: Words  # by rank: raised by whatever a rank has done

    @staticmethod
    def create(size: int) -> int:
        """The descriptor of new memory for `size` ranks: no file, and gone with its processes."""
        fd = os.memfd_create("regatta-ranks")
        os.truncate(fd, PAGE + Ring.num_bytes(DOWN_BYTES) + size * Ring.num_bytes(UP_BYTES))
        return fd

    @classmethod
    def open(cls, fd: int, size: int) -> Channels:
        """The channels in the memory of `create`."""
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
        begin = PAGE + Ring.num_bytes(DOWN_BYTES)
        step = Ring.num_bytes(UP_BYTES)
        up = [Ring(memory, begin + rank * step, UP_BYTES, 1) for rank in range(size)]
        return cls(Ring(memory, PAGE, DOWN_BYTES, size), up, Words(memory, 0))


# By number in a message.
_DTYPES = [np.dtype(n) for n in ("u1", "i4", "i8", "f4", "f8", "u2", "f2", "i1", "?")]
_ARRAY = struct.Struct("<bb6xqqqqqq")  # dtype (-1: None), dimensions, sizes
_HEAD = struct.Struct("<ii")  # kind, arrays
_MOST_DIMS = 6
Arrays = Sequence["npt.NDArray[np.generic] | None"]


def message(kind: int, arrays: Arrays = ()) -> list[Buffer]:
    """A message of arrays as raw bytes: see `opened`."""
    parts: list[Buffer] = [_HEAD.pack(kind, len(arrays))]
    for array in arrays:
        if array is None:
            parts.append(_ARRAY.pack(-1, 0, *[0] * _MOST_DIMS))
            continue
        array = np.ascontiguousarray(array)
        sizes = [*array.shape, *[0] * (_MOST_DIMS - array.ndim)]
        parts.append(_ARRAY.pack(_DTYPES.index(array.dtype), array.ndim, *sizes))
        if array.size:
            parts.append(array.reshape(-1).data.cast("B"))
    return parts


def opened(data: memoryview) -> tuple[int, list[npt.NDArray[np.generic] | None]]:
    """The kind of a message and its arrays, which lie in its memory."""
    kind, count = _HEAD.unpack_from(data)
    at, found = _HEAD.size, list["npt.NDArray[np.generic] | None"]()
    for _ in range(count):
        number, num_dims, *sizes = _ARRAY.unpack_from(data, at)
        at += _ARRAY.size
        if number < 0:
            found.append(None)
            continue
        dtype, shape = _DTYPES[number], sizes[:num_dims]
        size = int(np.prod(shape, dtype=np.int64))
        found.append(np.frombuffer(data, dtype, size, at).reshape(shape))
        at += size * dtype.itemsize
    return kind, found
