"""The two processes that are timed: started, asked one at a time, ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from predict.errors import UserError
from predict.system.files import parse_json

ROOT = Path(__file__).resolve().parents[3]
LAST_LINES = 8  # of what a process that failed has said


class Program(NamedTuple):
    """What a side runs. name: for messages. words: behind the interpreter. env: beside ours."""

    name: str
    words: Sequence[str]
    folder: Path = ROOT
    env: Mapping[str, str] = {}


class Side:
    """A process that answers a JSON object a line with one, and waits in between."""

    def __init__(self, program: Program, num_threads: int) -> None:
        """Starts it. Raises UserError when it cannot start."""
        self.name = program.name
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `end`
        try:
            # In a session of its own: Ctrl-C is the parent's alone.
            self._process = subprocess.Popen(
                [sys.executable, *program.words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                encoding="utf-8",
                cwd=program.folder,
                env={**os.environ, "OMP_NUM_THREADS": str(num_threads), **program.env},
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"{self.name} cannot be started: {error.strerror}", 1) from None

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer. Raises UserError when the process ends instead of giving one."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(question) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise UserError(f"{self.name} ended: {self._last_words()}", 1)
        answer = parse_json(line, f"an answer of {self.name}")
        if not isinstance(answer, dict):
            raise UserError(f"{self.name} answers with {line.strip()!r}, which is no object", 1)
        return answer

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._said.close()

    def _last_words(self) -> str:
        code = self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode("utf-8", "replace").strip().splitlines()
        return "\n".join(lines[-LAST_LINES:]) or f"exit status {code}, and no message"


@contextmanager
def started(*programs: Program, num_threads: int) -> Iterator[list[Side]]:
    """A side of each until the end of the block."""
    found: list[Side] = []
    try:
        for program in programs:
            found.append(Side(program, num_threads))
        yield found
    finally:
        for side in found:
            side.end()


def serve(answer: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """The other end: answers every line of stdin on stdout, until stdin ends.

    What libraries print goes to stderr.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        for line in sys.stdin:
            question = parse_json(line, "a question")
            _reply(out, answer(question))


def _reply(out: TextIO, values: Mapping[str, Any]) -> None:
    out.write(json.dumps(values) + "\n")
    out.flush()
