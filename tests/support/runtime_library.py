"""libregatta_runtime as csrc/CMakeLists.txt builds it, over the kernels' objects that are there."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import build
from tests.support import cmake_packages, text_library
from tests.support.cmake_packages import run
from tests.support.paths import ROOT

SOURCE = ROOT / "csrc"
NATIVE = ROOT / "tests" / "native"
EXAMPLES = ROOT / "examples" / "cpp"
OBJECTS = ROOT / "build" / "regatta" / "cpu" / "obj"  # of csrc/build.py
PACKAGES = {"nlohmann_json": "nlohmann-json3-dev"}
INPUTS = (
    *(SOURCE / name for name in ("api", "model", "engine", "cmake")),
    *(SOURCE / name for name in ("cpu", "runtime", "blocks", "include")),
    *(SOURCE / name for name in ("flags.txt", "CMakeLists.txt", "regatta_runtime.pc.in")),
    ROOT / "predict" / "lib" / "libregatta_cpu.json",  # of the objects, which may be older
)
# Nothing is timed: the kernels are those of the operators' library, and the rest compiles quickly.
QUICK = (f"-DREGATTA_KERNEL_OBJECTS={OBJECTS}", "-DREGATTA_FLAGS=-O1", "-DREGATTA_TEXT=OFF")


def missing() -> str:
    """Why the library cannot be built here; "" where it can."""
    objects = map(build.object_path, build.kernel_sources())
    if not all((OBJECTS.parent / name).is_file() for name in objects):  # none, or of older sources
        return "the kernels' objects are not there: python csrc/setup_cpu.py install"
    return cmake_packages.missing(PACKAGES)


@cache
def prefixes() -> dict[str, Path]:
    """Where the shared library is installed, with Regatta::text beside it, and the archive."""
    kinds = [(*QUICK, f"-DBUILD_SHARED_LIBS={kind}") for kind in ("ON", "OFF")]
    shared, static = cmake_packages.installed(SOURCE, INPUTS, *kinds)
    if not text_library.missing():
        text = text_library.installed()
        with cmake_packages.alone():
            if not (shared / "include" / "regatta_text.h").is_file():  # one package of two builds
                shutil.copytree(text, shared, symlinks=True, dirs_exist_ok=True)
    return {"shared": shared, "static": static}


def flags(prefix: Path) -> list[str]:
    """What a program of the shared library there is compiled and linked with, by pkg-config."""
    path = {"PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")}
    found = run("pkg-config", "--cflags", "--libs", "regatta_runtime", **path)
    return [*found.split(), f"-Wl,-rpath,{prefix}/lib"]


def compiled(source: Path, folder: Path, *own: str, prefix: Path | None = None) -> Path:
    """`source` as a program in `folder`, by the compiler alone."""
    program = folder / source.stem
    is_c = source.suffix == ".c"
    strict = ["-Wall", "-Wextra", "-Werror", *(["-std=c99", "-pedantic"] if is_c else [])]
    language = ["cc"] if is_c else ["c++", "-std=c++17", "-pthread"]
    installed = flags(prefix or prefixes()["shared"])
    run(*language, *strict, *own, source, "-o", program, *installed)
    return program
