"""Programs of tests/native over csrc/model, with the kernels' objects of the CPU library."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import pytest

import build
from tests.support import runtime_library
from tests.support.paths import ROOT

FLAGS = (*(flag for flag in build.CXX_FLAGS if flag != "-O3"), "-O0", "-Wextra", "-Werror")
HEADERS = (f"-I{build.CSRC / 'include'}", f"-I{build.CSRC}")


@cache
def program(name: str) -> Path:
    """tests/native/NAME.cc with csrc/model and the kernels, compiled now or by earlier calls.

    Skips where what it is made of is not there.
    """
    if missing := runtime_library.missing():
        pytest.skip(missing)
    sources = [
        ROOT / "tests" / "native" / f"{name}.cc",
        *sorted((build.CSRC / "model").glob("*.cc")),
    ]
    objects = [build.object_path(source) for source in build.kernel_sources()]
    kernels = [runtime_library.OBJECTS.parent / name for name in objects]
    digest = hashlib.blake2b(" ".join(FLAGS).encode(), digest_size=8)
    for path in (*sources, *sorted(build.CSRC.rglob("*.h")), *kernels):
        digest.update(path.read_bytes())
    folder = build.BUILD_DIR / "programs"
    target = folder / f"{name}-{digest.hexdigest()}"
    folder.mkdir(parents=True, exist_ok=True)
    if not target.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as own, ThreadPoolExecutor(4) as threads:
            made = Path(own) / "program"
            parts = [*threads.map(partial(_object, Path(own)), sources), *kernels]
            _compile(*map(str, parts), "-o", str(made))
            os.replace(made, target)  # another process may do the same
    return target


def _object(folder: Path, source: Path) -> Path:
    target = folder / f"{source.parent.name}_{source.stem}.o"
    _compile("-c", str(source), "-o", str(target))
    return target


def _compile(*words: str) -> None:
    command = [build.find_compiler(), *FLAGS, *HEADERS, *words]
    subprocess.run(command, check=True)
