"""What a checkpoint has besides its weights and config.json: tokenizer, templates, scales."""

from __future__ import annotations

import shutil
from pathlib import Path

from predict.system.outputs import whole_file

COPIED = ("*.json", "*.model", "merges.txt", "vocab.txt", "*.jinja", "*.tiktoken", "*.txt")
NOT_COPIED = ("*.index.json", "config.json", "heldout.txt", "calibration.txt", ".*")


def copy_companions(source: Path, target: Path) -> None:
    """Copies such files of a checkpoint's folder into another, each whole. Raises OSError."""
    for pattern in COPIED:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and not any(path.match(other) for other in NOT_COPIED):
                with path.open("rb") as original, whole_file(target / path.name) as copy:
                    shutil.copyfileobj(original, copy)
