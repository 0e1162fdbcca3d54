"""Processes that work on what strangers wrote, with limits on time, memory and output."""

from __future__ import annotations

import json
import os
import select
import signal
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
from predict.text.template_worker import LENGTH

WORKER = Path(__file__).with_name("template_worker.py")
PACKAGES = ("jinja2", "markupsafe")
# The other variables may hold secrets.
ENVIRONMENT = ("TZ", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "SYSTEMROOT")
CPU_SECONDS = 2.0  # of one conversation; a real template takes a few milliseconds
WALL_SECONDS = 20.0  # the start of the process included: a busy machine may take seconds
MEMORY_BYTES = 512 << 20
MAX_SOURCE = 1 << 20  # characters of a template
MAX_INPUT_BYTES = 32 << 20  # of a conversation, as JSON
MAX_OUTPUT = 4 << 20  # characters beyond those of the conversation; a million tokens have as many
MAX_MESSAGE = 2000  # characters of a template's own error
LIMITS = {
    "memory": f"it takes more than {MEMORY_BYTES >> 20} MiB of memory",
    "output": f"it prints more than {MAX_OUTPUT} characters beyond the conversation's",
    "time": f"it takes more than {CPU_SECONDS:g} s of CPU time",
    "wall": f"it takes more than {WALL_SECONDS:g} s",
}


class RenderError(Exception):
    """A template that was not rendered.

    kind: "syntax" (line: where), "refused" (it raised), "failed" (Python raised) or "limit".
    part: which of the request's parts it was.
    """

    def __init__(self, kind: str, message: str, part: int = 0, line: int = 0) -> None:
        super().__init__(message)
        self.kind = kind
        self.part = part
        self.line = line


class GuardedProcess:
    """A worker's process, started at the first use, and again after a limit.

    Thread-safe; a forked child starts its own. The process ends with this object, and with this
    process, which closes its stdin.
    """

    def __init__(
        self,
        worker: Path = WORKER,
        packages: Sequence[str] = PACKAGES,
        what: str = "chat templates",
        cpu_seconds: float = CPU_SECONDS,
    ) -> None:
        """worker: a script; what: it works on, for messages. cpu_seconds: of one request."""
        self._worker, self._packages, self._what = worker, packages, what
        self._cpu_seconds = cpu_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        forget = weakref.WeakMethod(self._forget)

        def after_fork() -> None:
            method = forget()
            if method is not None:
                method()

        os.register_at_fork(after_in_child=after_fork)

    def exchange(self, body: bytes) -> dict[str, Any]:
        """The reply to one request; the process ends where there is none, or at a limit.

        Raises UserError where no process can be started.
        """
        with self._lock:
            return self._exchange(body)

    def _exchange(self, body: bytes) -> dict[str, Any]:
        deadline = time.monotonic() + WALL_SECONDS
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        reply: dict[str, Any] = {"error": "wall"}
        try:
            # The output may hold the conversation as often as twice.
            most = MAX_OUTPUT + 2 * len(body)
            frame = LENGTH.pack(most) + LENGTH.pack(len(body)) + body
            _write(process.stdin.fileno(), frame, deadline)
            out = process.stdout.fileno()
            (size,) = LENGTH.unpack(_read(out, LENGTH.size, deadline))
            if size > 12 * most + (1 << 16):
                raise EOFError  # no character takes more: it is not our worker that speaks
            reply = json.loads(_read(out, size, deadline))
        except TimeoutError:
            pass
        except (EOFError, BrokenPipeError, ConnectionResetError):
            reply = _ended(process)
        finally:
            # Interrupted, it may still send a reply, which no later request may read.
            if reply.get("error") in LIMITS or "died" in reply:
                self._stop()
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        self._stop()
        settings = {
            "paths": _package_paths(self._packages),
            "memory_bytes": MEMORY_BYTES,
            "cpu_seconds": self._cpu_seconds,
            "max_message": MAX_MESSAGE,
        }
        # No site packages, no environment, no files of the current folder; and in a session of its
        # own, so that Ctrl-C is the parent's alone.
        command = [sys.executable, "-I", "-S", "-B", str(self._worker), json.dumps(settings)]
        try:
            process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(
                f"{self._what} are made in a process of their own, and none can be started "
                f"({sys.executable or 'no Python is known'}: {error.strerror}); raise the limits "
                "on processes and memory, or turn templates off with --chat_template none"
            ) from None
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        self._process = process
        self._end = weakref.finalize(self, _kill, process)
        return process

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None

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


class TemplateProcess(GuardedProcess):
    """Renders chat templates."""

    def render(
        self, parts: Sequence[tuple[str, Mapping[str, Any]]], keep_trailing_newline: bool = False
    ) -> str:
        """The text of all parts, each a template's source and its values, one after another.

        Raises RenderError, and UserError where no process can be started.
        """
        request = {
            "parts": [{"source": source, "values": dict(values)} for source, values in parts],
            "keep_trailing_newline": keep_trailing_newline,
        }
        try:
            body = json.dumps(request).encode("ascii")
        except (TypeError, ValueError, RecursionError) as error:
            raise RenderError("failed", f"{type(error).__name__}: {error}") from None
        if len(body) > MAX_INPUT_BYTES:
            raise RenderError(
                "limit", f"the conversation has {len(body)} bytes (allowed: {MAX_INPUT_BYTES})"
            )
        reply = self.exchange(body)
        if "text" in reply:
            return str(reply["text"])
        kind = reply["error"]
        message = LIMITS.get(kind) or reply["message"]
        kind = "limit" if kind in LIMITS else kind
        raise RenderError(kind, message, reply.get("part", 0), reply.get("line", 0))


def _package_paths(packages: Sequence[str]) -> list[str]:
    """The folders of packages, which a worker's process imports."""
    paths = []
    for name in packages:
        found = find_spec(name)
        if found is None or found.origin is None:
            raise UserError(
                f"chat templates need {name}, which is not installed: pip install {name}, or turn "
                "templates off with --chat_template none"
            )
        paths.append(str(Path(found.origin).parent.parent))
    return list(dict.fromkeys(paths))


def _ended(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The reply of a process that ended instead of giving one."""
    try:
        code = process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return {"error": "wall"}
    if code == -signal.SIGPROF:
        return {"error": "time"}
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    return {"error": "failed", "message": f"the process that renders it ended {how}", "died": True}


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
