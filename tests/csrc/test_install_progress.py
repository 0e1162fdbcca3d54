"""What `pip install` shows of a build: one line on the terminal, and never a reason to fail."""

from __future__ import annotations

import fcntl
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, sys
sys.path.insert(0, "csrc")
from terminal import install_progress
if "BACKGROUND" in os.environ:
    os.setpgid(0, 0)
with install_progress() as progress:
    print("none" if progress is None else "drawn")
    if progress is not None:
        for done in range(1, 13):
            progress(done, 12)
"""


def shown(
    *flags: str, pip: bool = True, terminal: bool = True, background: bool = False
) -> tuple[str, str]:
    """What PROGRAM prints, and what it draws on its terminal; its parent was started with flags."""
    primary, secondary = pty.openpty()

    def start_session() -> None:
        os.setsid()
        if terminal:
            fcntl.ioctl(secondary, termios.TIOCSCTTY, 0)

    environment = {"PATH": os.environ["PATH"]}
    environment |= {"PIP_BUILD_TRACKER": "/somewhere"} if pip else {}
    environment |= {"BACKGROUND": "1"} if background else {}
    script = f'shift {len(flags)}; "$@"; exit $?'  # not the last command: the shell stays
    process = subprocess.run(
        ["sh", "-c", script, "pip", *flags, sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        preexec_fn=start_session,
        text=True,
        check=False,
        timeout=60,
    )
    os.set_blocking(primary, False)
    try:
        drawn = os.read(primary, 10_000).decode()
    except BlockingIOError:
        drawn = ""
    os.close(primary)
    os.close(secondary)
    assert (process.returncode, process.stderr) == (0, "")
    return process.stdout.strip(), drawn


def test_one_line_on_the_terminal_is_drawn_over() -> None:
    printed, drawn = shown("install", "-e", ".")
    assert printed == "drawn"
    lines = drawn.replace("\r\n", "\n").split("\r")
    assert lines[0] == "\n  compiling the operators:  1 of 12 steps "
    assert lines[-1] == "  compiling the operators: 12 of 12 steps "
    assert len(lines) == 12
    assert len({len(line.strip("\n")) for line in lines}) == 1  # what is drawn over is covered


@pytest.mark.parametrize(
    "how",
    [
        {"pip": False},  # by hand, or by another installer, which draws on the terminal itself
        {"terminal": False},
        {"flags": ["-q"]},
        {"flags": ["-Uv"]},
        {"flags": ["--verbose"]},
    ],
    ids=str,
)
def test_nothing_is_drawn_where_it_is_not_seen_or_not_wanted(how: dict[str, Any]) -> None:
    own = {name: value for name, value in how.items() if name != "flags"}
    assert shown("install", *how.get("flags", ()), **own) == ("none", "")


def test_build_in_the_background_leaves_the_terminal_alone() -> None:
    assert shown(background=True) == ("drawn", "")
