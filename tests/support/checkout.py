"""A checkout with one kernel and one registration, which compiles in seconds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "csrc/*.py",
    "csrc/flags.txt",
    "csrc/include/regatta/abi.h",
    "predict/*.py",
    "predict/device/*.py",
    "predict/system/*.py",
    "pyproject.toml",
)

KERNEL = """
#include "regatta/abi.h"
#include "regatta/answer.h"
#define TEXT(x) #x
#define TEXT_OF(x) TEXT(x)
REGATTA_EXPORT const char* regatta_cpu_info() { return "{\\"abi\\": " TEXT_OF(REGATTA_ABI) "}"; }
REGATTA_EXPORT void regatta_set_num_threads(int) {}
int answer() { return ANSWER; }
"""
REGISTRATION = """
#include "paddle/phi/api/ext/op_meta_info.h"
int answer();
std::vector<paddle::Tensor> Same(const paddle::Tensor& x) {
  return {answer() == 42 ? x : paddle::Tensor()};
}
PD_BUILD_OP(build_test_same).Inputs({"x"}).Outputs({"y"}).SetKernelFn(PD_KERNEL(Same));
"""
SOURCES = {
    "csrc/cpu/answer.cc": KERNEL,
    "csrc/include/regatta/answer.h": "#define ANSWER 42\n",
    "csrc/paddle/same.cc": REGISTRATION,
}


def make(folder: Path, sources: dict[str, str] = SOURCES) -> Path:
    """A copy of this checkout with `sources` in place of its own; in a path with a space."""
    root = folder / "a checkout"
    for pattern in COPIED:
        for source in ROOT.glob(pattern):
            target = root / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    for name, text in sources.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def run(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in `root`; standard error is part of the output."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
