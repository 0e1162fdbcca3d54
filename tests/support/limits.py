"""A limit on the processor time of what ought to end soon."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cpu_seconds(limit: float) -> Iterator[None]:
    """Raises AssertionError in the body once this process has computed for so long.

    Only its own time counts, so that a busy machine changes nothing: what would take minutes ends,
    what takes milliseconds never does. For the main thread.
    """

    def expired(number: int, frame: object) -> None:
        raise AssertionError(f"still computing after {limit} s of processor time")

    before = signal.signal(signal.SIGPROF, expired)
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
