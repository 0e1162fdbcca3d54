"""Whether processes live, run and get on. Imports no Paddle."""

from __future__ import annotations

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


def stop_together(process_ids: Callable[[], list[int]]) -> None:
    """SIGTSTP to this process, in its main thread, stops those too, and SIGCONT lets them go on."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL:
        return

    def stop(number: int, frame: object) -> None:
        ids = process_ids()
        for each in ids:
            os.kill(each, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for each in ids:
            os.kill(each, signal.SIGCONT)

    signal.signal(signal.SIGTSTP, stop)
