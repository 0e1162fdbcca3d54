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
from predict.device.library import LibraryError, is_outdated, read_metadata
from tests.support import cmake_packages
from tests.support.paths import ROOT

FLAGS = (*(flag for flag in build.CXX_FLAGS if flag != "-O3"), "-O1", "-Wextra", "-Werror")
HEADERS = (f"-I{build.CSRC / 'include'}", f"-I{build.CSRC}")


@cache
def program(name: str) -> Path:
    """tests/native/NAME.cc with csrc/model and the kernels, compiled now or by earlier calls.

    Skips where what they are compiled with is not installed.
    """
    if missing := cmake_packages.missing({"nlohmann_json": "nlohmann-json3-dev"}):
        pytest.skip(missing)
    sources = [
        ROOT / "tests" / "native" / f"{name}.cc",
        *sorted((build.CSRC / "model").glob("*.cc")),
    ]
    kernels = _kernel_objects()
    digest = hashlib.blake2b(" ".join(FLAGS).encode(), digest_size=8)
    for path in (*sources, *sorted(build.CSRC.rglob("*.h")), *kernels):
        digest.update(path.read_bytes())
    folder = build.BUILD_DIR / "programs"
    target = folder / f"{name}-{digest.hexdigest()}"
    folder.mkdir(parents=True, exist_ok=True)
    if not target.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as own, ThreadPoolExecutor(4) as threads:
            objects = [*threads.map(partial(_object, Path(own)), sources), *kernels]
            made = Path(own) / "program"
            _compile(*map(str, objects), "-o", str(made))
            os.replace(made, target)  # another process may do the same
    return target


def _kernel_objects() -> list[Path]:
    """Those that csrc/build.py made for the library that is in use; made here where none are."""
    sources = build.kernel_sources()
    objects = [build.BUILD_DIR / "cpu" / build.object_path(source) for source in sources]
    if all(path.is_file() for path in objects) and not _is_outdated():
        return objects
    folder = build.BUILD_DIR / "programs" / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(partial(_object, folder), sources))


def _is_outdated() -> bool:
    try:
        return is_outdated(read_metadata(build.LIBRARY_DIR / build.LIBRARY_NAME))
    except LibraryError:
        return True


def _object(folder: Path, source: Path) -> Path:
    target = folder / f"{source.parent.name}_{source.stem}.o"
    _compile("-c", str(source), "-o", str(target))
    return target


def _compile(*words: str) -> None:
    command = [build.find_compiler(), *FLAGS, *HEADERS, *words]
    subprocess.run(command, check=True)
