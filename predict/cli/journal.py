"""The journal of a run: each answer is on disk when it is finished, in whatever order they finish.

    OUTPUT.journal   {"regatta_journal": 1, "num_prompts": 3, "inputs": {...}}
                     {"index": 2, "result": {"src": ..., "tgt": ..., "output": ...}}
                     ...

The first line says what the answers depend on (predict.cli.identity), each further one is appended
whole when a prompt is finished; its result is the line that the output file will have. A process
that dies, at whatever moment, leaves whole lines and at most one that is cut short, at the end.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from predict.errors import UserError
from predict.system.files import MAX_JSON_DEPTH, parse_json
from predict.system.outputs import mode_of, sync_folder

SUFFIX = ".journal"
FORMAT = 1
SYNC_SECONDS = 1.0  # a power cut costs at most the answers of this long
MAX_LINE_BYTES = 1 << 30


class LineFile:
    """A file to which whole lines are appended, or nothing of them."""

    def __init__(self, descriptor: int, size: int = 0) -> None:
        """size: bytes of whole lines that are there."""
        self.descriptor = descriptor
        self._regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._size = size

    def append(self, line: bytes) -> int:
        """Writes the line through to the kernel; returns where it begins.

        On OSError the file is cut back to whole lines.
        """
        done = 0
        try:
            while done < len(line):
                done += os.write(self.descriptor, line[done:])
        except OSError:
            if self._regular:
                os.ftruncate(self.descriptor, self._size)
                os.lseek(self.descriptor, self._size, os.SEEK_SET)
            raise
        at = self._size
        self._size += len(line)
        return at

    def read(self, at: int, length: int) -> bytes:
        """Bytes of a line. Raises OSError, also where they are gone."""
        found = os.pread(self.descriptor, length, at)
        while len(found) < length:
            more = os.pread(self.descriptor, length - len(found), at + len(found))
            if not more:
                raise OSError("the file was cut short by somebody else")
            found += more
        return found

    def sync(self) -> None:
        """Puts the lines on the disk."""
        if self._regular:
            os.fdatasync(self.descriptor)

    @property
    def is_open(self) -> bool:
        """Whether it was not closed."""
        return self.descriptor >= 0

    def close(self) -> None:
        """Closes the descriptor; a delayed write error (network file systems) is an OSError."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@dataclass(frozen=True)
class Place:
    """Where a result's JSON lies."""

    file: LineFile
    at: int  # bytes
    length: int


@dataclass
class Journal:
    """An open journal; the process that has it holds the lock of the output, too.

    Lines reach the disk about once a second, on a thread: waiting for it would cost steps.
    """

    path: Path
    file: LineFile
    places: dict[int, Place] = field(default_factory=dict)  # by the prompt's index
    num_failed: int = 0  # answers that an earlier run had no success with
    _last_sync: float = 0.0  # time.monotonic seconds
    _syncing: threading.Thread | None = None
    _error: OSError | None = None  # of a sync; the kernel tells each one once

    def __post_init__(self) -> None:
        self._last_sync = time.monotonic()

    def append(self, index: int, result: bytes) -> None:
        """Records the result of a prompt, as JSON without a line break.

        Raises OSError, also for earlier lines that did not reach the disk.
        """
        self._raise_error()
        line, start = entry(index, result)
        at = self.file.append(line)
        self.places[index] = Place(self.file, at + start, len(result))
        now = time.monotonic()
        waits = self._syncing is not None and self._syncing.is_alive()
        if now - self._last_sync >= SYNC_SECONDS and not waits:
            self._last_sync = now
            self._syncing = threading.Thread(target=self._sync, daemon=True)
            self._syncing.start()

    def _sync(self) -> None:
        try:
            self.file.sync()
            sync_folder(self.path.parent)
        except OSError as error:
            self._error = error

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _end_sync(self) -> None:
        if self._syncing is not None:
            self._syncing.join()

    def lines(self) -> Iterator[bytes]:
        """The results in the prompts' order, each with its line break. Raises OSError."""
        for index in sorted(self.places):
            place = self.places[index]
            yield place.file.read(place.at, place.length) + b"\n"

    def close(self) -> None:
        """Puts the lines on the disk and closes the file; one without answers is removed."""
        if not self.file.is_open:
            return
        self._end_sync()
        try:
            if self.places or self.num_failed:
                self._sync()
                self._raise_error()
            else:
                self.path.unlink(missing_ok=True)
        finally:
            self.file.close()

    def remove(self) -> None:
        """Closes and deletes the file: its answers are in the output."""
        self._end_sync()
        self.file.close()
        self.path.unlink(missing_ok=True)


