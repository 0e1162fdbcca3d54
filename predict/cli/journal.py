"""The journal of a run: each answer is on disk when it is finished, in whatever order they finish.

    OUTPUT.journal   {"regatta_journal": 1, "num_prompts": 3, "inputs": {...}}
                     {"index": 2, "result": {"src": ..., "tgt": ..., "output": ...}}
                     ...

The first line says what the answers depend on (predict.cli.identity), each further one is appended
when a prompt is finished; its result is the line that the output file will have. A process that
dies, at whatever moment, leaves whole lines and at most one that is cut short, at the end.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from predict.errors import UserError
from predict.system import console
from predict.system.files import MAX_JSON_DEPTH, parse_json
from predict.system.outputs import mode_of, sync_folder

SUFFIX = ".journal"
FORMAT = 1
SYNC_SECONDS = 1.0  # a power cut costs at most the answers of this long
MAX_LINE_BYTES = 1 << 30
OWN_FILE = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

Say = Callable[[str], None]
ResultPlaces = dict[int, tuple[int, int]]  # (offset, length) of results, by the prompt's index


class LineFile:
    """Lines that are appended to a file, a device or a pipe.

    Those that it does not take (the disk is full) wait in memory for the next attempt.
    """

    def __init__(self, path: Path, descriptor: int, say: Say, size: int = 0) -> None:
        """say: takes messages. size: bytes of whole lines that are there."""
        self.path = path
        self.is_open = True
        self.waiting: deque[bytes] = deque()
        self._descriptor = descriptor
        self._say = say
        self._end = size
        self._written = 0  # bytes of the first line that waits
        self._has_failed = False

    def append(self, line: bytes) -> int:
        """Writes the line through to the kernel, or keeps it; returns the offset that it has."""
        at = self._end
        self._end += len(line)
        self.waiting.append(line)
        self.flush()
        return at

    def flush(self) -> bool:
        """Whether every line is written. The first failure is said."""
        try:
            while self.waiting:
                rest = self.waiting[0][self._written :]
                self._written += os.write(self._descriptor, rest)
                if self._written == len(self.waiting[0]):
                    self.waiting.popleft()
                    self._written = 0
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                self._say(
                    f"error: {self.path} cannot be written: {error.strerror or error}; answers "
                    "wait in memory until it can, and are printed here if it never can"
                )
            return False
        return True

    def close(self) -> None:
        """Closes the file; lines that it never took are printed on stdout, as ASCII."""
        if not self.is_open:
            return
        self.is_open = False
        self.flush()
        for line in self.waiting:
            if not console.show(json.dumps(json.loads(line))):
                self._say(f"error: stdout takes nothing, too: {len(self.waiting)} results are lost")
                break
        try:
            os.close(self._descriptor)
        except OSError as error:  # a delayed write error of a network file system
            self._say_damaged(error)

    def _say_damaged(self, error: OSError) -> None:
        self._say(f"error: {self.path} may not be whole on the disk: {error.strerror or error}")


class Journal(LineFile):
    """An open journal; the process that has it holds the lock of the output, too.

    Lines reach the disk about once a second, on a thread: waiting for it would cost steps.
    """

    def __init__(
        self, path: Path, descriptor: int, say: Say, size: int, places: ResultPlaces
    ) -> None:
        """places: of the results that are there."""
        super().__init__(path, descriptor, say, size)
        self.places = places
        self._last_sync = time.monotonic()
        self._syncing = threading.Thread(target=self._sync, daemon=True)
        self._syncing.start()  # the name, too, is on the disk from the beginning

    def put(self, index: int, result: bytes) -> None:
        """Records the result of a prompt, as JSON without a line break."""
        start = _start_of(index)
        self.places[index] = self.append(start + result + b"}\n") + len(start), len(result)
        now = time.monotonic()
        if now - self._last_sync >= SYNC_SECONDS and not self._syncing.is_alive():
            self._last_sync = now
            self._syncing = threading.Thread(target=self._sync, daemon=True)
            self._syncing.start()

    def lines(self) -> Iterator[bytes]:
        """The results in the prompts' order, each with its line break. Raises OSError."""
        for _, (at, length) in sorted(self.places.items()):
            yield self._read(at, length) + b"\n"

    def end(self) -> None:
        """Puts the lines on the disk and closes the file."""
        if self.is_open:
            self.flush()
            self._syncing.join()
            self._sync()
            self.close()

    def remove(self) -> None:
        """Closes and deletes the file: its answers are in the output, or it has none."""
        self._syncing.join()
        self.close()
        self.path.unlink(missing_ok=True)

    def _read(self, at: int, length: int) -> bytes:
        found = b""
        while len(found) < length:
            more = os.pread(self._descriptor, length - len(found), at + len(found))
            if not more:
                raise OSError(errno.EIO, f"{self.path} was cut short by somebody else")
            found += more
        return found

    def _sync(self) -> None:
        try:
            os.fdatasync(self._descriptor)
            sync_folder(self.path.parent)
        except OSError as error:
            self._say_damaged(error)


