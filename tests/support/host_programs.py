"""Compiles programs of tests/csrc over host code of csrc/cuda, without CUDA."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import build

PROGRAMS = build.ROOT / "tests" / "csrc"
FLAGS = ("-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-x", "c++")


def compiled(name: str, sources: Sequence[str]) -> Path:
    """Returns tests/csrc/NAME.cc with these sources of csrc/cuda, compiled now or by earlier calls.

    Raises build.BuildError where there is no C++ compiler.
    """
    files = [PROGRAMS / f"{name}.cc", *(build.CSRC / "cuda" / source for source in sources)]
    headers = [*(build.CSRC / "cuda").rglob("*.h"), *(build.CSRC / "include").rglob("*.h")]
    compiler = build.find_compiler()
    digest = hashlib.blake2b(" ".join([compiler, *FLAGS]).encode(), digest_size=8)
    for path in (*files, *sorted(headers)):
        digest.update(path.read_bytes())
    folder = build.BUILD_DIR / name
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / digest.hexdigest()
    if not target.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as own:
            made = Path(own) / "program"
            command = [compiler, *FLAGS, f"-I{build.CSRC / 'include'}", f"-I{build.CSRC}"]
            subprocess.run([*command, *map(str, files), "-o", str(made)], check=True)
            os.replace(made, target)  # another process may do the same
    return target
