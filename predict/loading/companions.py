"""What a checkpoint has besides its weights and config.json: tokenizer, templates, scales."""

from __future__ import annotations

import shutil
from pathlib import Path

from predict.gguf.described import (
    OF_TOKENIZER,
    STANDS_FOR,
    TOKENIZER,
    described_in,
    read_model_json,
)
from predict.gguf.files import gguf_of
from predict.gguf.opened import open_gguf
from predict.gguf.tokens import has_tokenizer
from predict.loading.safetensors_writer import write_json
from predict.system.outputs import whole_file
from predict.text.backends.gguf_vocabulary import write_tokenizer

COPIED = ("*.json", "*.model", "merges.txt", "vocab.txt", "*.jinja", "*.tiktoken", "*.txt")
NOT_COPIED = ("*.index.json", "config.json", "heldout.txt", "calibration.txt", ".*")


def copy_companions(source: Path, target: Path) -> None:
    """Copies such files of a checkpoint's folder into another, each whole. Raises OSError.

    Of a GGUF file it writes what that says; see `write_described`.
    """
    for pattern in COPIED:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and not any(path.match(other) for other in NOT_COPIED):
                with path.open("rb") as original, whole_file(target / path.name) as copy:
                    shutil.copyfileobj(original, copy)
    write_described(source, target)


def write_described(source: Path, folder: Path) -> None:
    """Writes what a GGUF file says into files as other models have them: config and tokenizer.

    source: the file, or its folder; nothing is written for any other model. A tokenizer.json beside
    the file is copied with what belongs to it. Raises OSError.
    """
    file = gguf_of(source)
    if file is None:
        return
    values = {name: read_model_json(source, name, missing_ok=True) for name in STANDS_FOR}
    if described_in(source, TOKENIZER).is_file():
        del values["tokenizer_config.json"]
        for path in (described_in(source, name) for name in OF_TOKENIZER):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
    elif has_tokenizer(open_gguf(file)):
        write_tokenizer(file, folder)
    for name, value in values.items():
        write_json(folder / name, value)