def entry(index: int, result: bytes) -> tuple[bytes, int]:
    """(the line of a result, where in it the result begins)."""
    start = b'{"index": %d, "result": ' % index
    return start + result + b"}\n", len(start)


def journal_path(output: str | Path) -> Path:
    """The journal of an output file, beside what the file's links lead to."""
    real = Path(os.path.realpath(output))
    return real.with_name(real.name + SUFFIX)


def create(output: Path, num_prompts: int, inputs: Mapping[str, Any]) -> tuple[Journal, str]:
    """A new journal, and a note on what became of an older one ("" where there is none to make).

    One with answers is kept under another name. Raises UserError where it cannot be made.
    """
    path = journal_path(output)
    note = _put_aside(path)
    header = {"regatta_journal": FORMAT, "num_prompts": num_prompts, "inputs": dict(inputs)}
    line = json.dumps(header, ensure_ascii=True).encode() + b"\n"
    try:
        descriptor = _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        file = LineFile(descriptor)
        try:
            os.fchmod(descriptor, mode_of(Path(os.path.realpath(output))))
            file.append(line)
        except OSError:
            file.close()
            path.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(
            f"--output_file {output}: its journal {path} cannot be written: "
            f"{error.strerror or error}",
            exit_code=1,
        ) from None
    return Journal(path, file), note


def resume(output: Path, num_prompts: int, inputs: Mapping[str, Any]) -> Journal | None:
    """The journal of an interrupted run, to go on with; None when there is none with answers.

    A line that was cut short is cut off. Raises UserError when the journal is damaged, or of a run
    with other inputs.
    """
    path = journal_path(output)
    try:
        descriptor = _open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be opened: {error.strerror or error}") from None
    try:
        places, num_failed, size = _read(path, descriptor, num_prompts, inputs)
        if not places and not num_failed:
            os.close(descriptor)
            return None
        os.ftruncate(descriptor, size)
        os.lseek(descriptor, size, os.SEEK_SET)
    except BaseException:
        os.close(descriptor)
        raise
    file = LineFile(descriptor, size)
    found = {index: Place(file, at, length) for index, (at, length) in places.items()}
    return Journal(path, file, found, num_failed)


Spans = dict[int, tuple[int, int]]  # (offset, length) of results, by index


def _read(
    path: Path, descriptor: int, num_prompts: int, inputs: Mapping[str, Any]
) -> tuple[Spans, int, int]:
    """(results that are no errors, how many are, bytes of whole lines)."""
    spans: Spans = {}
    failed: set[int] = set()
    size = 0
    for number, line in enumerate(_whole_lines(path, descriptor), 1):
        where = f"line {number} of {path}"
        value = parse_json(line, where, max_depth=MAX_JSON_DEPTH + 4)
        if number == 1:
            _check_header(path, value, num_prompts, inputs)
        else:
            index, start, length, is_failed = _entry_of(line, value, where, num_prompts)
            if index in spans:
                raise _damaged(where, f"prompt {index} is in the journal twice")
            if is_failed:
                failed.add(index)
            else:
                spans[index] = (size + start, length)
        size += len(line)
    return spans, len(failed - spans.keys()), size


