"""A command that `python -m paddle.distributed.launch` started several times: one of them runs.

The launcher's first process starts the ranks itself and answers; the others wait for its end.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from predict.errors import UserError
from predict.system.launcher import HOSTS, ID, NUM, num_launched
from predict.system.signals import Interrupted, Signals

DEGREE = "tensor_parallel_degree"
LAUNCHER_SECONDS = 5.0  # in which the launcher ends the others where the first one failed


def with_launched(
    given: Mapping[str, Any], environ: MutableMapping[str, str] = os.environ
) -> Mapping[str, Any]:
    """The flags given, and tensor_parallel_degree where the launcher says how many there are.

    Raises UserError where both say something else, or on several hosts; in all processes but the
    first SystemExit, once that one has ended. The first one then runs as if it had been started
    alone: it takes the launcher's number out of `environ`.
    """
    degree = num_launched(environ)
    if degree == 1:
        return given
    if environ.get(HOSTS, "1") not in ("", "1"):
        raise UserError(
            f"the launcher has {environ[HOSTS]} hosts, and one model runs on one host; start the "
            f"command there, without the launcher: --{DEGREE} N starts N processes"
        )
    if given.get(DEGREE, degree) != degree:
        raise UserError(
            f"--{DEGREE} is {given[DEGREE]}, and the launcher started {degree} processes; leave "
            f"the flag out, or start the command without the launcher: --{DEGREE} "
            f"{given[DEGREE]} starts its processes itself"
        )
    if int(environ[ID]):
        sys.exit(_waited())
    del environ[NUM]
    return {**given, DEGREE: degree}


def _waited() -> int:
    """Waits for the launcher's first process; 0. Where that one failed, the launcher ends us."""
    first = _sibling()
    with Signals() as signals, suppress(Interrupted):
        if first is not None:
            poll = select.poll()
            poll.register(first, select.POLLIN)
            while not poll.poll(100):
                signals.check()
        select.select([], [], [], LAUNCHER_SECONDS)
    return 0 if signals.number is None else 128 + signals.number


def _sibling() -> int | None:
    """A descriptor that becomes readable when the launcher's first process ends; None: it has."""
    wanted = f"{ID}=0".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with suppress(OSError):
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            is_sibling = int(stat[1]) == os.getppid()
            if is_sibling and wanted in (folder / "environ").read_bytes().split(b"\0"):
                return os.pidfd_open(int(folder.name))
    return None
