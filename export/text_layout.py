"""The layout of a text file: docs/runtime-format.md, "Text"; csrc/text/file.cc reads it."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from predict.errors import UserError

MAGIC, VERSION, BPE = b"REGATEXT", 1, 0
NFC, PREPEND, REPLACE, PREFIX_SPACE, SPLIT_REGEX, SPLIT_TEXT, METASPACE = 1, 2, 3, 16, 17, 18, 19
BEHAVIORS = ("Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext")
SCHEMES = ("always", "first", "never")
IGNORE_MERGES, BYTE_FALLBACK, FUSE_UNKNOWN, BYTE_LEVEL, EACH_BYTE = 1, 2, 4, 8, 16
SWITCHES = {"special": 1, "lstrip": 2, "rstrip": 4, "normalized": 8, "single_word": 16}
TEXT, BYTE, SPECIAL = 1, 2, 128  # without a text: 0
NONE = 2**32 - 1
# What csrc/text/file.h allows: bytes of an expression or an added token, of any other text of a
# step, and of a file; ids around a text, and spaces that a start loses, are below MAX_SHORT.
MAX_IDS, MAX_STEPS, MAX_PATTERN, MAX_SHORT, MAX_BYTES = 2**22, 64, 2**16, 2**10, 2**29


class Step(NamedTuple):
    """A step ahead of the model."""

    kind: int
    way: int = 0
    on: bool = False
    a: str = ""
    b: str = ""

    def data(self) -> bytes:
        """Its bytes in a file."""
        return u32(self.kind, self.way, self.on) + text(self.a.encode()) + text(self.b.encode())


@dataclass
class TextFile:
    """What a text file holds."""

    flags: int
    unknown: int | None
    ends: tuple[Sequence[int], Sequence[int]]  # ids ahead of a text, and behind it
    steps: Sequence[Step]
    added: Mapping[tuple[bool, bytes], tuple[int, int]]  # (normalized, content): id, flags
    texts: Mapping[int, tuple[int, bytes]]  # id: kind, text
    words: Mapping[bytes, int]
    merges: Mapping[tuple[int, int], tuple[int, int]]  # (left, right): rank, id
    strip: int = 0
    bare_start: bool = False

    def check(self, path: Path) -> None:
        """Raises UserError, naming `path`, for what is larger than readers take."""
        found = [
            ("the id of a token", max(self.texts), MAX_IDS - 1, ""),
            ("the number of steps", len(self.steps), MAX_STEPS, ""),
            ("the spaces that a start loses", self.strip, MAX_SHORT - 1, ""),
            ("the number of merges", len(self.merges), 4 * MAX_IDS - 1, ""),
        ]
        found += [("the ids around a text", len(ids), MAX_SHORT - 1, "") for ids in self.ends]
        for step in self.steps:
            most = MAX_PATTERN if step.kind == SPLIT_REGEX else MAX_SHORT
            found.append(("the bytes of a step's text", len(step.a.encode()), most, step.a))
            found.append(("the bytes that a step writes", len(step.b.encode()), MAX_SHORT, step.b))
        for _, content in self.added:
            shown = content[:80].decode(errors="replace")
            found.append(("the bytes of an added token", len(content), MAX_PATTERN, shown))
        for what, size, most, shown in found:
            if size > most:
                beginning = f" ({shown[:40]!r}...)" if shown else ""
                refuse(path, f"{what}{beginning}: {size}, above {most},")

    def data(self) -> bytes:
        """The file's bytes."""
        parts = [*self._head(), *self._added(), *self._texts(), *self._words(), *self._merges()]
        body = b"".join(parts)
        return MAGIC + u32(VERSION, BPE, len(MAGIC) + 12 + len(body)) + body

    def _head(self) -> Iterator[bytes]:
        yield u32(max(self.texts) + 1, self.flags, self.strip, self.bare_start)
        yield u32(NONE if self.unknown is None else self.unknown)
        for ids in self.ends:
            yield u32(len(ids), *ids)
        yield u32(len(self.steps))
        yield from (step.data() for step in self.steps)

    def _added(self) -> Iterator[bytes]:
        yield u32(len(self.added))
        for (_, content), token in sorted(self.added.items()):
            yield u32(*token) + text(content)

    def _texts(self) -> Iterator[bytes]:
        held = [self.texts.get(i, (0, b"")) for i in range(max(self.texts) + 1)]
        yield bytes(kind for kind, _ in held)
        yield strings(content for _, content in held)

    def _words(self) -> Iterator[bytes]:
        rows = sorted(self.words.items())
        yield u32(len(rows), *(i for _, i in rows))
        yield strings(word for word, _ in rows)

    def _merges(self) -> Iterator[bytes]:
        rows = sorted((*pair, *merge) for pair, merge in self.merges.items())
        yield u32(len(rows))
        yield np.array(rows, "<u4").tobytes()


def u32(*values: int) -> bytes:
    """Numbers of 4 bytes."""
    return struct.pack(f"<{len(values)}I", *values)


def text(content: bytes) -> bytes:
    """A size, then as many bytes."""
    return u32(len(content)) + content


def strings(texts: Iterable[bytes]) -> bytes:
    """Where each begins and the last ends, then the texts."""
    held = list(texts)
    return u32(0, *accumulate(map(len, held))) + b"".join(held)


def refuse(path: Path, what: str) -> NoReturn:
    """Raises the UserError that says what the list of steps lacks."""
    raise UserError(
        f"{path}: {what} is not among the steps of a text file (docs/runtime-format.md lists "
        "them); run the exported model on ids"
    )
