"""Libraries of csrc/ that CMake builds, each installed once into a folder below build/."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

BUILDS = ROOT / "build" / "cmake"


def missing(packages: Mapping[str, str]) -> str:
    """Why nothing can be built here; "" where it can. packages: Debian's, by pkg-config's name."""
    for program in ("cmake", "pkg-config", "c++"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    for name, package in packages.items():
        if subprocess.run(["pkg-config", "--exists", name], check=False).returncode:
            return f"{package} is not installed"
    return ""


@contextmanager
def alone() -> Iterator[None]:
    """Other processes that build wait, and find what this one has made."""
    BUILDS.mkdir(parents=True, exist_ok=True)
    with (BUILDS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def installed(source: Path, inputs: Sequence[Path], *options: Sequence[str]) -> list[Path]:
    """The folders that `source` was installed into, now or before: one for each list of options.

    They share what is compiled: each configures the same build anew. inputs: files and folders that
    it is made of.
    """
    found = _built(source, tuple(inputs), tuple(map(tuple, options)))
    assert isinstance(found, list), found
    return found


def _digest(source: Path, inputs: Sequence[Path], options: Sequence[Sequence[str]]) -> str:
    digest = hashlib.blake2b(repr((str(source), options)).encode(), digest_size=8)
    for each in inputs:
        for path in [each] if each.is_file() else sorted(each.rglob("*")):
            if path.is_file():
                digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _built(
    source: Path, inputs: tuple[Path, ...], options: tuple[tuple[str, ...], ...]
) -> list[Path] | str:
    """The folders; what a build that failed said, which each test that needs it then says."""
    target = BUILDS / _digest(source, inputs, options)
    folders = [target / str(index) for index in range(len(options))]
    with alone():
        if target.is_dir():
            return folders
        with tempfile.TemporaryDirectory(dir=BUILDS) as own:
            build, made = f"{own}/build", Path(own, "installed")
            try:
                for folder, chosen in zip(folders, options, strict=True):
                    prefix = [f"-DCMAKE_INSTALL_PREFIX={folder}", "-DCMAKE_INSTALL_LIBDIR=lib"]
                    run("cmake", "-S", source, "-B", build, *prefix, *chosen)
                    run("cmake", "--build", build, "-j2")
                    run("cmake", "--install", build, "--prefix", made / folder.name)
            except AssertionError as error:
                return str(error)
            os.replace(made, target)
    return folders


def run(*command: str | Path, **settings: str) -> str:
    """What a command prints; its errors are in the exception where it fails."""
    process = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, **settings},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout
