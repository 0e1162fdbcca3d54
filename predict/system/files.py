"""Names of files, a model's directory, and small files read with errors that say what is wrong."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from predict.errors import UserError, flag_word, quoted

MAX_JSON_DEPTH = 64  # lists and objects inside one another
MAX_JSON_DIGITS = 300
FLOAT32_MAX = 3.4028234663852886e38  # of numbers that tensors take from JSON
MAX_JSON_BYTES = 1 << 29  # a tokenizer.json of a large vocabulary has 35 MB
MAX_NAME, MAX_PATH = 255, 4095  # bytes: NAME_MAX and PATH_MAX of Linux, less its final NUL
_KINDS_OF_FILES = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_text(path: Path) -> str:
    """The file's UTF-8 text, less a byte order mark; UserError when it cannot be read."""
    try:
        return _read_bytes(path, MAX_JSON_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is {_not_utf8(error)}") from None


def open_regular(path: Path) -> BinaryIO:
    """The file, opened to be read; UserError when there is none, or it is not a regular file.

    A pipe would be waited for without end, and a device may never end.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = next((words for check, words in _KINDS_OF_FILES if check(mode)), "a device")
            raise UserError(f"cannot read {path}: it is {kind}, and a file is needed")
        return path.open("rb")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from None


def parse_json(
    data: bytes | str, where: str, *, max_depth: int = MAX_JSON_DEPTH, constants: bool = False
) -> Any:
    """The value that a JSON text holds: the one reader for all files and users.

    where: names the text in messages ("line 3 of prompts.jsonl"). constants: whether NaN and
    Infinity, which Python writes and JSON has not, are numbers. Raises UserError for bytes that
    are not UTF-8, for malformed JSON, for lists and objects nested deeper than `max_depth`, for
    numbers beyond a float64 or of more than 300 digits, for a key that stands twice in an object,
    and for half a surrogate pair, which no tokenizer or file can take.
    """
    if isinstance(data, bytes):
        try:
            data = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(f"{where} is {_not_utf8(error)}") from None
    try:
        value = _decoder(where, constants).decode(data)
    except json.JSONDecodeError as error:
        at = (
            f"line {error.lineno} column {error.colno}" if "\n" in data else f"column {error.colno}"
        )
        shown = data[max(error.pos - 20, 0) : error.pos + 20]
        raise UserError(
            f"{where} is not valid JSON at {at}: {error.msg} (near {shown!r}); it may be cut short"
        ) from None
    except RecursionError:
        raise _too_deep(where, max_depth) from None
    if _depth_exceeds(value, max_depth):
        raise _too_deep(where, max_depth)
    # Escapes alone make half a pair: a text without them was UTF-8, or says where it is wrong.
    if _SURROGATE.search(data):
        _refuse_surrogates(value, where)
    return value


def read_json(path: Path, *, constants: bool = False) -> Any:
    """The JSON value in `path`, of at most MAX_JSON_BYTES. Raises UserError as parse_json does."""
    return parse_json(_read_bytes(path, MAX_JSON_BYTES), str(path), constants=constants)


def read_json_object(
    path: Path, missing_ok: bool = False, *, constants: bool = False
) -> dict[str, Any]:
    """The JSON object in `path`; with `missing_ok`, {} when there is no such file.

    Raises UserError as parse_json does, for an unreadable file, and for anything but an object.
    """
    if missing_ok and not path.exists():
        return {}
    value = read_json(path, constants=constants)
    if not isinstance(value, dict):
        raise UserError(f"{path} holds {json_type(value)}; a JSON object is needed")
    return value


def json_type(value: Any) -> str:
    """What JSON calls a value, with its article: "a list", "null"."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def _read_bytes(path: Path, most: int) -> bytes:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise UserError(f"{path} has {size} bytes; {most} are read at most")
        try:
            return file.read(most)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def _decoder(where: str, constants: bool) -> json.JSONDecoder:
    def number(digits: str) -> int:
        if len(digits) > MAX_JSON_DIGITS:
            raise UserError(
                f"{where} has a number of {len(digits)} digits ({digits[:12]}...; allowed: "
                f"{MAX_JSON_DIGITS})"
            )
        return int(digits)

    def real(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise UserError(f"{where} has the number {digits[:24]}, which is beyond a float64")
        return value

    def constant(name: str) -> float:
        if not constants:
            raise UserError(f"{where} has {name}, which is not JSON; write a number or null")
        return float(name.replace("Infinity", "inf"))

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) < len(items):
            twice = Counter(key for key, _ in items).most_common(1)[0][0]
            raise UserError(
                f"{where} has the key {twice[:80]!r} twice in one object; keep one of them"
            )
        return made

    return json.JSONDecoder(
        object_pairs_hook=pairs, parse_int=number, parse_float=real, parse_constant=constant
    )


def _depth_exceeds(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            child
            for each in level
            if isinstance(each, (dict, list))
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


def _too_deep(where: str, limit: int) -> UserError:
    return UserError(f"{where} is nested too deeply: JSON of {limit} levels at most is read")


def _refuse_surrogates(value: Any, where: str) -> None:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, list):
            waiting += each
        elif isinstance(each, str):
            try:
                each.encode("utf-8")
            except UnicodeEncodeError as error:
                code = f"\\u{ord(each[error.start]):04x}"
                raise UserError(
                    f"{where} has a text with {code} alone, half of a surrogate pair, which is no "
                    "character; write the whole pair, or leave it out"
                ) from None


def _not_utf8(error: UnicodeDecodeError) -> str:
    byte = error.object[error.start]
    return f"not UTF-8 text (byte {error.start + 1} is 0x{byte:02x}); save it as UTF-8"


def find_model_dir(name: str, flag: str = "model_name_or_path", holds: str = "config.json") -> Path:
    """The local directory or GGUF file that --model_name_or_path, or another flag, means.

    As given; else, for a name such as meta-llama/Llama-2-7b-chat, the directory below
    $REGATTA_MODEL_DIR, the newest snapshot in the Hugging Face cache, or PaddleNLP's own cache.
    Raises UserError saying where it was looked for.
    """
    if Path(name).is_dir():
        return Path(name)
    if Path(name).is_file():
        if Path(name).suffix == ".gguf" and holds == "config.json":
            return Path(name)
        raise UserError(
            f"{flag_word(flag)} {name} is a file; pass the directory that holds {holds}"
        )
    relative = Path(name)
    looked: list[str] = [name]
    hub_name = _hub_name(name)
    if not relative.is_absolute() and ".." not in relative.parts:
        for candidate in _cache_dirs(name):
            looked.append(str(candidate))
            found = _newest_snapshot(candidate) if candidate.name == hub_name else candidate
            if found is not None and found.is_dir():
                return found
    what = "model directory" if "model" in flag else flag_word(flag)
    raise UserError(
        f"{what} {name!r} was not found (looked at {', '.join(looked)}). Names of hub "
        "models are not downloaded: download the checkpoint yourself and pass its directory, or "
        "set REGATTA_MODEL_DIR to the folder that holds it"
    )


def _cache_dirs(name: str) -> Iterator[Path]:
    """Where a hub model of this name may lie on this machine, in the order to look."""
    root = os.environ.get("REGATTA_MODEL_DIR")
    if root:
        yield Path(root) / name
    hf_home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or hf_home / "hub")
    yield hub / _hub_name(name)
    paddle_home = Path(os.environ.get("PPNLP_HOME") or Path.home() / ".paddlenlp")
    yield paddle_home / "models" / name


