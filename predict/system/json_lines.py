"""Lines for people as lines of JSON, for what collects logs."""

from __future__ import annotations

import json
import threading
import time
from typing import Any, TextIO

LEVELS = ("error", "warning", "note")  # that a line may begin with


class JsonLines:
    """A stream whose lines are written as {"time", "level", "process", "message"}.

    Lines that are JSON objects already, as those of requests, go through as they are.
    """

    encoding = "utf-8"

    def __init__(self, stream: TextIO, process: str) -> None:
        """process: which of the server's says it."""
        self.inner, self._process = stream, process
        self._rest = threading.local()  # of each thread: what has no end of line yet

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write(self, text: str) -> int:
        """Writes the lines that are whole; the rest waits for its end."""
        *lines, self._rest.text = (getattr(self._rest, "text", "") + text).split("\n")
        if lines:
            self.inner.write("".join(self._made(line) for line in lines if line.strip()))
        return len(text)

    def flush(self) -> None:
        """Flushes the stream."""
        self.inner.flush()

    def _made(self, line: str) -> str:
        if line.startswith("{") and line.endswith("}"):
            return line + "\n"
        said = line.removeprefix("regatta: ")
        level = next((each for each in LEVELS if said.startswith(f"{each}: ")), "info")
        record = {
            "time": round(time.time(), 3),
            "level": {"note": "info"}.get(level, level),
            "process": self._process,
            "message": said.removeprefix(f"{level}: "),
        }
        return json.dumps(record, ensure_ascii=False) + "\n"
