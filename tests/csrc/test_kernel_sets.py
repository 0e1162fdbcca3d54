"""The CPU's kernel sets (csrc/cpu/isas.h): each operator of each against scalar.

Those of x86 are swept by tests/ops, in Python. Those of Arm are made by a cross compiler and run by
qemu, whose CPUs end a program at an instruction that they lack: a wrong choice shows. Whole models
run so in test_runtime_arm.py.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

import build
from tests.support import aarch64
from tests.support.paths import ROOT

NATIVE = ROOT / "tests" / "native"
# qemu's CPUs, and the sets that they have, best first.
CPUS = {
    "cortex-a72": ["neon"],
    "neoverse-n1": ["neon_dot", "neon"],
    "max": ["neon_bf16", "neon_dot", "neon"],
    "max,sve256=on,sve512=off": ["neon_bf16", "neon_dot", "neon"],
}
needs_aarch64 = pytest.mark.skipif(bool(aarch64.missing()), reason=aarch64.missing() or "installed")


@needs_aarch64
@pytest.mark.slow
@pytest.mark.parametrize("cpu", CPUS)
def test_operators_of_the_best_set_of_arm_are_as_scalars(cpu: str) -> None:
    program = aarch64.program("kernel_sets", NATIVE / "kernel_sets.cc")
    listed = aarch64.run(cpu, program, "--list")
    assert listed.stdout.split() == CPUS[cpu], listed.stderr
    if "sve" in cpu:  # the same instructions as on max: SVE runs no kernel
        return
    process = aarch64.run(cpu, program, CPUS[cpu][0])
    assert process.returncode == 0, process.stdout + process.stderr
    assert ", 0 failed" in process.stdout


@needs_aarch64
@pytest.mark.slow
def test_set_that_the_cpu_lacks_is_refused_by_name() -> None:
    program = aarch64.program("kernel_sets", NATIVE / "kernel_sets.cc")
    process = aarch64.run("cortex-a72", program, "neon_bf16")
    assert process.returncode == 1
    assert "neon_bf16 (this CPU lacks asimddp, bf16, i8mm)" in process.stdout


LISTS = {"x86_64": "isas_x86.h", "aarch64": "isas_arm.h"}
ROW = '  ROW(kTwins, "twins", twins, false, false, "", __VA_ARGS__)'
# Operators of rows, which are compiled in seconds, and what the list is read by.
ROWS = (
    *("dispatch", "features_x86", "features_arm", "thread_pool"),
    *("activate", "add", "norm", "pack_dense", "communicator"),
)


def with_twins(csrc: Path) -> dict[str, int]:
    """Adds a set of two lanes to a copy of csrc; returns the lines that files of it gained."""
    folder = csrc / "cpu"
    for path in (NATIVE / "twins").iterdir():
        shutil.copy(path, folder)
    path = folder / LISTS[platform.machine()]
    before = path.read_text().splitlines()
    row = next(i for i, line in enumerate(before) if "ROW(kScalar" in line)
    include = next(i for i, line in enumerate(before) if line == '#include "isa_scalar.inl"')
    after = [*before[:row], f"{ROW} \\", *before[row : include + 1], '#include "isa_twins.inl"']
    path.write_text("\n".join([*after, *before[include + 1 :], ""]))
    changed = {}
    for path in sorted(csrc.rglob("*")):
        old = build.CSRC / path.relative_to(csrc)
        if path.is_file() and old.is_file() and old.read_bytes() != path.read_bytes():
            lines = len(path.read_text().splitlines()) - len(old.read_text().splitlines())
            changed[path.name] = lines
    return changed


@pytest.mark.skipif(platform.machine() not in LISTS, reason="no list of this architecture")
def test_made_up_set_is_two_lines_of_the_list_and_its_own_files(tmp_path: Path) -> None:
    csrc = tmp_path / "csrc"
    for name in ("cpu", "include", "blocks", "runtime"):
        shutil.copytree(build.CSRC / name, csrc / name)
    assert with_twins(csrc) == {LISTS[platform.machine()]: 2}
    sources = [NATIVE / "kernel_sets.cc", *(csrc / "cpu" / f"{name}.cc" for name in ROWS)]
    flags = ["-std=c++17", "-O0", "-Wall", "-pthread", "-DROWS_ALONE"]
    headers = [f"-I{csrc / 'include'}", f"-I{csrc}", f"-I{NATIVE}"]
    program = tmp_path / "kernel_sets"
    compiler = [build.find_compiler(), *flags, *headers]
    subprocess.run([*compiler, *sources, "-o", program], check=True)
    process = subprocess.run([program, "twins"], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout
    assert process.stdout.startswith("twins: ")
    # Of its other files it is seen that they compile.
    others = ["gemm_codes", "gemm_a8w8", "paged_attention"]
    checked = [csrc / "cpu" / f"{name}.cc" for name in others]
    subprocess.run([*compiler, "-fsyntax-only", *checked], check=True)
