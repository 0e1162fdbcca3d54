"""Whether processes live, run and get on. Imports no Paddle."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from predict.system.console import say

_PR_SET_PDEATHSIG = 1
LOOK_SECONDS = 0.05
STOPPED = "Tt"  # states of a process that a signal or a debugger has stopped


class State(NamedTuple):
    """What the kernel says of a process."""

    letter: str  # R, S, D, T, Z, ...; "": it is gone
    cpu_seconds: float

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        return self.letter in STOPPED and self.letter != ""


def state_of(process_id: int) -> State:
    """The state of a process now."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return State("", 0.0)
    fields = text.rpartition(")")[2].split()  # the name may hold spaces
    return State(fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))


def peak_bytes_of(process_id: int) -> int:
    """The largest resident set of a process so far; 0 where it is gone."""
    try:
        lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


class Clock:
    """Seconds while this process runs: what it was stopped for does not count."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last = time.monotonic()

    def tick(self) -> float:
        """The seconds now; called every LOOK_SECONDS."""
        now = time.monotonic()
        self.seconds += min(now - self._last, 10 * LOOK_SECONDS)
        self._last = now
        return self.seconds


def end_with_front(front: int, rank: int, timeout: float) -> None:
    """Makes this process end with the front, and end the front where it is stopped for too long.

    timeout: seconds. Signals that a terminal sends to all of its processes are the front's.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != front:  # it has ended before the kernel knew
        sys.exit(1)
    threading.Thread(target=_watch_front, args=(front, rank, timeout), daemon=True).start()


def _watch_front(front: int, rank: int, timeout: float) -> None:
    clock, moved = Clock(), 0.0
    while os.getppid() == front:
        time.sleep(LOOK_SECONDS)
        now = clock.tick()
        if not state_of(front).is_stopped:
            moved = now
        elif now - moved > timeout:
            say(
                f"regatta: rank {rank}: the front (process {front}) was stopped for {timeout:g} s, "
                "and so all ends (--rank_timeout)"
            )
            os.kill(front, signal.SIGKILL)
            break
    os._exit(1)


_TOGETHER: list[Callable[[], list[int]]] = []  # living processes of each group


def stop_together(process_ids: Callable[[], list[int]]) -> None:
    """SIGTSTP to this process stops those of all groups too, and SIGCONT lets them go on.

    Where a group is made in the main thread, and nobody else handles the signal.
    """
    _TOGETHER.append(process_ids)
    if _is_handled_by(signal.SIG_DFL):
        signal.signal(signal.SIGTSTP, _stop)


def stop_alone(process_ids: Callable[[], list[int]]) -> None:
    """Takes back one call of `stop_together`; behind the last one the signal is the system's."""
    _TOGETHER.remove(process_ids)
    if not _TOGETHER and _is_handled_by(_stop):
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)


def _is_handled_by(handler: object) -> bool:
    """Whether SIGTSTP is, and this thread may change that."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGTSTP) == handler


def _stop(number: int, frame: object) -> None:
    ids = [each for group in _TOGETHER for each in group()]
    _send(ids, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    _send(ids, signal.SIGCONT)


def _send(process_ids: list[int], number: signal.Signals) -> None:
    for each in process_ids:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(each, number)
