"""What other processes, and the host, take of the processors beside a measurement.

A side whose threads wait for one another loses far more than the share that a neighbour takes: on a
machine that is not idle a ratio says how the two bear that, not how fast they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

STAT = Path("/proc/stat")
# Of the first line of /proc/stat, behind its name: user, nice, system, idle, iowait, irq, softirq,
# steal. Idle and waiting for disks take nothing.
IDLE = (3, 4)
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Others:
    """Processors that others took since the last call, as a number of them."""

    def __init__(self, pids: Sequence[int], clock: Callable[[], float] = time.monotonic) -> None:
        """pids: of the processes that are measured; this one counts as theirs."""
        self._pids = (os.getpid(), *pids)
        self._clock = clock
        self._last = self._sample()

    def taken(self) -> float | None:
        """In the mean since the last call, steal of the host included; None where none can tell."""
        last, self._last = self._last, self._sample()
        if last is None or self._last is None:
            return None
        seconds, busy, own = (now - then for now, then in zip(self._last, last, strict=True))
        return max(0.0, (busy - own) / seconds) if seconds > 0 else 0.0

    def _sample(self) -> tuple[float, float, float] | None:
        """Now, busy seconds of all processors, and seconds of those that are measured."""
        try:
            busy = busy_seconds(STAT.read_text(encoding="ascii"))
            own = sum(
                process_seconds(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8"))
                for pid in self._pids
            )
        except (OSError, ValueError, IndexError):  # no Linux, or a process that has ended
            return None
        return self._clock(), busy, own


def busy_seconds(stat: str) -> float:
    """Of all processors, since the system started, from the text of /proc/stat."""
    ticks = [int(word) for word in stat.partition("\n")[0].split()[1:9]]
    return sum(each for number, each in enumerate(ticks) if number not in IDLE) / TICKS_PER_S


def process_seconds(stat: str) -> float:
    """Of all threads of a process, in user and kernel mode, from the text of /proc/PID/stat."""
    fields = stat.rpartition(")")[2].split()  # behind the name, which may hold anything
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
