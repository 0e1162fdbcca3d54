"""Data files: every line is checked before anything runs."""

from __future__ import annotations

import os
import re
import select
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from predict.cli.prompt_keys import KNOWN_KEYS, meant
from predict.errors import UserError, quoted
from predict.images.files import file_bytes, of_base64
from predict.names import nearest
from predict.request import SAMPLING_KEYS
from predict.system.files import json_type, open_regular, parse_json
from predict.text.conversation import PicturePart, conversation_messages, with_marked

BUILT_IN_PROMPT = "Hello, how are you?"  # what runs without a data file
MAX_DATA_BYTES = 2 << 30
MAX_PATH, MIN_CODED = 4096, 64  # characters of a path, and of a picture in base64
CODED = re.compile("[A-Za-z0-9+/\\s]+={0,2}")
WRITER_SECONDS = 30.0  # for somebody to open a pipe that is read


@dataclass(frozen=True)
class DataItem:
    """One prompt of a data file."""

    where: str  # "line 3 of prompts.jsonl", for messages
    src: str | list[Any]  # a text or a conversation
    tgt: str | list[Any] = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams
    other_keys: tuple[str, ...] = ()  # that nothing here reads
    images: tuple[Any, ...] = ()  # pictures, one for each "<image>" in the texts
    folder: Path = Path()  # that its pictures' files lie below


def read_data_file(path: str | Path) -> list[DataItem]:
    """The prompts of a data file: JSON lines, or one JSON list. Blank lines are skipped.

    `src` is needed; `tgt` is "" when left out; a field of SamplingParams holds for its prompt
    alone; other keys are for the file's owner (see predict.cli.prompt_keys). Raises UserError for
    an unreadable or empty file, and for the first wrong line with its number and those of the
    others.
    """
    path = Path(path)
    content = _read(path).removeprefix(b"\xef\xbb\xbf")
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
            value = parse_json(entry, "it") if isinstance(entry, bytes) else entry
            items.append(_item(where, value, path.parent))
        except UserError as error:
            problems.append((where, str(error)))
    if problems:
        where, problem = problems[0]
        others = f" (and so are {short_list([w for w, _ in problems[1:]])})" * (len(problems) > 1)
        raise UserError(f"--data_file {path}: {where} is wrong: {problem}{others}. Nothing was run")
    return items


def _read(path: Path) -> bytes:
    """The content of a data file, which may be a pipe; UserError for what cannot be read whole."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise UserError(f"--data_file {path} is a device; give a file or a pipe")
        if stat.S_ISFIFO(mode):
            content = _pipe_content(path)
        else:
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


def _pipe_content(path: Path) -> bytes:
    """What is written to a pipe; UserError where nobody opens it for WRITER_SECONDS."""
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(pipe, "rb") as file:
        poll, first = select.poll(), b""
        poll.register(pipe, select.POLLIN)
        deadline = time.monotonic() + WRITER_SECONDS
        while not first and not poll.poll(100):
            try:
                first = os.read(pipe, 1)  # b"": nobody has it open
            except BlockingIOError:
                break  # a writer that has written nothing yet
            if not first and time.monotonic() > deadline:
                raise UserError(
                    f"--data_file {path} is a pipe that nobody writes to: none opened it within "
                    f"{WRITER_SECONDS:g} s; start what writes to it first, or give a file"
                )
        os.set_blocking(pipe, True)
        return first + file.read(MAX_DATA_BYTES + 1 - len(first))


Entry = tuple[str, Any]  # where it is, and the JSON value, or the line that holds it


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
    lines = enumerate(content.split(b"\n"), 1)
    return [(f"line {number} of {name}", line) for number, line in lines if line.strip()]


def _item(where: str, value: Any, folder: Path) -> DataItem:
    """The prompt that one JSON value holds; UserError when it holds none."""
    if not isinstance(value, dict):
        raise UserError(f"it is {json_type(value)}; an object with src and tgt is needed")
    if "messages" in value and "src" not in value:
        value = {**value, "src": value["messages"]}
        del value["messages"]
    if "src" not in value:
        guess = next((key for key in value if meant(key) == "src"), None) or nearest("src", value)
        keys = short_list([quoted(key) for key in value]) or "none"
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
    images = value.get("images") or []
    images = images if isinstance(images, list) else [images]
    pictures: list[PicturePart] = []
    with_marked(conversation_messages(src, tgt, pictures), pictures, images)
    for source in (*images, *(each.source for each in pictures)):
        located(source, folder)
    sampling = {key: value[key] for key in SAMPLING_KEYS if key in value}
    if "num_return_sequences" in value:  # as the flag is called
        sampling.setdefault("n", value["num_return_sequences"])
    others = tuple(key for key in value if key not in KNOWN_KEYS)
    return DataItem(where, src, tgt or "", sampling, others, tuple(images), folder)


def located(source: Any, folder: Path) -> Any:
    """A picture of a data file: a path below the file's folder, a data URL, or bytes of base64.

    Raises UserError for other things, and for a path that leads elsewhere.
    """
    if not isinstance(source, str) or not source:
        raise UserError(f"a picture is {quoted(source)} (allowed: a path, a data URL, base64)")
    if source[:5].lower() == "data:" or "://" in source[:40]:
        file_bytes(source, "a picture")
        return source
    if not _exists(folder / source) and len(source) > MIN_CODED and CODED.fullmatch(source):
        return of_base64(source, "a picture")
    try:
        path = (folder / source[: MAX_PATH + 1]).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle; a NUL in the name
        raise UserError(f"the picture {quoted(source)} has no path ({error})") from None
    if not path.is_relative_to(folder.resolve()):
        raise UserError(
            f"the picture {quoted(source)} does not lie below the data file's folder; move it there"
        )
    open_regular(path).close()
    return path


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # its name is too long, for one
        return False


def short_list(words: Sequence[str], shown: int = 5, separator: str = ", ") -> str:
    """The first of many words, and how many more there are."""
    rest = len(words) - shown
    return separator.join(words[:shown]) + (f" and {rest} more" if rest > 0 else "")
