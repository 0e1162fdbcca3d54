"""Finding a model's directory, and reading small files with errors that say what is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from predict.errors import UserError


def read_text(path: Path) -> str:
    """The file's UTF-8 text, less a byte order mark; UserError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte {error.start} is 0x{error.object[error.start]:02x}); "
            "save it as UTF-8"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def read_json_object(path: Path, missing_ok: bool = False) -> dict[str, Any]:
    """The JSON object in `path`; with `missing_ok`, {} when there is no such file.

    Raises UserError for an unreadable file, malformed JSON, and anything that is not an object.
    """
    if missing_ok and not path.exists():
        return {}
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}; "
            "the file may be cut short, copy it again"
        ) from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {type(value).__name__}, an object is needed")
    return value


def find_model_dir(name: str, flag: str = "model_name_or_path") -> Path:
    """The local directory that --model_name_or_path, or another flag, means.

    A directory as given; else, for a name such as meta-llama/Llama-2-7b-chat, the one below
    $REGATTA_MODEL_DIR, the newest snapshot in the Hugging Face cache, or PaddleNLP's own cache.
    Raises UserError saying where it was looked for.
    """
    if Path(name).is_dir():
        return Path(name)
    if Path(name).is_file():
        raise UserError(f"--{flag} {name} is a file; pass the directory that holds config.json")
    relative = Path(name)
    looked: list[str] = [name]
    hub_name = _hub_name(name)
    if not relative.is_absolute() and ".." not in relative.parts:
        for candidate in _cache_dirs(name):
            looked.append(str(candidate))
            found = _newest_snapshot(candidate) if candidate.name == hub_name else candidate
            if found is not None and found.is_dir():
                return found
    raise UserError(
        f"model directory {name!r} was not found (looked at {', '.join(looked)}). Names of hub "
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
