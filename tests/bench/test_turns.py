"""Two sides that take turns, as a developer runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from predict.bench import random_adapters
from predict.device import library
from tests.support.paths import ROOT

MODEL = "examples/demo_model"


def turns(tmp_path: Path, *more: str) -> dict[str, Any]:
    written = tmp_path / "turns.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "turns.py"), "--model", MODEL]
    command += ["--quant_types", "none", "--turns", "6", "--output_file", str(written), *more]
    process = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert process.returncode == 0, process.stdout + process.stderr
    found: dict[str, Any] = json.loads(written.read_text())
    assert str(tmp_path) not in json.dumps(found)
    return found


def test_a_build_beside_itself_makes_the_same_tokens(
    tmp_path: Path, compiled: library.Library
) -> None:
    found = turns(tmp_path, "--before", str(ROOT), "--cases", "1x16x5,2x32x1")
    rows = found["suites"]["builds"]["rows"]
    assert [row["name"] for row in rows] == ["demo_model, none, 1x16x5", "demo_model, none, 2x32x1"]
    for row in rows:
        assert row["same_tokens"]
        assert len(row["samples"]["before_ms"]) == len(row["samples"]["after_ms"]) == 6
        assert min(row["samples"]["before_ms"]) > 0
        low, high = row["interval"]
        assert low <= row["values"]["ratio"] <= high


def test_requests_with_adapters_beside_those_without(
    tmp_path: Path, compiled: library.Library, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "adapters"
    words = ["--model_name_or_path", str(ROOT / MODEL), "--output_dir", str(folder)]
    assert random_adapters.main([*words, "--num_adapters", "2"]) == 0
    found = turns(tmp_path, "--adapters", str(folder), "--cases", "2x16x9")
    (row,) = found["suites"]["adapters"]["rows"]
    assert not row["same_tokens"]  # random adapters change the greedy choice
    assert found["settings"]["adapters"] == 2


def test_one_of_two_comparisons_is_asked_for(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "turns.py"), "--model", MODEL]
    command += ["--before", str(tmp_path), "--quant_types", "none", "--turns", "6"]
    command += ["--adapters", str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert "one of --before and --adapters is needed" in process.stderr
