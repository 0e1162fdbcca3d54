"""Signals as a process that is started from a terminal has them."""

from __future__ import annotations

import signal

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def as_from_a_terminal() -> None:
    """For `preexec_fn`: a shell's background jobs ignore SIGINT, and what nohup starts SIGHUP."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_DFL)
