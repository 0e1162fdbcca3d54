"""Data files in, result files out: every line checked before a run, every result kept after it."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from predict.conversation import conversation_messages
from predict.errors import UserError, nearest, quoted
from predict.files import json_type, parse_json
from predict.prompt_keys import KNOWN_KEYS, meant
from predict.request import SAMPLING_KEYS

BUILT_IN_PROMPT = "Hello, how are you?"
MAX_DATA_BYTES = 2 << 30


@dataclass(frozen=True)
class DataItem:
    """One prompt of a data file."""

    where: str  # "line 3 of prompts.jsonl", for messages
    src: str | list[Any]  # a text or a conversation
    tgt: str | list[Any] = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams
    other_keys: tuple[str, ...] = ()  # that nothing here reads


def built_in_items(count: int) -> list[DataItem]:
    """What runs without a data file: the same short prompt `count` times."""
    return [DataItem("the built-in prompt", BUILT_IN_PROMPT)] * count


def read_data_file(path: str | Path) -> list[DataItem]:
    """The prompts of a data file: JSON lines, or one JSON list. Blank lines are skipped.

    `src` is needed; `tgt` is "" when left out; a field of SamplingParams holds for its prompt
    alone; other keys are for the file's owner (see predict.prompt_keys). Raises UserError for an
    unreadable or empty file, and for the first wrong line with its number and those of the others.
    """
    path = Path(path)
    content = _read(path)
    content = content.removeprefix(b"\xef\xbb\xbf")
    if not content.strip():
        raise UserError(
            f"--data_file {path} is empty; it needs one JSON object per line, such as "
            '{"src": "a prompt", "tgt": ""}'
        )
    entries = _list_entries(content, path.name) or _line_entries(content, path.name)
    items: list[DataItem] = []
    problems: list[tuple[str, str]] = []
    for where, entry in entries:
        try:
            items.append(_item(where, entry() if callable(entry) else entry))
        except UserError as error:
            problems.append((where, str(error)))
    if problems:
        where, problem = problems[0]
        others = f" (and so are {_short_list([w for w, _ in problems[1:]])})" * (len(problems) > 1)
        raise UserError(f"--data_file {path}: {where} is wrong: {problem}{others}. Nothing was run")
    return items


def _read(path: Path) -> bytes:
    """The content of a data file, which may be a pipe; UserError for what cannot be read whole."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise UserError(f"--data_file {path} is a device; give a file or a pipe")
        with path.open("rb") as file:
            content = file.read(MAX_DATA_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise UserError(f"cannot read --data_file {path}: {reason or error}") from None
    if len(content) > MAX_DATA_BYTES:
        raise UserError(
            f"--data_file {path} has more than {MAX_DATA_BYTES} bytes; split it into several files"
        )
    return content


Entry = tuple[str, Any]  # where it is, and the JSON value or a function that parses it


def _list_entries(content: bytes, name: str) -> list[Entry] | None:
    """The elements of a file that is one JSON list; None for any other file."""
    if not content.lstrip().startswith(b"["):
        return None
    values = parse_json(content, f"--data_file {name} begins as a JSON list and")
    if not values:
        raise UserError(f"--data_file {name} is an empty JSON list; give it at least one prompt")
    return [(f"item {number} of {name}", value) for number, value in enumerate(values, 1)]


def _line_entries(content: bytes, name: str) -> list[Entry]:
    """The lines that are not blank, to be parsed one by one."""
    return [
        (f"line {number} of {name}", lambda line=line: parse_json(line, "it"))
        for number, line in enumerate(content.split(b"\n"), 1)
        if line.strip()
    ]


def _item(where: str, value: Any) -> DataItem:
    """The prompt that one JSON value holds; UserError when it holds none."""
    if not isinstance(value, dict):
        raise UserError(f"it is {json_type(value)}; an object with src and tgt is needed")
    if "src" not in value:
        guess = next((key for key in value if meant(key) == "src"), None) or nearest("src", value)
        keys = _short_list([quoted(key) for key in value]) or "none"
        hint = f"; did you mean src in place of {quoted(guess)}?" if guess else ""
        raise UserError(f'it has no "src" (keys: {keys}){hint}')
    src, tgt = value["src"], value.get("tgt")
    if not isinstance(src, (str, list)):
        raise UserError(f'"src" is {json_type(src)}; write a text or a conversation')
    if not isinstance(tgt, (str, list, type(None))):
        raise UserError(
            f'"tgt" is {json_type(tgt)}; write a text, a list of texts, or leave it out'
        )
    if isinstance(tgt, list) and not all(isinstance(text, str) for text in tgt):
        odd = next(text for text in tgt if not isinstance(text, str))
        raise UserError(f'"tgt" is a list with {json_type(odd)} in it; write texts')
    conversation_messages(src, tgt)
    sampling = {key: value[key] for key in SAMPLING_KEYS if key in value}
    if "num_return_sequences" in value:  # as the flag is called
        sampling.setdefault("n", value["num_return_sequences"])
    others = tuple(key for key in value if key not in KNOWN_KEYS)
    return DataItem(where, src, tgt or "", sampling, others)


def _short_list(words: Sequence[str], shown: int = 5) -> str:
    rest = len(words) - shown
    return ", ".join(words[:shown]) + (f" and {rest} more" if rest > 0 else "")


def check_output_path(path: str | Path, *inputs: str | Path | None) -> None:
    """Raises UserError when results cannot go to `path`, or would overwrite one of `inputs`.

    Nothing is created or emptied: the last run's results stay until this one has some.
    """
    path = Path(path)
    for source in inputs:
        if source is None or not (path.exists() and Path(source).exists()):
            continue
        if path.samefile(source):
            raise UserError(
                f"--output_file {path} is the --data_file itself; choose another --output_file"
            )
    if path.is_dir():
        raise UserError(f"--output_file {path} is a directory; give the name of a file")
    if not path.parent.is_dir():
        raise UserError(
            f"--output_file {path}: the directory {path.parent} does not exist; create it first"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"--output_file {path} cannot be written: permission denied")


class ResultWriter:
    """Writes results in input order, each as one whole line as soon as all before it are done.

    When the file cannot take a line (disk full), that line and all later ones go to a rescue file
    in the temporary directory, or to standard output where that is full too; `failure` then says
    so. `on_line(index)` is called after a line is out.
    """

    def __init__(
        self,
        path: str | Path,
        count: int,
        on_line: Callable[[int], None] | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """Empties the file at `path`; `count` results will come. Raises UserError if it cannot."""
        self._path = Path(path)
        self._lines: dict[int, bytes] = {}  # finished, waiting for one before them
        self._next = 0
        self._count = count
        self._on_line = on_line
        self._warn = warn or (lambda message: None)
        self._rescue: _LineFile | None = None
        self._to_stdout = False
        self.num_written = 0
        self.failure: str | None = None
        try:
            self._file = _LineFile(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666))
        except OSError as error:
            raise UserError(
                f"--output_file {path} cannot be written: {error.strerror or error}"
            ) from None

    def put(self, index: int, result: Mapping[str, Any]) -> None:
        """Takes the result of prompt `index`; writes it and its successors where they are due."""
        line = json.dumps(result, ensure_ascii=False) + "\n"
        # A lone surrogate, legal in JSON input, has no UTF-8 form.
        self._lines[index] = line.encode("utf-8", "backslashreplace")
        with _interrupt_held():
            while self._next in self._lines:
                self._write(self._next)
                self._next += 1

    def close(self) -> None:
        """Writes what still waits for an unfinished prompt (after an interruption), and closes."""
        with _interrupt_held():
            for index in sorted(self._lines):
                self._write(index)
            for file in (self._file, self._rescue):
                if file is not None and not self._guard(file.close):
                    self._warn(f"--output_file {self.failure}")

    @property
    def summary(self) -> str:
        """How many results were written, and where they are."""
        where = f"in {self._path}" if self.failure is None else "kept as said above"
        return f"{self.num_written} of {self._count} results are {where}"

    def _write(self, index: int) -> None:
        line = self._lines.pop(index)
        if self.failure is None and not self._guard(lambda: self._file.append(line)):
            self._open_rescue()
        if self.failure is not None:
            self._write_rescue(line)
        self.num_written += 1
        if self._on_line:
            self._on_line(index)

    def _guard(self, action: Callable[[], None]) -> bool:
        """Runs `action`; on an OSError records the failure and returns False."""
        try:
            action()
        except OSError as error:
            self.failure = f"{self._path} cannot be written: {error.strerror or error}"
            return False
        return True

    def _open_rescue(self) -> None:
        kept = f"the {self.num_written} results before it are in the file"
        try:
            descriptor, name = tempfile.mkstemp(prefix="regatta-rescue-", suffix=".jsonl")
            self._rescue = _LineFile(descriptor)
            where = f"in {name}"
        except OSError:
            self._to_stdout, where = True, "on standard output"
        self.failure = (
            f"--output_file {self.failure}; {kept}, this one and all after it are {where}. "
            "Make room and join the two"
        )
        self._warn(self.failure)

    def _write_rescue(self, line: bytes) -> None:
        if self._rescue is not None and not self._to_stdout:
            try:
                return self._rescue.append(line)
            except OSError:
                self._to_stdout = True
                self._warn("the rescue file is full too; the results that follow are printed here")
        sys.stdout.write(line.decode("utf-8"))
        sys.stdout.flush()
        return None


@contextmanager
def _interrupt_held() -> Iterator[None]:
    """Lets Ctrl-C wait until the block is done, so that a line is written once and whole.

    A second Ctrl-C goes through: the write may be stuck.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            raise KeyboardInterrupt
        held.append((number, frame))

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held and callable(before):
        before(*held[0])


class _LineFile:
    """A file descriptor to which whole lines are appended, or nothing of them."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._size = 0  # bytes of whole lines

    def append(self, line: bytes) -> None:
        """Writes the line through to the kernel; on OSError the file is cut back to whole lines."""
        done = 0
        try:
            while done < len(line):
                done += os.write(self._descriptor, line[done:])
        except OSError:
            if self._regular:
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(line)

    def close(self) -> None:
        """Closes the descriptor; a delayed write error (network file systems) is an OSError."""
        os.close(self._descriptor)
