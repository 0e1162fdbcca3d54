"""csrc/text built by CMake, and called as Python calls a C library."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from tests.support import cmake_packages
from tests.support.paths import ROOT

SOURCE = ROOT / "csrc" / "text"
PACKAGES = {"oniguruma": "libonig-dev", "libutf8proc": "libutf8proc-dev"}
ADD_SPECIAL, LITERAL, SKIP_SPECIAL = 1, 2, 4
FINISH = -(2**31)  # among the ids of `Text.pieces`
OK, INVALID, BAD_FILE, UNSUPPORTED, TOO_SMALL, NO_MEMORY, FAILED = range(7)


def missing() -> str:
    """Why the library cannot be built here; "" where it can."""
    return cmake_packages.missing(PACKAGES)


def installed(*options: str) -> Path:
    """The folder that it was installed into with these options of CMake, now or before."""
    (folder,) = cmake_packages.installed(SOURCE, [SOURCE, SOURCE.parent / "cmake"], options)
    return folder


class TextError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@cache
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(installed() / "lib" / "libregatta_text.so.1"))
    loaded.regatta_text_error.restype = ctypes.c_char_p
    loaded.regatta_text_close.restype = loaded.regatta_text_stream_close.restype = None
    return loaded


def check(status: int) -> None:
    if status != OK:
        raise TextError(status, library().regatta_text_error().decode())


class Text:
    """An opened text file."""

    def __init__(self, data: bytes) -> None:
        self._handle = ctypes.c_void_p()
        check(library().regatta_text_read(data, size(data), ctypes.byref(self._handle)))

    def __del__(self) -> None:
        library().regatta_text_close(self._handle)

    def encode(self, text: str | bytes, flags: int = 0) -> list[int]:
        given = text if isinstance(text, bytes) else text.encode()
        room = 3 * len(given) + 64
        ids, count = (ctypes.c_int32 * room)(), ctypes.c_size_t()
        check(
            library().regatta_text_encode(
                self._handle, given, size(given), flags, ids, ctypes.c_size_t(room),
                ctypes.byref(count),
            )
        )  # fmt: skip
        return ids[: count.value]

    def decode(self, ids: Sequence[int], flags: int = 0) -> str:
        out, count = ctypes.create_string_buffer(4096), ctypes.c_size_t()
        for _ in range(2):
            status = library().regatta_text_decode(
                self._handle, array(ids), size(ids), flags, out, size(out), ctypes.byref(count)
            )
            if status != TOO_SMALL:
                break
            out = ctypes.create_string_buffer(count.value)
        check(status)
        return out.raw[: count.value].decode()

    def pieces(
        self, ids: Sequence[int], prompt: Sequence[int] = (), flags: int = 0
    ) -> Iterator[bytes]:
        """The text of each id behind a prompt, then the rest; an id FINISH gives the rest, too."""
        stream = ctypes.c_void_p()
        check(
            library().regatta_text_stream_open(
                self._handle, array(prompt), size(prompt), flags, ctypes.byref(stream)
            )
        )
        piece, count = ctypes.c_void_p(), ctypes.c_size_t()
        out = ctypes.byref(piece), ctypes.byref(count)
        try:
            for i in (*ids, FINISH):
                if i == FINISH:
                    check(library().regatta_text_stream_finish(stream, *out))
                else:
                    add = library().regatta_text_stream_add
                    check(add(stream, array([i]), ctypes.c_size_t(1), *out))
                yield ctypes.string_at(piece, count.value)
        finally:
            library().regatta_text_stream_close(stream)

    def so_far(self, ids: Sequence[int], flags: int = 0) -> Iterator[tuple[bytes, bytes]]:
        """Behind each id: all pieces joined, and what would follow them were there no more."""
        stream, text = ctypes.c_void_p(), b""
        opened = library().regatta_text_stream_open
        check(opened(self._handle, array([]), size([]), flags, ctypes.byref(stream)))
        piece, pending, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
        try:
            for i in ids:
                out = ctypes.byref(piece), ctypes.byref(count)
                add = library().regatta_text_stream_add
                check(add(stream, array([i]), ctypes.c_size_t(1), *out))
                text += ctypes.string_at(piece, count.value)
                out = ctypes.byref(pending), ctypes.byref(count)
                check(library().regatta_text_stream_pending(stream, *out))
                yield text, ctypes.string_at(pending, count.value)
        finally:
            library().regatta_text_stream_close(stream)


def size(items: Sequence[object] | bytes | ctypes.Array[ctypes.c_char]) -> ctypes.c_size_t:
    return ctypes.c_size_t(len(items))


def array(ids: Sequence[int]) -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * len(ids))(*ids)
