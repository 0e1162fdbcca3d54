"""What the host machine offers to this process. Imports no Paddle."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
from collections.abc import Iterator, Sequence
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


_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r-[x-]p \S+ \S+ [1-9]\d* +(/.*\.so\b.*)")
_DONTNEED = 4  # of madvise(2)
_LEAST_KIB = 256  # of a mapping that is worth a call


def give_back_library_pages() -> int:
    """Bytes of library files that this process no longer holds; what it reads again comes back.

    Importing Paddle runs 140 MiB of code once, to register operators. The pages stay in the
    system's cache of files, as all processes' that map them do.
    """
    libc = ctypes.CDLL(None)
    text = Path("/proc/self/smaps").read_text(errors="replace")
    given, found, kib = 0, None, 0
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if "-" in name.split(" ")[0]:
            found = _MAPPING.match(line)
        elif name == "Rss":
            kib = int(rest.split()[0])
        # Pages that were written, as the linker does, are no file's any more.
        elif name == "Anonymous" and found and kib >= _LEAST_KIB and int(rest.split()[0]) == 0:
            begin, end = int(found[1], 16), int(found[2], 16)
            if libc.madvise(ctypes.c_size_t(begin), ctypes.c_size_t(end - begin), _DONTNEED) == 0:
                given += kib << 10
    return given


NODES = Path("/sys/devices/system/node")


def node_cores(folder: Path = NODES) -> list[set[int]]:
    """The cores of each NUMA node that has some; none where the system does not say."""
    found = []
    for path in sorted(folder.glob("node*/cpulist"), key=lambda path: int(path.parent.name[4:])):
        cores = set[int]()
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            cores |= set(range(int(first), int(last or first) + 1)) if first else set()
        found += [cores] if cores else []
    return found


def cores_of_share(
    index: int, count: int, nodes: Sequence[set[int]], allowed: set[int]
) -> set[int] | None:
    """The cores of one of `count` processes that share a machine, whole nodes or a part of one.

    None where the cores that are allowed lie in one node, or where some process would have fewer
    cores than threads, of which each has as many: the system places them best then.
    """
    own = [node & allowed for node in nodes if node & allowed]
    if len(own) < 2:
        return None
    firsts = [each * len(own) // count for each in range(count)]
    ends = [max((each + 1) * len(own) // count, firsts[each] + 1) for each in range(count)]
    shares = [set[int]().union(*own[a:b]) for a, b in zip(firsts, ends, strict=True)]
    threads = len(set().union(*own)) // count
    if any(len(share) < threads * shares.count(share) for share in shares):
        return None
    return shares[index]


def process_age_seconds() -> float:
    """Seconds since the kernel started this process, imports and all."""
    # Field 22 of /proc/self/stat; the name in field 2 may hold spaces, so count from its end.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - started
