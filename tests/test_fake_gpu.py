"""The tests of the engine on a GPU, over a GPU of ordinary memory and plain loops (fake_gpu)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import build
from tests.fake_gpu import libraries

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folder() -> Path:
    """The libraries of the fake GPU, up to date."""
    try:
        return libraries.compile_libraries()
    except build.BuildError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    "file",
    [
        "test_engine.py",
        "test_beams.py",
        "test_traffic.py",
        "test_draft_model.py",
        "test_window.py",
        "test_quantize.py",
        "test_evaluate.py::test_the_table_of_a_gpu_is_the_cpus[caches]",
    ],
)
def test_gpu_tests_pass(folder: Path, file: str) -> None:
    environment = {**os.environ, libraries.ENVIRONMENT: str(folder), "FAKE_CUDA_LATE": "1"}
    for name in ("REGATTA_LIBRARY", "CUSTOM_DEVICE_ROOT"):
        environment.pop(name, None)
    process = subprocess.run(
        [sys.executable, "-m", "pytest", f"tests/gpu/{file}", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-8000:]
