"""Programs of tests/native over csrc/engine, with sanitizers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import build
from tests.support.paths import ROOT
from tests.support.sanitizers import environment, last_isa_alone

# What the engine calls besides.
KERNELS = [build.CSRC / "cpu" / f"{name}.cc" for name in ("sample", "thread_pool")]
KERNELS += [
    build.CSRC / "cpu" / f"{name}.cc"
    for name in ("dispatch", "cpu_info", "features_x86", "features_arm")
]


def compiled(names: Sequence[str], sanitizers: Sequence[str], folder: Path) -> list[Path]:
    """The programs `names` of tests/native, in `folder`. Skips where no sanitizer is had."""
    environment(sanitizers)
    flags = [flag for flag in build.CXX_FLAGS if flag not in ("-O3", "-fPIC", "-DNDEBUG")]
    flags += [*last_isa_alone().split(), *build.sanitizer_flags(sanitizers), "-O0", "-Wextra"]
    flags += ["-Werror", f"-I{build.CSRC / 'include'}", f"-I{build.CSRC}"]
    whole = folder / "engine.cc"  # one source: the standard library's headers are read once
    parts = [*sorted((build.CSRC / "engine").glob("*.cc")), build.CSRC / "model" / "places.cc"]
    whole.write_text("".join(f'#include "{part}"\n' for part in parts))
    native = [ROOT / "tests" / "native" / f"{name}.cc" for name in names]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        made = list(threads.map(partial(_object, flags, folder), [whole, *native, *KERNELS]))
    shared = [made[0], *made[1 + len(native) :]]
    for name, own in zip(names, made[1:], strict=False):
        _compile(*flags, *map(str, [own, *shared]), "-o", str(folder / name))
    return [folder / name for name in names]


def _object(flags: Sequence[str], folder: Path, source: Path) -> Path:
    target = folder / f"{source.stem}.o"
    _compile(*flags, "-c", str(source), "-o", str(target))
    return target


def _compile(*words: str) -> None:
    subprocess.run([build.find_compiler(), *words], check=True)


def run(program: Path, *arguments: str, lines: Sequence[str] = ()) -> list[str]:
    """The lines that a program prints."""
    process = subprocess.run(
        [program, *arguments],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return process.stdout.splitlines()