def journal_path(output: str | Path) -> Path:
    """The journal of an output file, beside what the file's links lead to."""
    real = Path(os.path.realpath(output))
    return real.with_name(real.name + SUFFIX)


def open_journal(
    output: Path, num_prompts: int, inputs: Mapping[str, Any], resume: bool, say: Say
) -> Journal:
    """The journal of an interrupted run to go on with, else a new one; says what it found.

    A line that was cut short is cut off. Without `resume` an older journal with answers is kept
    under another name. Raises UserError where none can be made, and for one to go on with that is
    damaged or of a run with other inputs.
    """
    path = journal_path(output)
    header = {"regatta_journal": FORMAT, "num_prompts": num_prompts, "inputs": dict(inputs)}
    descriptor = _existing(path)
    if resume:
        nothing = f"there is no {path}" + " (a finished run leaves none)" * output.exists()
        if descriptor is not None:
            places, num_failed, size = _read_answers(path, descriptor, header)
            if places or num_failed:
                os.ftruncate(descriptor, size)
                failed = f" ({num_failed} of them failed before)" if num_failed else ""
                say(
                    f"note: {len(places)} of {num_prompts} results are kept in {path}; "
                    f"{num_prompts - len(places)} prompts run{failed}"
                )
                return Journal(path, descriptor, say, size, places)
            nothing = f"{path} holds no answers"
        say(f"note: --resume: {nothing}; all {num_prompts} prompts run")
    if descriptor is not None:
        _put_aside(path, descriptor, say)
    line = json.dumps(header).encode() + b"\n"
    try:
        descriptor = os.open(path, OWN_FILE | os.O_CREAT | os.O_EXCL, 0o600)
        os.fchmod(descriptor, mode_of(Path(os.path.realpath(output))))
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise UserError(
            f"--output_file {output}: its journal {path} cannot be written: "
            f"{error.strerror or error}",
            exit_code=1,
        ) from None
    return Journal(path, descriptor, say, len(line), {})


def _existing(path: Path) -> int | None:
    """A descriptor of the file that is there; None without one.

    Raises UserError for what is no file, or has another name, too.
    """
    try:
        descriptor = os.open(path, OWN_FILE)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise UserError(f"{path} cannot be opened: {error.strerror or error}") from None
    else:
        state = os.fstat(descriptor)
        if stat.S_ISREG(state.st_mode) and state.st_nlink == 1:
            return descriptor
        os.close(descriptor)
    raise UserError(
        f"{path} is a link, a folder or a device, and the run's journal goes there; move it away, "
        "or choose another --output_file"
    )


