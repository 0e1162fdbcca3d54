"""Which GGUF files make up a model: one, or all parts of a split one."""

from __future__ import annotations

import re
from pathlib import Path

from predict.errors import UserError

ENDING = ".gguf"
PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
PROJECTOR = "mmproj"  # begins the names of files with the encoders of images beside a text model
# A folder that has one of these is not read as GGUF.
OTHER_WEIGHTS = ("*.safetensors*", "*.pdparams", "*.pdiparams", "*.bin", "*.pt", "*.pth")
MAX_PARTS = 10_000


def gguf_of(model: str | Path) -> Path | None:
    """The GGUF file of a model, the first of a split one; None where it has other files.

    model: a GGUF file, or a folder that holds those of one model and no other weights. Raises
    UserError where a folder holds those of several.
    """
    path = Path(model)
    if path.suffix == ENDING and not path.is_dir():
        return path
    if not path.is_dir() or any(True for each in OTHER_WEIGHTS for _ in path.glob(each)):
        return None
    found = [
        file for file in sorted(path.glob(f"*{ENDING}")) if not file.name.startswith(PROJECTOR)
    ]
    firsts = [file for file in found if _number(file) <= 1]
    if len(firsts) > 1:
        raise UserError(
            f"{path} holds {len(firsts)} GGUF models ({', '.join(f.name for f in firsts[:8])}); "
            "pass one of the files"
        )
    return next(iter(firsts or found), None)


def _number(file: Path) -> int:
    match = PART.fullmatch(file.name)
    return int(match[2]) if match else 0


def parts_of(path: Path) -> list[Path]:
    """The files of the model that `path` begins.

    Raises UserError where one is missing, or `path` is not the first.
    """
    match = PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, number, count = match[1], int(match[2]), int(match[3])
    if number != 1:
        raise UserError(
            f"{path} is part {number} of {count}; pass the first one, "
            f"{stem}-00001-of-{match[3]}{ENDING}"
        )
    if not 0 < count <= MAX_PARTS:
        raise UserError(f"{path} is of {count} parts (allowed: 1 to {MAX_PARTS})")
    parts = [path.with_name(f"{stem}-{i:05}-of-{match[3]}{ENDING}") for i in range(1, count + 1)]
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        shown = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        raise UserError(f"{path.parent} lacks {shown}; complete the download")
    return parts
