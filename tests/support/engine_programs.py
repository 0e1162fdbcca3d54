"""Programs of tests/native over csrc/engine, with a sanitizer."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import build
from tests.support.paths import ROOT
from tests.support.sanitizers import environment, last_isa_alone

ENGINE, MODEL = build.CSRC / "engine", build.CSRC / "model"
# What the engine calls besides.
OTHERS = [MODEL / "places.cc"]
OTHERS += [build.CSRC / "cpu" / f"{name}.cc" for name in ("sample", "thread_pool", "dispatch")]
OTHERS += [build.CSRC / "cpu" / "cpu_info.cc"]


@cache
def compiled(name: str, sanitizers: tuple[str, ...], folder: Path) -> Path:
    """The program `name`.cc of tests/native with the engine. Skips where no sanitizer is had."""
    environment(sanitizers)
    flags = [flag for flag in build.CXX_FLAGS if flag not in ("-O3", "-fPIC", "-DNDEBUG")]
    flags += last_isa_alone().split()
    flags += [*build.sanitizer_flags(sanitizers), f"-I{build.CSRC / 'include'}", f"-I{build.CSRC}"]
    sources = [ROOT / "tests" / "native" / f"{name}.cc", *sorted(ENGINE.glob("*.cc")), *OTHERS]
    make = partial(_object, flags, folder)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(make, sources))
    program = folder / name
    subprocess.run([build.find_compiler(), *flags, *objects, "-o", program], check=True)
    return program


def _object(flags: Sequence[str], folder: Path, source: Path) -> Path:
    target = folder / f"{source.parent.name}_{source.stem}.o"
    subprocess.run([build.find_compiler(), *flags, "-c", source, "-o", target], check=True)
    return target


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
