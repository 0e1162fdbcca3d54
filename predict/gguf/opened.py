"""A GGUF model opened: the headers of all its files, read once."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

from predict.errors import UserError, quoted
from predict.gguf.files import parts_of
from predict.gguf.reader import GgufFile, GgufTensor, read_gguf


def open_gguf(path: Path) -> GgufFile:
    """A model's metadata and tensors, those of all parts; the metadata are the first part's.

    Raises UserError as `read_gguf` does, and where parts are missing or do not belong together.
    """
    try:
        stamps = tuple((str(part), part.stat().st_mtime_ns, part.stat().st_size)
                       for part in parts_of(path))  # fmt: skip
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
    return _opened(stamps)


@functools.lru_cache(maxsize=4)  # config, tokenizer, template and tensors are all asked for
def _opened(stamps: tuple[tuple[str, int, int], ...]) -> GgufFile:
    """stamps: of each part its name, when it was changed, and its size."""
    files = [read_gguf(Path(name)) for name, *_ in stamps]
    tensors: dict[str, GgufTensor] = {}
    for number, file in enumerate(files):
        _check_part(file, number, len(files))
        twice = next((name for name in file.tensors if name in tensors), None)
        if twice is not None:
            raise UserError(
                f"{tensors[twice].file.name} and {file.path} both hold {quoted(twice)}; download "
                "the parts again"
            )
        tensors |= file.tensors
    first = files[0]
    count = first.metadata.get("split.tensors.count", len(tensors))
    if count != len(tensors):
        raise UserError(
            f"{first.path} says that all parts hold {count} tensors, and they hold {len(tensors)}; "
            "download the parts again"
        )
    return replace(first, tensors=tensors)


def _check_part(file: GgufFile, number: int, count: int) -> None:
    """Raises UserError unless the file says that it is this part of so many."""
    given = (file.metadata.get("split.no", 0), file.metadata.get("split.count", 1))
    if given[1] == 0 and count == 1:  # how some say that nothing was split
        return
    if given != (number, count):
        raise UserError(
            f"{file.path} says that it is part {quoted(given[0])} (from 0) of {quoted(given[1])}, "
            f"and it was read as part {number} of {count}; give the parts the names that "
            "llama-gguf-split gave them, and pass the first"
        )