def _hub_name(name: str) -> str:
    """The folder that the Hugging Face cache keeps a repository in."""
    return f"models--{name.replace('/', '--')}"


def _newest_snapshot(repository: Path) -> Path | None:
    """The snapshot that refs/main names in a Hugging Face cache, else the newest one."""
    snapshots = repository / "snapshots"
    if not snapshots.is_dir():
        return None
    reference = repository / "refs" / "main"
    if reference.is_file() and (named := snapshots / reference.read_text().strip()).is_dir():
        return named
    return max(snapshots.iterdir(), key=lambda path: path.stat().st_mtime, default=None)


def check_name(what: str, text: str) -> None:
    """Raises UserError for a text that can be the name of no file: `what` it is, for the message.

    Asking the system about such names fails in ways that say less.
    """
    if not text:
        raise UserError(f"{what or 'it'} is empty; give a name, or leave it out")
    if "\0" in text:
        raise UserError(f"{what} {quoted(text)} has a NUL character; leave it out")
    parts = os.fsencode(text).split(b"/")
    if max(map(len, parts)) > MAX_NAME or sum(map(len, parts)) + len(parts) > MAX_PATH:
        raise UserError(
            f"{what} {quoted(text)} is too long for the name of a file (allowed: {MAX_NAME} bytes, "
            f"{MAX_PATH} with all folders)"
        )
