"""What goes to the terminal: lines for people, of whom none may be there any more.

Answers and prompts come from strangers, so no control sequence of theirs reaches a terminal as it
is; and a terminal, pipe or file that takes nothing more silences the messages, never the run.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

# C0 but tab and newline, DEL, C1, the line separators that some terminals obey, and the marks that
# turn the direction of a text round.
_CONTROLS = {
    code: f"\\x{code:02x}"
    for code in (*range(0x20), *range(0x7F, 0xA0))
    if code not in (0x09, 0x0A)
} | {
    code: f"\\u{code:04x}"
    for code in (0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


@contextlib.contextmanager
def guarded_streams() -> Iterator[None]:
    """Until the end of the block, printing to stdout or stderr never fails, in libraries too.

    Streams that the caller closed (2>&-) get a place that takes nothing: else the next file that is
    opened has their number, and a library's warnings land in it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY)  # the lowest free number: this one
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, Unfailing(stream)) for stream in before)
    try:
        yield
    finally:
        flush()
        sys.stdout, sys.stderr = before


def flush() -> None:
    """Writes what the streams hold; what they do not take is dropped, not complained of at exit."""
    for stream in (sys.stdout, sys.stderr):
        _write(stream, "")


class Unfailing:
    """A stream for those who do not expect one to fail: what it does not take is dropped."""

    encoding = "utf-8"  # where there is no stream

    def __init__(self, stream: TextIO | None) -> None:
        self.inner = stream
        if stream is not None:
            self.encoding = stream.encoding

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def isatty(self) -> bool:
        """Whether it is a terminal that is still there."""
        return self.inner is not None and not self.inner.closed and self.inner.isatty()

    def write(self, text: str) -> int:
        """Writes what the stream takes."""
        _write(self.inner, text)
        return len(text)

    def flush(self) -> None:
        """Nothing: `write` flushes."""


def visible(text: str) -> str:
    """`text` with every control character but tab and newline spelled out, as 1b in hexadecimal."""
    return text.translate(_CONTROLS)


def say(message: str) -> None:
    """Prints a line on stderr; nothing when that is closed or full."""
    _write(sys.stderr, visible(message) + "\n")


def show(text: str) -> bool:
    """Prints a text on stdout; False when that takes no more, and what follows goes nowhere."""
    return _write(sys.stdout, visible(text) + "\n")


def _write(stream: TextIO | None, text: str) -> bool:
    if isinstance(stream, Unfailing):
        stream = stream.inner
    try:
        if stream is None or stream.closed:
            return False
        stream.write(
            text.encode(stream.encoding or "utf-8", "replace").decode(
                stream.encoding or "utf-8", "replace"
            )
        )
        stream.flush()
    except (OSError, ValueError):
        _silence(stream)
        return False
    return True


def _silence(stream: TextIO | None) -> None:
    """Sends what a stream still holds to nowhere: Python flushes at exit, and would complain."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]
        os.close(nowhere)
