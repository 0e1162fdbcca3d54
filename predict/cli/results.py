"""Where a run's results go: every one is kept once it is finished, whatever happens after it.

A file gets them through a journal beside it and is replaced as a whole at the end; a device or a
pipe gets them as they come, in input order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from predict.cli.journal import LineFile, Say, open_journal
from predict.errors import UserError
from predict.system.outputs import is_special, open_special, write_whole


def result_bytes(result: Mapping[str, Any]) -> bytes:
    """The result as one line of JSON, without the line break."""
    # A lone surrogate has no UTF-8 form; JSON has one for it.
    return json.dumps(result, ensure_ascii=False).encode("utf-8", "backslashreplace")


class _Results:
    """What is finished of a run's `count` results, and how to go on where it is not all.

    `done` are the indices of prompts that an interrupted run finished.
    """

    def __init__(self, path: Path, count: int) -> None:
        self.path = path
        self.done: frozenset[int] = frozenset()
        self.num_results = 0  # those of an interrupted run included
        self._count = count

    @property
    def is_complete(self) -> bool:
        return self.num_results == self._count

    @property
    def summary(self) -> str:
        """Of a run that finished."""
        return f"{self._count} of {self._count} results are in {self.path}"


class JournaledResults(_Results):
    """Results of a file: on disk as they finish, in `path` all at once at the end."""

    def __init__(
        self, path: Path, count: int, inputs: Mapping[str, Any], resume: bool, say: Say
    ) -> None:
        """Opens the journal; raises UserError where that cannot be made or gone on with."""
        super().__init__(path, count)
        self._say = say
        self._command = "the same command" if resume else "the same command with --resume"
        self._journal = open_journal(path, count, inputs, resume, say)
        self.done = frozenset(self._journal.places)
        self.num_results = len(self.done)

    def put(self, index: int, data: bytes) -> None:
        """Keeps the result of a prompt, as its line of JSON without the line break."""
        self._journal.put(index, data)
        self.num_results += 1

    def finish(self) -> bool:
        """Makes the output of all results and removes the journal; False where it cannot."""
        reason = "results are missing in its journal"
        try:
            if self._journal.flush():
                write_whole(self.path, self._journal.lines())
                self._journal.remove()
                return True
        except OSError as error:
            reason = error.strerror or str(error)
        self.close()
        self._say(f"error: --output_file {self.path} cannot be written: {reason}. {self.kept}")
        return False

    def close(self) -> None:
        """Puts what is kept on the disk. To be called unless the results are finished."""
        if self.num_results:
            self._journal.end()
        else:
            self._journal.remove()

    @property
    def kept(self) -> str:
        """How many results are kept, where, and how to go on."""
        num_kept = self.num_results - len(self._journal.waiting)
        if not num_kept:
            return "no prompt was finished"
        where = self._journal.path
        return f"{num_kept} of {self._count} results are kept in {where}; {self._command} goes on"


class StreamedResults(_Results):
    """Results of a device or a pipe: each a line, written when all before it are done."""

    def __init__(self, path: Path, count: int, say: Say) -> None:
        """Opens it; raises UserError where that fails."""
        super().__init__(path, count)
        self._lines: dict[int, bytes] = {}  # finished, waiting for one before them
        self._next = 0
        try:
            self._file = LineFile(path, open_special(path), say)
        except OSError as error:
            raise UserError(
                f"--output_file {path} cannot be written: {error.strerror or error}"
            ) from None

    def put(self, index: int, data: bytes) -> None:
        """Takes the result of a prompt; writes it and its successors where they are due."""
        self._lines[index] = data + b"\n"
        self.num_results += 1
        while self._next in self._lines:
            self._file.append(self._lines.pop(self._next))
            self._next += 1

    def finish(self) -> bool:
        """Closes; False where the file did not take every line."""
        self.close()
        return not self._file.waiting

    def close(self) -> None:
        """Writes what still waits for an unfinished prompt (after an interruption), and closes."""
        for index in sorted(self._lines):
            self._file.append(self._lines.pop(index))
        self._file.close()

    @property
    def kept(self) -> str:
        """How many results are written, and where."""
        num_kept = self.num_results - len(self._file.waiting)
        return f"{num_kept} of {self._count} results are in {self.path}"


Results = JournaledResults | StreamedResults


def open_results(
    path: str | Path, count: int, inputs: Callable[[], Mapping[str, Any]], resume: bool, say: Say
) -> Results:
    """Where `count` results go. inputs: what they depend on, asked for where there is a journal.

    Raises UserError where it cannot be written, or where a journal cannot be gone on with.
    """
    path = Path(path)
    if not is_special(path):
        return JournaledResults(path, count, inputs(), resume, say)
    if resume:
        raise UserError(
            f"--resume goes on from the journal beside a file, and --output_file {path} is none; "
            "leave --resume out"
        )
    return StreamedResults(path, count, say)
