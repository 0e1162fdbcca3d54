"""Programs for 64-bit Arm: Debian's cross compiler makes them, qemu's user mode runs them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import build
from tests.support.paths import ROOT

COMPILERS = ("aarch64-linux-gnu-g++", "aarch64-linux-gnu-g++-12")
QEMUS = ("qemu-aarch64-static", "qemu-aarch64")
FOLDER = build.BUILD_DIR / "aarch64"
NATIVE = ROOT / "tests" / "native"
JSON = Path("/usr/include/nlohmann")
# -O1: half the time of -O3. char is unsigned on Arm by itself.
FLAGS = ("-std=c++17", "-O1", "-DNDEBUG", "-Wall", "-Werror", "-pthread")


def _found(names: Sequence[str]) -> str:
    return next((path for path in map(shutil.which, names) if path), "")


def missing() -> str:
    """What is not installed here; "" where programs can be made and run."""
    needs = {"g++-aarch64-linux-gnu": COMPILERS, "qemu-user-static": QEMUS}
    packages = [package for package, names in needs.items() if not _found(names)]
    return f"not installed (Debian's packages): {', '.join(packages)}" if packages else ""


def _json_folder() -> Path:
    """An include folder with nlohmann's headers alone: those beside them are not of Arm."""
    folder = FOLDER / "include"
    folder.mkdir(parents=True, exist_ok=True)
    if JSON.is_dir() and not (folder / JSON.name).exists():
        with contextlib.suppress(FileExistsError):
            (folder / JSON.name).symlink_to(JSON)
    return folder


@cache
def program(name: str, *sources: Path) -> Path:
    """The program of `sources` and all kernels, whose objects programs share.

    name: of the file, one for each list of sources.
    """
    folders = [f"-I'{NATIVE}'", f"-I'{_json_folder()}'"]
    command = " ".join([_found(COMPILERS), *FLAGS, *build.OWN_HEADERS, *folders])
    rules = build.compile_rule("compile", command)
    link = build.link_rule("link", f"{_found(COMPILERS)} -static -pthread $in")
    lines = ["ninja_required_version = 1.5", *rules, *link]
    objects = []
    for source in (*build.kernel_sources(), *sources):
        made = f"obj/{source.relative_to(ROOT).with_suffix('.o')}"
        objects.append(made)
        lines += [f"build {made}: compile {build.escaped(source)}", f"  name = {source.name}"]
    lines += [f"build {name}: link {' '.join(objects)}", f"default {name}", ""]
    with build.locked(FOLDER):
        build.run_ninja(FOLDER, "\n".join(lines), build.num_jobs(), name=f"{name}.ninja")
    return FOLDER / name


def command(cpu: str, path: Path) -> tuple[str, ...]:
    """What runs a program on one of qemu's CPUs. An instruction that it lacks ends the program."""
    return (_found(QEMUS), "-cpu", cpu, str(path))


def run(cpu: str, path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program with arguments. See `command`."""
    environment = {**os.environ, "LC_ALL": "C"}
    words = [*command(cpu, path), *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
