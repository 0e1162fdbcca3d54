"""What the host machine offers to this process. Imports no Paddle."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def available_memory_bytes() -> int:
    """Bytes that can be allocated without swapping: /proc/meminfo, capped by the cgroup's limit."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass
    with suppress(OSError, ValueError):
        available = min(available, _cgroup_bytes(Path("/sys/fs/cgroup")))
    return max(available, 0)


def _cgroup_bytes(folder: Path) -> int:
    """Bytes that a cgroup leaves. Raises OSError or ValueError where it has no limit."""
    limit = int((folder / "memory.max").read_text())  # "max" is no number
    used = int((folder / "memory.current").read_text())
    # Files that were read count as used until someone needs the room: a model's, after a download.
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return limit - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))


def processor() -> dict[str, str]:
    """What /proc/cpuinfo says of the first processor; empty without it."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Garbage collection leaves out what is there now, until the end.

    Between two steps, a full collection looked through Paddle's hundred thousand objects for 40 ms.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def give_back_memory() -> None:
    """Gives memory that is free, and that malloc keeps, back to the system; glibc has that call."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_bytes() -> int:
    """The memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_memory_bytes() -> int:
    """The largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def process_age_seconds() -> float:
    """Seconds since the kernel started this process, imports and all."""
    # Field 22 of /proc/self/stat; the name in field 2 may hold spaces, so count from its end.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - started
