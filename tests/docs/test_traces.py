"""The ways that docs/trace_*.py print stay as short as they are."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("script", "max_hops", "max_files"), [("trace_path", 7, 7), ("trace_chat", 7, 24)]
)
def test_a_way_has_few_hops_and_files(script: str, max_hops: int, max_files: int) -> None:
    command = [sys.executable, f"docs/{script}.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()[-1].replace(",", "").split()
    counts = [int(word) for word in words if word.isdigit()]
    assert len(counts) == 2, done.stdout
    assert counts[0] <= max_hops, done.stdout
    assert counts[1] <= max_files, done.stdout
