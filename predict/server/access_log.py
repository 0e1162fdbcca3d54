"""A line of JSON for each request, written by a thread: a full pipe blocks no request."""

from __future__ import annotations

import queue
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from predict.errors import quoted

MAX_WAITING = 8192  # lines; those beyond are dropped, and counted
MAX_TEXT = 1000  # characters of a prompt or an answer, with --log_requests
MAX_PATH = 200  # characters of a path
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class AccessLog:
    """Writes records as lines of JSON; `close` waits for the last of them."""

    def __init__(self, write: Callable[[str], Any] | None = None) -> None:
        """write: takes a line; None: stderr."""
        self._write = write or _to_stderr
        self._lines: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING)
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="regatta-access-log", daemon=True)
        self._thread.start()

    def add(self, record: Mapping[str, Any]) -> None:
        """Queues a record, the time in front; returns at once."""
        line = msgspec.json.encode({"time": round(time.time(), 3), **record})
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._num_dropped += 1

    def close(self, timeout: float = 2.0) -> None:
        """Waits until all lines are written, at most `timeout` seconds."""
        try:
            self._lines.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            dropped, self._num_dropped = self._num_dropped, 0
            if dropped:
                self._write(f'{{"dropped_lines":{dropped}}}\n')
            self._write(line.decode() + "\n")


def _to_stderr(line: str) -> None:
    try:
        sys.stderr.write(line)
        sys.stderr.flush()
    except (OSError, ValueError):  # stderr is closed
        pass


def request_id(sent: bytes | None) -> str:
    """The client's X-Request-Id where it is safe in headers and the log; else a fresh id."""
    if sent is not None and _REQUEST_ID.fullmatch(sent):
        return sent.decode("ascii")
    return f"req-{secrets.token_hex(12)}"


def shortened(value: object) -> str:
    """A prompt or an answer, cut for the log."""
    return value[:MAX_TEXT] if isinstance(value, str) else quoted(value, MAX_TEXT)
