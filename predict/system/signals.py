"""Signals that end a run in good order: SIGINT (Ctrl-C), SIGTERM and SIGHUP.

The first one raises Interrupted where the main thread is, or waits for a `check` inside of a block
that must not be broken off. The second one ends the process at once. One that the caller had
ignored, as nohup does with SIGHUP and a shell with a background job's SIGINT, stays ignored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to end.

    said: what the command says of it; None: what it always says.
    """

    def __init__(self, number: int, said: str | None = None) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number
        self.said = said


def number_of(error: KeyboardInterrupt) -> int:
    """The signal's number."""
    return error.number if isinstance(error, Interrupted) else signal.SIGINT


def exit_code(error: KeyboardInterrupt) -> int:
    """128 + the signal's number, as shells have it."""
    return 128 + number_of(error)


class Signals:
    """Takes the signals of this process for the length of a `with` block.

    On another thread than the main one nothing is taken: Python runs handlers there alone.
    """

    def __init__(self) -> None:
        self.number: int | None = None  # of the first signal that came
        self._held: list[str] = []  # what must not be broken off, the innermost last
        self._before: dict[int, Handler] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def check(self) -> None:
        """Raises Interrupted when a signal came: where one waits, or a library swallowed it."""
        if self.number is not None:
            raise Interrupted(self.number)

    @contextlib.contextmanager
    def held(self, what: str) -> Iterator[None]:
        """Lets a signal wait for the next `check`. what: is said when one comes, as a sentence."""
        self._held.append(what)
        try:
            yield
        finally:
            self._held.pop()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            os._exit(128 + number)
        self.number = number
        if not self._held:
            raise Interrupted(number)
        # Not through sys.stderr: the signal may have come in the middle of a write to it.
        line = f"{signal.Signals(number).name}: {self._held[-1]}; a second one ends at once\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode())


@contextlib.contextmanager
def kept(blocked: bool = True) -> Iterator[None]:
    """Signals wait until the end of the block, and their handlers are then what they were.

    blocked: False lets them come, for libraries whose processes need them: a process that is
    started while signals are blocked never gets them.

    For imports of libraries that install handlers of their own, as Paddle does for SIGTERM, or
    that take an interruption for a missing module. Threads that they start get no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in NUMBERS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS if blocked else ())
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
