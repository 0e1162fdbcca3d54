"""The tests of tests/gpu, over a GPU of ordinary memory and plain loops (fake_gpu)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import build
from tests.fake_gpu import libraries

ROOT = Path(__file__).resolve().parents[1]
# What of a file needs real kernels or memory, starts processes without the fake, or takes long.
LEFT_OUT = {
    "test_beams.py": "copied_blocks or log_softmax or likeliest_tokens",
    "test_device.py": "out_of_memory or process_ends or another_streams_event",
    "test_kv_formats.py": "attention or long_contexts or rows_are_quantized or logits_are_near",
    "test_memory.py": "share_that_is_asked_for",
}
WHOLLY_LEFT_OUT = ("test_ops.py", "test_paddle_graphs.py", "test_sanitizer.py", "test_schemes.py")
FILES = sorted({path.name for path in (ROOT / "tests/gpu").glob("test_*.py")} - {*WHOLLY_LEFT_OUT})


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Of a process with the fake GPU, whose work runs as late as it may."""
    try:
        folder = libraries.compile_libraries()
    except build.BuildError as error:
        pytest.skip(str(error))
    own = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    paths = os.pathsep.join([str(ROOT), str(build.CSRC)])
    fake = {libraries.ENVIRONMENT: str(folder), "FAKE_CUDA_LATE": "1"}
    return {**own, **fake, "PYTHONPATH": paths}


def run_pytest(environment: dict[str, str], *words: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-8000:]


@pytest.mark.parametrize("file", FILES)
def test_gpu_tests_pass(environment: dict[str, str], file: str) -> None:
    words = ["-k", f"not ({LEFT_OUT[file]})"] if file in LEFT_OUT else []
    run_pytest(environment, f"tests/gpu/{file}", *words)


# Beside messages that name the CPU, and what only plain operators are for.
EVERYWHERE = {
    "test_async_llm.py": "cannot_be_drawn",
    "test_samples.py": "",
    "test_stop_strings.py": "",
    "test_speculative.py": "draft_model or False",
}


@pytest.mark.parametrize("file", EVERYWHERE)
def test_engine_tests_of_the_cpu_pass_too(environment: dict[str, str], file: str) -> None:
    words = ["-k", f"not ({EVERYWHERE[file]})"] if EVERYWHERE[file] else []
    run_pytest(environment, "-p", "tests.fake_gpu.everywhere", f"tests/{file}", *words)
