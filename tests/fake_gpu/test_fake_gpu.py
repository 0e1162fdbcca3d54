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
from tests.support.paths import ROOT

# Tests of the engine whose engines are moved to the GPU.
MOVED = (
    "tests/test_adapters.py",
    "tests/test_async_llm.py",
    "tests/engine/test_samples.py",
    "tests/speculative/test_speculative.py",
    "tests/text/test_stop_strings.py",
)
LONGEST = ("tests/gpu/test_engine.py", "tests/gpu/test_experts.py", "tests/gpu/test_isolation.py")
# The runs of pytest, by name: importing Paddle takes longer than many a file. The last two take as
# long as the first.
COMMANDS = {
    "tests of the GPU": ("tests/gpu", *(f"--ignore={path}" for path in LONGEST)),
    "longest tests of the GPU": LONGEST,
    "tests of the engine": ("-p", "tests.fake_gpu.everywhere", *MOVED),
}
Result = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def results(fake_gpu: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Result]]]:
    """Those of the selected runs, as many side by side as there are cores."""
    environment = {
        name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(build.CSRC)])
    # Late: queued work runs when somebody waits for it.
    environment |= {libraries.ENVIRONMENT: str(fake_gpu), "FAKE_CUDA_LATE": "1"}

    cores = sorted(os.sched_getaffinity(0))
    free = iter(cores)

    # One core each: threads that wait for one another on cores that others use take twice the
    # time. Processes inherit it from their thread, which runs nothing else.
    def take_core() -> None:
        os.sched_setaffinity(0, {next(free)})

    def run(words: tuple[str, ...]) -> Result:
        return subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
                *("-p", "tests.fake_gpu.fitting", *words),
            ],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    selected = [item.name for item in request.session.items if item.path == request.path]
    with ThreadPoolExecutor(min(len(cores), len(COMMANDS)), initializer=take_core) as executor:
        yield {
            name: executor.submit(run, words)
            for name, words in COMMANDS.items()
            if f"test_passes_on_the_fake_gpu[{name}]" in selected
        }


@pytest.mark.parametrize("name", COMMANDS)
def test_passes_on_the_fake_gpu(results: dict[str, Future[Result]], name: str) -> None:
    process = results[name].result()
    assert process.returncode == 0, process.stdout[-8000:]
