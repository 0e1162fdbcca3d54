"""What the library has to say beside its answers: records of the logger "regatta".

An embedding program hears them where it configures logging; commands print them on stderr.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from predict.system.console import say

LOG = logging.getLogger("regatta")
LOG.addHandler(logging.NullHandler())  # else Python prints warnings that nobody asked for


class OnStderr(logging.Handler):
    """Prints records on stderr, each as "regatta: " and its message."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a record, with the traceback of its exception where it has one."""
        say(self.format(record))


@contextmanager
def printed() -> Iterator[None]:
    """Notes and warnings go to stderr until the end of the block, and nowhere else.

    Paddle gives the root logger a handler, which would print them once more.
    """
    handler, level, propagates = OnStderr(), LOG.level, LOG.propagate
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(level)
        LOG.propagate = propagates