def _put_aside(path: Path, descriptor: int, say: Say) -> None:
    """Makes way for a new journal; says where an older one with answers is now."""
    with os.fdopen(descriptor, "rb") as file:
        first = file.readline(MAX_LINE_BYTES)
        has_answers = bool(file.read(1)) or (bool(first) and b'"regatta_journal"' not in first)
    if not has_answers:
        path.unlink()
        return
    number = 1
    while os.path.lexists(kept := path.with_name(f"{path.name}.{number}")):
        number += 1
    path.rename(kept)
    say(
        f"note: an earlier run left answers in {path}; they are kept in {kept} (--resume would "
        "have gone on with them)"
    )


def _read_answers(
    path: Path, descriptor: int, header: Mapping[str, Any]
) -> tuple[ResultPlaces, int, int]:
    """(results that are no errors, how many are, bytes of whole lines)."""
    places: ResultPlaces = {}
    failed: set[int] = set()
    size = 0
    for number, line in enumerate(_whole_lines(path, descriptor), 1):
        where = f"line {number} of {path}"
        value = parse_json(line, where, max_depth=MAX_JSON_DEPTH + 4)
        if number == 1:
            _check_header(path, value, header)
        else:
            index = _index_of(line, value, where, header["num_prompts"])
            if index in places:
                raise _damaged(where, f"prompt {index} is in the journal twice")
            if "error" in value["result"]:
                failed.add(index)
            else:
                start = len(_start_of(index))
                places[index] = size + start, len(line) - start - len(b"}\n")
        size += len(line)
    return places, len(failed - places.keys()), size


def _whole_lines(path: Path, descriptor: int) -> Iterator[bytes]:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            if not line.endswith(b"\n"):
                if len(line) == MAX_LINE_BYTES:
                    raise UserError(f"{path} has a line of more than {MAX_LINE_BYTES} bytes")
                return  # the process died while it wrote this one
            yield line


def _check_header(path: Path, found: Any, header: Mapping[str, Any]) -> None:
    if not isinstance(found, dict) or not isinstance(found.get("regatta_journal"), int):
        raise UserError(
            f"{path} is not the journal of a run; move it away, or choose another --output_file"
        )
    if found["regatta_journal"] != FORMAT:
        raise UserError(
            f"{path} has format {found['regatta_journal']}, and this version goes on with format "
            f"{FORMAT}; use the version that wrote it, or leave --resume out to begin anew"
        )
    saved, now = found.get("inputs"), header["inputs"]
    saved = saved if isinstance(saved, dict) else {}
    # Names with a space are those of digests.
    problems = [
        f"the {name} changed"
        if " " in name
        else f"--{name} was {json.dumps(saved.get(name))} and is {json.dumps(now.get(name))}"
        for name in sorted({*saved, *now})
        if saved.get(name) != now.get(name)
    ]
    count = header["num_prompts"]
    if not problems and found.get("num_prompts") != count:
        problems = [f"it had {found.get('num_prompts')} prompts and has {count}"]
    if problems:
        raise UserError(
            f"--resume: {path} is of another run: {'; '.join(problems)}. Repeat that run's "
            "command, or leave --resume out to begin anew; the journal is then kept beside"
        )


def _start_of(index: int) -> bytes:
    """What stands in a line before the result."""
    return b'{"index": %d, "result": ' % index


def _index_of(line: bytes, value: Any, where: str, count: int) -> int:
    """The prompt of a line; raises UserError for one that is no line of a journal."""
    index = value.get("index") if isinstance(value, dict) else None
    if type(index) is not int:
        raise _damaged(where, "it is not a result")
    if not 0 <= index < count:
        raise _damaged(where, f"it is of prompt {index}, and there are {count} (from 0)")
    is_own = line.startswith(_start_of(index)) and line.endswith(b"}}\n") and len(value) == 2
    if not is_own or not isinstance(value.get("result"), dict):
        raise _damaged(where, "it was not written by this program")
    return index


def _damaged(where: str, why: str) -> UserError:
    return UserError(
        f"{where} is damaged: {why}. Take the line out, or leave --resume out to begin anew; the "
        "journal is then kept beside"
    )
