"""The page about serving: its first lines work as they stand."""

from __future__ import annotations

import shlex
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from tests.support.pages import blocks
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "serving.md"


def test_the_page_begins_with_three_lines() -> None:
    install, serve, ask = blocks(PAGE)[0].body.splitlines()
    assert install == 'pip install -e ".[server]"'
    assert serve.startswith("regatta serve ")
    assert ask.startswith("curl http://127.0.0.1:8000/v1/completions ")


@pytest.mark.slow
def test_its_first_lines_work() -> None:
    _, serve, ask = blocks(PAGE)[0].body.splitlines()
    with socket.socket() as sock:
        if sock.connect_ex(("127.0.0.1", 8000)) == 0:
            pytest.skip("something listens on the port that the page names")
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    words = [sys.executable, "-m", *shlex.split(serve)]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any("ready: " in line for line in process.stderr)
        said = subprocess.run(shlex.split(ask), capture_output=True, text=True, check=True)
        assert "return b" in said.stdout
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 0
