"""A Python process of one script that works on what strangers made, with limits.

It has no secrets in its environment, and ends with the object that started it, or with the process
of that, which closes its stdin. guarded_worker.py is its program, and says what goes between.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from predict.errors import UserError

WORKER = Path(__file__).with_name("guarded_worker.py")
LENGTHS = struct.Struct("<II")
# The other variables may hold secrets.
ENVIRONMENT = ("TZ", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "SYSTEMROOT")


class EndedError(Exception):
    """The process ended instead of giving a reply. code: of its exit, below 0 of a signal."""

    def __init__(self, code: int) -> None:
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        super().__init__(f"the process ended {how}")
        self.code, self.how = code, how

    @property
    def is_out_of_time(self) -> bool:
        """Whether its CPU time was over: SIGPROF of a timer that it has set."""
        return self.code == -signal.SIGPROF


class GuardedProcess:
    """Runs `script`, started at the first use, and again after it has ended.

    Thread-safe under its lock; a forked child starts its own.
    """

    script: Path  # see guarded_worker.py
    purpose = ""  # what it is for, and what to do where none can be started
    environment: Mapping[str, str] = {}  # beside ENVIRONMENT

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        forget = weakref.WeakMethod(self._forget)

        def after_fork() -> None:
            method = forget()
            if method is not None:
                method()

        os.register_at_fork(after_in_child=after_fork)

    def settings(self) -> dict[str, Any]:
        """What guarded_worker.py and the script are given, as JSON."""
        raise NotImplementedError

    def stop(self) -> None:
        """Ends the process; the next use starts another."""
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _exchange(
        self, request: bytes, data: bytes, most: int, seconds: float
    ) -> tuple[dict[str, Any], bytes]:
        """The reply to a request, which is JSON, and the bytes behind it; the lock is held.

        most: bytes of a reply. Raises TimeoutError and EndedError, behind which the process must be
        stopped, and UserError where none can be started.
        """
        deadline = time.monotonic() + seconds
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            head = LENGTHS.pack(len(request), len(data))
            _write(process.stdin.fileno(), b"".join((head, request, data)), deadline)
            out = process.stdout.fileno()
            num_words, size = LENGTHS.unpack(_read(out, LENGTHS.size, deadline))
            if num_words + size > most:
                raise EOFError  # it is not our worker that speaks
            words = _read(out, num_words, deadline)
            return json.loads(words), _read(out, size, deadline)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise EndedError(_code_of(process)) from None

    def _start(self) -> subprocess.Popen[bytes]:
        self.stop()
        # No site packages, no environment, no files of the current folder; and in a session of its
        # own, so that Ctrl-C is the parent's alone.
        settings = json.dumps({"script": str(self.script), **self.settings()})
        command = [sys.executable, "-I", "-S", "-B", str(WORKER), settings]
        kept = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        try:
            process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**kept, **self.environment},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            what, advice = self.purpose.split("; ")
            raise UserError(
                f"{what} in a process of their own, and none can be started "
                f"({sys.executable or 'no Python is known'}: {error.strerror}); {advice}"
            ) from None
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        self._process = process
        self._end = weakref.finalize(self, _kill, process)
        return process

    def _forget(self) -> None:
        """In a forked child: drops the parent's process and the lock, which may be held."""
        process, self._process = self._process, None
        self._lock = threading.Lock()
        if self._end is not None:
            self._end.detach()
            self._end = None
        if process is not None:
            _close(process)
            process.returncode = 0  # not ours to wait for


def folders_of(packages: Sequence[str], need: str) -> list[str]:
    """The folders that packages lie in. need: begins and ends the error where one is missing."""
    begin, end = need.split("; ")
    paths = []
    for name in packages:
        found = find_spec(name)
        if found is None or found.origin is None:
            raise UserError(
                f"{begin} {name}, which is not installed: pip install {name}{end and f', {end}'}"
            )
        paths.append(str(Path(found.origin).parent.parent))
    return list(dict.fromkeys(paths))


def _code_of(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        raise TimeoutError from None


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    _close(process)


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _wait(fd: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
        raise TimeoutError


def _write(fd: int, data: bytes, deadline: float) -> None:
    """All of `data`; TimeoutError at the deadline, BrokenPipeError when nobody reads."""
    view = memoryview(data)
    while view:
        _wait(fd, select.POLLOUT, deadline)
        view = view[os.write(fd, view) :]


def _read(fd: int, count: int, deadline: float) -> bytes:
    """`count` bytes; TimeoutError at the deadline, EOFError when the writer ended."""
    parts = []
    while count:
        _wait(fd, select.POLLIN, deadline)
        part = os.read(fd, min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
