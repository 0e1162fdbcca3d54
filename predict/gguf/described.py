"""The JSON files of a model, whether they lie in its folder or a GGUF file stands for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from predict.gguf.config import config_of
from predict.gguf.files import ENDING, gguf_of
from predict.gguf.opened import open_gguf
from predict.gguf.reader import GgufFile
from predict.gguf.tokens import tokenizer_config_of
from predict.system.files import read_json_object

STANDS_FOR: Mapping[str, Callable[[GgufFile], dict[str, Any]]] = {
    "config.json": config_of,
    "tokenizer_config.json": tokenizer_config_of,
}
TOKENIZER = "tokenizer.json"
# Read beside a GGUF file where a TOKENIZER lies there, which is taken in place of the file's own.
OF_TOKENIZER = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json")


def described_in(model: str | Path, name: str) -> Path:
    """The file that says what a model's `name` does: it, or a GGUF file; it may not exist.

    model: a folder, or a GGUF file, which stands for the files of STANDS_FOR.
    """
    file = gguf_of(model)
    if file is not None:
        if name in OF_TOKENIZER and (file.parent / TOKENIZER).is_file():
            return file.parent / name
        if name in STANDS_FOR:
            return file
    return Path(model) / name


def read_model_json(
    model: str | Path, name: str, missing_ok: bool = False, *, constants: bool = False
) -> dict[str, Any]:
    """The object of a model's JSON file, as `read_json_object` reads it; see `described_in`."""
    path = described_in(model, name)
    if path.suffix == ENDING:
        return STANDS_FOR[name](open_gguf(path))
    return read_json_object(path, missing_ok, constants=constants)
