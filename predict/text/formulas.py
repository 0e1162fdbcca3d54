"""Formulas of LaTeX as trees of MathML, made in a process with limits."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from predict.errors import UserError, quoted
from predict.text.template_process import MAX_OUTPUT, TextProcess

MAX_LATEX = 2000  # characters of a formula
CPU_SECONDS = 0.5  # of one; a real one takes a few milliseconds


class FormulaProcess(TextProcess):
    """Makes trees of formulas."""

    script, packages = Path(__file__).with_name("formula_worker.py"), ("latex2mathml",)
    need = "formulas need; "
    purpose = "formulas are made; raise the limits on processes and memory"

    def cpu_seconds(self) -> float:
        return CPU_SECONDS


class Formulas:
    """Makes trees [name, attributes, text or trees...] of formulas. Thread-safe."""

    def __init__(self) -> None:
        self._process = FormulaProcess()

    @staticmethod
    def is_there() -> bool:
        """Whether the package that reads LaTeX is installed."""
        return find_spec("latex2mathml") is not None

    def made(self, latex: str, display: bool) -> list[Any]:
        """The tree of a formula; display: on a line of its own. Raises UserError."""
        if len(latex) > MAX_LATEX:
            raise UserError(f"latex has {len(latex)} characters (allowed: {MAX_LATEX}); shorten it")
        body = json.dumps({"latex": latex, "display": display}).encode("ascii")
        reply = self._process.exchange(body, MAX_OUTPUT)
        if "tree" not in reply:
            why = reply.get("message") or "it takes too much time or memory"
            raise UserError(f"latex {quoted(latex)} is no formula: {why}")
        found: list[Any] = reply["tree"]
        return found
