"""Formulas of LaTeX as trees of MathML, made in a process with limits."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from predict.errors import UserError, quoted
from predict.system.guarded import LENGTH, EndedError, GuardedProcess, folders_of

MAX_LATEX = 2000  # characters of a formula
CPU_SECONDS = 0.5  # of one; a real one takes a few milliseconds
WALL_SECONDS = 10.0  # the start of the process included
MEMORY_BYTES = 256 << 20
MAX_REPLY = 1 << 20  # bytes of a tree
MAX_MESSAGE = 200  # characters of what is wrong


class Formulas(GuardedProcess):
    """Makes trees of formulas: a list of a name, attributes, and then texts and trees."""

    script = Path(__file__).with_name("formula_worker.py")
    purpose = "formulas are read; raise the limits on processes and memory"

    @staticmethod
    def is_there() -> bool:
        """Whether the package that reads LaTeX is installed."""
        return find_spec("latex2mathml") is not None

    def settings(self) -> dict[str, Any]:
        """See GuardedProcess."""
        return {
            "paths": folders_of(("latex2mathml",), "formulas need; "),
            "memory_bytes": MEMORY_BYTES,
            "cpu_seconds": CPU_SECONDS,
            "max_message": MAX_MESSAGE,
        }

    def made(self, latex: str, display: bool) -> list[Any]:
        """The tree of a formula; display: on a line of its own. Raises UserError."""
        if len(latex) > MAX_LATEX:
            raise UserError(f"latex has {len(latex)} characters (allowed: {MAX_LATEX}); shorten it")
        body = json.dumps({"latex": latex, "display": display}).encode("ascii")
        with self._lock:
            try:
                frame = LENGTH.pack(len(body)) + body
                reply = json.loads(self._exchange(frame, MAX_REPLY, WALL_SECONDS))
            except (TimeoutError, EndedError):
                self.stop()
                reply = {"error": "it takes too much time or memory"}
            except BaseException:  # it may still send a reply, which no later request may read
                self.stop()
                raise
        if "tree" not in reply:
            raise UserError(f"latex {quoted(latex)} is no formula: {reply['error']}")
        found: list[Any] = reply["tree"]
        return found
