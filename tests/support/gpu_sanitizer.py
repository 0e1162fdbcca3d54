"""NVIDIA's compute-sanitizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import build


def sanitizer() -> str | None:
    found = shutil.which("compute-sanitizer")
    if found is not None:
        return found
    try:
        return shutil.which("compute-sanitizer", path=str(Path(build.find_nvcc()).parent))
    except build.BuildError:
        return None
