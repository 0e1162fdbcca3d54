"""What goes to the terminal: lines for people, of whom none may be there any more.

Answers and prompts come from strangers, so no control sequence of theirs reaches a terminal as it
is; and a terminal, pipe or file that takes nothing more silences the messages, never the run.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

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


def visible(text: str) -> str:
    """`text` with every control character but tab and newline spelled out, as 1b in hexadecimal."""
    return text.translate(_CONTROLS)


def say(message: str) -> None:
    """Prints a line on stderr; nothing when that is closed or full."""
    _write(sys.stderr, visible(message) + "\n")


def show(text: str) -> bool:
    """Prints a text on stdout; False when nothing more can go there, and from then on."""
    return _write(sys.stdout, visible(text) + "\n")


def _write(stream: TextIO | None, text: str) -> bool:
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
