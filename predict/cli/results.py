"""Where a run's results go: every one is kept once it is finished, whatever happens after it.

A file gets them through a journal beside it and is replaced as a whole at the end; a device or a
pipe gets them as they come, in input order.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

from predict.cli import journal
from predict.cli.journal import LineFile, Place
from predict.errors import UserError
from predict.system import console
from predict.system.outputs import is_special, open_special, write_whole

Say = Callable[[str], None]


def result_bytes(result: Mapping[str, Any]) -> bytes:
    """The result as one line of JSON, without the line break."""
    # A lone surrogate has no UTF-8 form; JSON has one for it.
    return json.dumps(result, ensure_ascii=False).encode("utf-8", "backslashreplace")


class Rescue:
    """Takes lines that a file does not: in the temporary directory, or prints them."""

    def __init__(self) -> None:
        self.path: str | None = None
        self.file: LineFile | None = None
        self.is_printing = False
        with contextlib.suppress(OSError):
            descriptor, self.path = tempfile.mkstemp(prefix="regatta-rescue-", suffix=".jsonl")
            self.file = LineFile(descriptor)
        self.is_printing = self.file is None

    @property
    def where(self) -> str:
        """Where the next line goes, in words."""
        return "on standard output" if self.is_printing else f"in {self.path}"

    def append(self, line: bytes, say: Say) -> int | None:
        """Where in the file the line begins; None where it was printed."""
        if self.file is not None and not self.is_printing:
            try:
                return self.file.append(line)
            except OSError:
                self.is_printing = True
                say("error: the rescue file is full too; the results that follow are printed here")
        # In ASCII, so that no control sequence of an answer reaches a terminal.
        if not console.show(json.dumps(json.loads(line))):
            say("error: standard output takes nothing, too: this result and all after it are lost")
        return None

    def close(self) -> None:
        """Puts the lines on the disk."""
        if self.file is not None and self.file.is_open:
            with contextlib.suppress(OSError):
                self.file.sync()
            self.file.close()

    def remove(self) -> None:
        """Deletes the file: its lines are where they belong."""
        if self.file is not None and self.path is not None:
            self.file.close()
            os.unlink(self.path)


class JournaledResults:
    """Results of a file: on disk as they finish, in `path` all at once at the end.

    `done` are the indices of prompts that an interrupted run finished. `failure` says why results
    are not where they belong.
    """

    def __init__(
        self, path: Path, count: int, inputs: Mapping[str, Any], resume: bool, say: Say
    ) -> None:
        """Opens the journal; raises UserError where that cannot be made or gone on with."""
        self.path = path
        self.failure: str | None = None
        self._count = count
        self._say = say
        self._rescue: Rescue | None = None
        self._is_lost = False  # a result is neither in the journal nor in the rescue file
        self._resumed = resume
        found = journal.resume(path, count, inputs) if resume else None
        if found is None:
            if resume:
                say(f"note: --resume: {self._nothing_there()}; all {count} prompts run")
            found, note = journal.create(path, count, inputs)
            if note:
                say(f"note: {note}")
        else:
            failed = f" ({found.num_failed} of them failed before)" if found.num_failed else ""
            say(
                f"note: {len(found.places)} of {count} results are kept in {found.path}; "
                f"{count - len(found.places)} prompts run{failed}"
            )
        self._journal = found
        self.done: Container[int] = frozenset(found.places)

    @property
    def num_results(self) -> int:
        """How many there are, those of an interrupted run included."""
        return len(self._journal.places)

    @property
    def is_complete(self) -> bool:
        """Whether every prompt has a result."""
        return self.num_results == self._count

    def put(self, index: int, result: Mapping[str, Any]) -> None:
        """Keeps the result of a prompt."""
        self.put_line(index, result_bytes(result))

    def put_line(self, index: int, data: bytes) -> None:
        """Keeps the result of a prompt, as its line of JSON without the line break."""
        if self._rescue is None:
            try:
                self._journal.append(index, data)
                return
            except OSError as error:
                self._rescue = Rescue()
                self._say(
                    f"error: {self._journal.path} cannot be written: {error.strerror or error}; "
                    f"the {self.num_results} results before it are in there, this one and all "
                    f"after it are {self._rescue.where}"
                )
        line, start = journal.entry(index, data)
        at = self._rescue.append(line, self._say)
        if at is None or self._rescue.file is None:
            self._is_lost = True
        else:
            self._journal.places[index] = Place(self._rescue.file, at + start, len(data))

    def finish(self) -> bool:
        """Makes the output of all results and removes the journal; False where it cannot."""
        if not self._is_lost:
            try:
                write_whole(self.path, self._journal.lines())
            except OSError as error:
                self.failure = f"--output_file {self.path} cannot be written: {error.strerror}"
            else:
                self._journal.remove()
                if self._rescue is not None:
                    self._rescue.remove()
                return True
        else:
            self.failure = f"--output_file {self.path} is not written: results were printed here"
        self.close()
        self._say(f"error: {self.failure}. {self.kept}")
        return False

    def close(self) -> None:
        """Puts what is kept on the disk. To be called unless the results are finished."""
        try:
            self._journal.close()
        except OSError as error:
            self._say(
                f"error: {self._journal.path} may not be whole on the disk: "
                f"{error.strerror or error}"
            )
        if self._rescue is not None:
            self._rescue.close()

    @property
    def kept(self) -> str:
        """How many results are kept, where, and how to go on."""
        if not self.num_results:
            return "no prompt was finished"
        command = "the same command" if self._resumed else "the same command with --resume"
        text = f"{self.num_results} of {self._count} results are kept in {self._journal.path}"
        if self._rescue is None:
            return f"{text}; {command} goes on"
        rest = f", the last of them {self._rescue.where}" if self._rescue.path else ""
        return (
            f"{text}{rest}. Make room, append those lines to the first file, and {command} goes on"
        )

    @property
    def summary(self) -> str:
        """Of a run that finished."""
        return f"{self._count} of {self._count} results are in {self.path}"

    def _nothing_there(self) -> str:
        path = journal.journal_path(self.path)
        if path.exists():
            return f"{path} holds no answers"
        was = " (a finished run leaves none)" if self.path.exists() else ""
        return f"there is no {path}{was}"


class StreamedResults:
    """Results of a device or a pipe: each a line, written when all before it are done.

    A line that cannot be written (the disk is full) goes to a rescue file with all later ones, or
    to standard output where that is full too; `failure` then says so.
    """

    def __init__(self, path: Path, count: int, say: Say) -> None:
        """Opens it; raises UserError where that fails."""
        self.path = path
        self.failure: str | None = None
        self.done: Container[int] = frozenset()
        self.num_results = 0
        self._count = count
        self._say = say
        self._lines: dict[int, bytes] = {}  # finished, waiting for one before them
        self._next = 0
        self._rescue: Rescue | None = None
        try:
            self._file = LineFile(open_special(path))
        except OSError as error:
            raise UserError(
                f"--output_file {path} cannot be written: {error.strerror or error}"
            ) from None

    @property
    def is_complete(self) -> bool:
        """Whether every prompt has a result."""
        return self.num_results == self._count

    def put(self, index: int, result: Mapping[str, Any]) -> None:
        """Takes the result of a prompt; writes it and its successors where they are due."""
        self.put_line(index, result_bytes(result))

    def put_line(self, index: int, data: bytes) -> None:
        """Takes the result of a prompt, as its line of JSON without the line break."""
        self._lines[index] = data + b"\n"
        while self._next in self._lines:
            self._write(self._lines.pop(self._next))
            self._next += 1

    def finish(self) -> bool:
        """Closes; False where lines went elsewhere."""
        self.close()
        return self.failure is None

    def close(self) -> None:
        """Writes what still waits for an unfinished prompt (after an interruption), and closes."""
        for index in sorted(self._lines):
            self._write(self._lines.pop(index))
        try:
            self._file.close()
        except OSError as error:
            self.failure = f"--output_file {self.path} cannot be written: {error.strerror or error}"
            self._say(f"error: {self.failure}")
        if self._rescue is not None:
            self._rescue.close()

    @property
    def kept(self) -> str:
        """How many results are written, and where."""
        where = f"in {self.path}" if self.failure is None else "kept as said above"
        return f"{self.num_results} of {self._count} results are {where}"

    @property
    def summary(self) -> str:
        """Of a run that finished."""
        return self.kept

    def _write(self, line: bytes) -> None:
        if self._rescue is None:
            try:
                self._file.append(line)
            except OSError as error:
                self._rescue = Rescue()
                self.failure = (
                    f"--output_file {self.path} cannot be written: {error.strerror or error}; the "
                    f"{self.num_results} results before it are there, this one and all after it "
                    f"are {self._rescue.where}"
                )
                self._say(f"error: {self.failure}")
        if self._rescue is not None:
            self._rescue.append(line, self._say)
        self.num_results += 1


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
