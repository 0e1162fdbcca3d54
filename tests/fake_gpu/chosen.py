"""Which libraries a process takes where there is no GPU: those that libraries.py compiled."""

from __future__ import annotations

import os
from pathlib import Path

from predict.device import devices, library

ENVIRONMENT = "REGATTA_FAKE_GPU"  # names the folder: tests/gpu runs over the libraries there


def folder() -> Path | None:
    """The folder that this process's environment names."""
    return Path(os.environ[ENVIRONMENT]) if ENVIRONMENT in os.environ else None


def select(folder: Path) -> None:
    """Makes this process take its GPU libraries from `folder`; before Paddle is imported."""
    os.environ.setdefault("FAKE_CUDA_BYTES", str(1 << 32))  # a step's workspace, and some cache
    library.LIBRARY_DIR = folder
    devices.PLUGIN_FOLDER = folder / devices.PLUGIN_FOLDER.name