def _whole_lines(path: Path, descriptor: int) -> Iterator[bytes]:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            if not line.endswith(b"\n"):
                if len(line) == MAX_LINE_BYTES:
                    raise UserError(f"{path} has a line of more than {MAX_LINE_BYTES} bytes")
                return  # the process died while it wrote this one
            yield line


def _check_header(path: Path, header: Any, num_prompts: int, inputs: Mapping[str, Any]) -> None:
    if not isinstance(header, dict) or not isinstance(header.get("regatta_journal"), int):
        raise UserError(
            f"{path} is not the journal of a run; move it away, or choose another --output_file"
        )
    if header["regatta_journal"] != FORMAT:
        raise UserError(
            f"{path} has format {header['regatta_journal']}, and this version goes on with format "
            f"{FORMAT}; use the version that wrote it, or leave --resume out to begin anew"
        )
    saved = header.get("inputs")
    problems = differences(saved if isinstance(saved, dict) else {}, inputs)
    if not problems and header.get("num_prompts") != num_prompts:
        problems = [f"it had {header.get('num_prompts')} prompts and has {num_prompts}"]
    if problems:
        raise UserError(
            f"--resume: {path} is of another run: {'; '.join(problems)}. Repeat that run's "
            "command, or leave --resume out to begin anew; the journal is then kept beside"
        )


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two runs' inputs, in words. Names with a space are digests."""
    now = json.loads(json.dumps(now))
    found = []
    for name in sorted({*saved, *now}):
        before, after = saved.get(name), now.get(name)
        if before == after:
            continue
        if " " in name:
            found.append(f"the {name} changed")
        else:
            found.append(f"--{name} was {json.dumps(before)} and is {json.dumps(after)}")
    return found


def _entry_of(line: bytes, value: Any, where: str, count: int) -> tuple[int, int, int, bool]:
    """(index, where the result begins in the line, its length, whether it is an error)."""
    index = value.get("index") if isinstance(value, dict) else None
    if type(index) is not int:
        raise _damaged(where, "it is not a result")
    if not 0 <= index < count:
        raise _damaged(where, f"it is of prompt {index}, and there are {count} (from 0)")
    start = len(b'{"index": %d, "result": ' % index)
    result = line[start:-2]
    if entry(index, result)[0] != line or not isinstance(value.get("result"), dict):
        raise _damaged(where, "it was not written by this program")
    return index, start, len(result), "error" in value["result"]


def _damaged(where: str, why: str) -> UserError:
    return UserError(
        f"{where} is damaged: {why}. Take the line out, or leave --resume out to begin anew; the "
        "journal is then kept beside"
    )


def _put_aside(path: Path) -> str:
    """Makes way for a new journal; a note on where an older one with answers is now."""
    try:
        state = os.lstat(path)
    except FileNotFoundError:
        return ""
    if not stat.S_ISREG(state.st_mode):
        raise _not_a_file(path)
    with path.open("rb") as file:
        first = file.readline(MAX_LINE_BYTES)
        has_answers = bool(file.read(1)) or (bool(first) and b'"regatta_journal"' not in first)
    if not has_answers:
        path.unlink()
        return ""
    number = 1
    while os.path.lexists(kept := path.with_name(f"{path.name}.{number}")):
        number += 1
    path.rename(kept)
    return (
        f"an earlier run left answers in {path}; they are kept in {kept} (--resume would have gone "
        "on with them)"
    )


def _open(path: Path, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError:
        if path.is_symlink():
            raise _not_a_file(path) from None
        raise
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode) or state.st_nlink > 1:
        os.close(descriptor)
        raise _not_a_file(path)
    return descriptor


def _not_a_file(path: Path) -> UserError:
    return UserError(
        f"{path} is a link, a folder or a device, and the run's journal goes there; move it away, "
        "or choose another --output_file"
    )
