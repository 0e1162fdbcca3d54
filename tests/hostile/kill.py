"""Runs a command in a process of its own and sends it a signal at a moment of its life."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.signals import NUMBERS, as_from_a_terminal

SIGNALS = (*NUMBERS, signal.SIGKILL)
TOO_LONG = 300.0  # seconds: something hangs


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int  # -n where signal n itself ended it
    said: str  # on stderr
    seconds: float

    def was_ended_by(self, number: int) -> bool:
        """Whether the signal ended it, in good order or, in its first moments, by itself."""
        return self.code in (-number, 128 + number)


def run_command(
    module: str,
    argv: Sequence[str | Path],
    at: float | None = None,
    number: int = signal.SIGTERM,
) -> Ended:
    """Runs `python -m module argv` from the repository's root, to its end.

    at: when signal `number` is sent, in seconds after the start; None sends none.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", module, *map(str, argv)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=as_from_a_terminal,
    )
    if at is not None:
        try:
            process.wait(max(at - (time.perf_counter() - started), 0))
        except subprocess.TimeoutExpired:
            process.send_signal(number)
    try:
        _, said = process.communicate(timeout=TOO_LONG)
    finally:
        process.kill()
    return Ended(process.returncode, said, time.perf_counter() - started)


def moments(seconds: float, count: int, seed: int) -> list[float]:
    """`count` moments of a run that takes `seconds`: a random one in each of as many equal parts.

    The last part reaches a little beyond the end.
    """
    generator = random.Random(seed)
    part = 1.05 * seconds / count
    return [part * (index + generator.random()) for index in range(count)]


def locks(folder: Path) -> list[Path]:
    """Lock files in a folder that some process still holds."""
    import fcntl

    held = []
    for path in folder.rglob(".*.lock"):
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(path)
    return held


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a folder, by its name there; hidden files are left out."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }
