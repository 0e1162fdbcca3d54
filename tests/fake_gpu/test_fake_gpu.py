"""The tests of tests/gpu, over a GPU of ordinary memory and plain loops (fake_gpu)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import build
from tests.fake_gpu import libraries

ROOT = Path(__file__).resolve().parents[2]
# What of a file needs real kernels or memory, starts processes without the fake, or takes long.
LEFT_OUT = {
    "test_batch_invariant.py": "ways or large or products",
    "test_beams.py": "copied_blocks or log_softmax or likeliest_tokens",
    "test_device.py": "out_of_memory or process_ends or another_streams_event",
    "test_evaluate.py": "weights",
    "test_kv_formats.py": "attention or long_contexts or rows_are_quantized or logits_are_near",
    "test_memory.py": "share_that_is_asked_for",
    "test_speculative.py": "fifty",
}
WHOLLY_LEFT_OUT = (
    "test_kernels.py",
    "test_ops.py",
    "test_paddle_graphs.py",
    "test_sanitizer.py",
)
# Tests of the engine whose engines are moved to the GPU, but for these: they stand in for its
# forward pass, or are about what GPUs refuse.
MOVED = {
    "test_async_llm.py": "cannot_be_drawn",
    "engine/test_guides.py": "takes_no_step or plain_operators",
    "engine/test_samples.py": "",
    "speculative/test_speculative.py": "draft_model or False",
    "text/test_stop_strings.py": "",
}


def commands() -> dict[str, list[str]]:
    """The runs of pytest, by name."""
    names = {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    made = {}
    for name in sorted(names - {*WHOLLY_LEFT_OUT}):
        made[f"gpu/{name}"] = [f"tests/gpu/{name}", *_without(LEFT_OUT.get(name, ""))]
    for name, left_out in MOVED.items():
        made[name] = ["-p", "tests.fake_gpu.everywhere", f"tests/{name}", *_without(left_out)]
    return made


def _without(tests: str) -> list[str]:
    return ["-k", f"not ({tests})"] if tests else []


COMMANDS = commands()
Result = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Result]]]:
    """Those of the selected runs, as many at once as there are cores."""
    try:
        folder = libraries.compile_libraries()
    except build.BuildError as error:
        pytest.skip(str(error))
    environment = {
        name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(build.CSRC)])
    # Late: queued work runs when somebody waits for it.
    environment |= {libraries.ENVIRONMENT: str(folder), "FAKE_CUDA_LATE": "1"}

    def run(words: list[str]) -> Result:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    selected = [item.name for item in request.session.items if item.path == request.path]
    with ThreadPoolExecutor(build.num_jobs()) as executor:
        yield {
            name: executor.submit(run, words)
            for name, words in COMMANDS.items()
            if f"test_passes_on_the_fake_gpu[{name}]" in selected
        }


@pytest.mark.parametrize("name", COMMANDS)
def test_passes_on_the_fake_gpu(results: dict[str, Future[Result]], name: str) -> None:
    process = results[name].result()
    assert process.returncode == 0, process.stdout[-8000:]
