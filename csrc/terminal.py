"""A build's progress on the terminal that `pip install` was started from.

pip keeps what a build prints for itself (it shows it with -v), so that compiling for minutes looks
like a hang. The terminal can still be written to as /dev/tty. One line is drawn over and over; it
ends in a space, which pip's own mark of activity takes, and never gets shorter.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from build import Progress

TERMINAL = "/dev/tty"
# pip -q was asked for silence; with -v the compiler's own lines are seen.
QUIET_OR_VERBOSE = re.compile(r"-[a-zA-Z]*[qv][a-zA-Z]*|--quiet|--verbose")


@contextlib.contextmanager
def install_progress() -> Iterator[Progress | None]:
    """Yields what draws a build's progress; None where there is no terminal, or no need to."""
    handle = _open_terminal() if _is_wanted() else None
    if handle is None:
        yield None
        return
    is_first = True

    def progress(done: int, steps: int) -> None:
        nonlocal is_first
        text = f"  compiling the operators: {done:{len(str(steps))}} of {steps} steps "
        _write(handle, ("\n" if is_first else "\r") + text)
        is_first = False

    try:
        yield progress
    finally:
        os.close(handle)


def _is_wanted() -> bool:
    """Whether pip runs this and hides what it prints."""
    if "PIP_BUILD_TRACKER" not in os.environ or sys.stderr.isatty():
        return False
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False
    return not any(QUIET_OR_VERBOSE.fullmatch(word) for word in words.split("\0"))


def _open_terminal() -> int | None:
    try:
        # Not waiting: a terminal that was stopped with Ctrl-S must not stop the build.
        return os.open(TERMINAL, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # none: a service, a container, a continuous build
        return None


def _write(handle: int, text: str) -> None:
    """Writes to the terminal if this is in its foreground; nothing depends on it."""
    with contextlib.suppress(OSError):
        # In the background a terminal may stop a process that writes to it (stty tostop).
        if os.tcgetpgrp(handle) == os.getpgrp():
            os.write(handle, text.encode())
