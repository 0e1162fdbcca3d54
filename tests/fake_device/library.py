"""Compiles the plugin of the device type "pretend" (plugin.cc)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import build
from tests.support.paths import ROOT

SOURCE = Path(__file__).resolve().parent / "plugin.cc"
LIBRARY_NAME = "libpretend.so"


def compile_plugin(folder: Path) -> None:
    """Writes the plugin to `folder`; raises build.BuildError without a compiler or Paddle."""
    include = build.find_paddle().root / "include"
    subprocess.run(
        [
            *(build.find_compiler(), *build.CXX_FLAGS, "-O1", "-isystem", str(include)),
            *(str(SOURCE), "-shared", "-o", str(folder / LIBRARY_NAME)),
        ],
        check=True,
    )


def environment(folder: Path) -> dict[str, str]:
    """Of a process whose Paddle is to find the plugin in `folder`."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    paths = os.pathsep.join([str(ROOT), str(build.CSRC)])
    return {**kept, "PYTHONPATH": paths, "CUSTOM_DEVICE_ROOT": str(folder)}
