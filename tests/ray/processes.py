"""Processes of a command on Ray, found and killed from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tests.support.paths import ROOT

TOO_LONG = 300.0  # seconds: something hangs
LISTENS = "0A"  # in /proc/net/tcp

T = TypeVar("T")


def children(parent: int) -> list[int]:
    """Process ids of all that a process has started, and they in turn."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(folder.name)] = int(fields[1])
    found = [parent]
    for process in found:
        found += [child for child, its_parent in parents.items() if its_parent == process]
    return found[1:]


def named(parent: int, title: str) -> list[int]:
    """Those of them whose title begins so, as Ray calls its workers."""
    return [process for process in children(parent) if _line(process).startswith(title.encode())]


def with_word(parent: int, word: str) -> list[int]:
    """Those of them that were started with this word."""
    return [process for process in children(parent) if word.encode() in _line(process).split(b"\0")]


def _line(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def listening(parent: int) -> set[str]:
    """IPv4 addresses, as the kernel writes them, that a process and its children listen on."""
    sockets: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS:
                sockets[f"socket:[{fields[9]}]"] = fields[1].rpartition(":")[0]
    found = set()
    for process in (parent, *children(parent)):
        try:
            names = [os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir()]
        except OSError:
            continue
        found |= {sockets[name] for name in names if name in sockets}
    return found


def is_loopback(address: str) -> bool:
    """Whether an address of /proc/net/tcp or tcp6 is of 127.0.0.0/8, or ::1."""
    words = [address[at : at + 8] for at in range(0, len(address), 8)]
    if len(words) == 4 and words[:2] == ["00000000"] * 2 and words[2] == "00000000":
        return words[3] == "01000000"
    mapped = len(words) == 1 or (words[:2] == ["00000000"] * 2 and words[2] == "FFFF0000")
    return mapped and words[-1].endswith("7F")


def until(ask: Callable[[], T], process: subprocess.Popen[str]) -> T:
    """What `ask` says, once that is true; fails when the process ends first."""
    deadline = time.monotonic() + TOO_LONG
    while time.monotonic() < deadline:
        answer = ask()
        if answer:
            return answer
        assert process.poll() is None, f"it ended with {process.returncode}"
        time.sleep(0.02)
    raise AssertionError("nothing has happened for too long")


def until_gone(processes: Sequence[int]) -> list[int]:
    """Those that have not ended after all, zombies aside."""
    deadline = time.monotonic() + TOO_LONG
    left = [*processes]
    while left and time.monotonic() < deadline:
        left = [each for each in left if _runs(each)]
        time.sleep(0.02)
    return left


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@contextmanager
def started(arguments: Sequence[str | Path], log: Path) -> Iterator[subprocess.Popen[str]]:
    """Python with these arguments, its stderr in `log`; killed at the end, with its children."""
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            text=True,
        )
        try:
            yield process
        finally:
            family = [process.pid, *children(process.pid)]
            for each in family:
                try:
                    os.kill(each, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait()
