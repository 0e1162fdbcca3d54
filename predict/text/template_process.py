"""The process that renders chat templates, with limits on its time, memory and output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from predict.system.guarded import EndedError, GuardedProcess, folders_of

WORKER = Path(__file__).with_name("template_worker.py")
PACKAGES = ("jinja2", "markupsafe")
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


class TextProcess(GuardedProcess):
    """Works on texts in a process that is started at the first use, and again after a limit."""

    packages: Sequence[str]  # that the script imports
    need: str  # see folders_of

    def cpu_seconds(self) -> float:
        """What one request may take."""
        return CPU_SECONDS

    def settings(self) -> dict[str, Any]:
        return {
            "paths": folders_of(self.packages, self.need),
            "memory_bytes": MEMORY_BYTES,
            "cpu_seconds": self.cpu_seconds(),
            "max_message": MAX_MESSAGE,
        }

    def exchange(self, body: bytes, most: int) -> dict[str, Any]:
        """The reply to one request; the process ends where there is none, or at a limit.

        most: characters of it. Raises UserError where no process can be started.
        """
        with self._lock:
            return self._reply(body, 12 * most + (1 << 16))  # no character takes more than 12

    def _reply(self, body: bytes, most: int) -> dict[str, Any]:
        reply: dict[str, Any] = {"error": "wall"}
        try:
            reply, _ = self._exchange(body, b"", most, WALL_SECONDS)
        except TimeoutError:
            pass
        except EndedError as error:
            said = f"the process that renders it ended {error.how}"
            reply = {"error": "failed", "message": said, "died": True}
            if error.is_out_of_time:
                reply = {"error": "time"}
        finally:
            # Interrupted, it may still send a reply, which no later request may read.
            if reply.get("error") in LIMITS or "died" in reply:
                self.stop()
        return reply


class TemplateProcess(TextProcess):
    """Renders chat templates."""

    script, packages = WORKER, PACKAGES
    need = "chat templates need; or turn templates off with --chat_template none"
    purpose = (
        "chat templates are rendered; raise the limits on processes and memory, or turn templates "
        "off with --chat_template none"
    )

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
        most = MAX_OUTPUT + 2 * len(body)  # it may hold the conversation as often as twice
        reply = self.exchange(b'%s, "most": %d}' % (body[:-1], most), most)
        if "text" in reply:
            return str(reply["text"])
        kind = reply["error"]
        message = LIMITS.get(kind) or reply["message"]
        kind = "limit" if kind in LIMITS else kind
        raise RenderError(kind, message, reply.get("part", 0), reply.get("line", 0))
