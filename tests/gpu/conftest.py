"""The GPU and the test operators; everything here is skipped, with the reason, without a GPU.

Paddle looks for the plugin when it is imported, so the environment is set here, at collection.
REGATTA_FAKE_GPU names a folder of libraries that need no GPU (tests/fake_gpu).
"""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import build
from predict.device import devices, library
from predict.errors import UserError
from tests.fake_gpu import chosen, libraries

OPS = Path(__file__).parent / "ops"
MOST_KEPT = 1 << 30  # bytes that a process keeps between tests; others share the GPU

FAKE = chosen.folder()
if FAKE is not None:
    chosen.select(FAKE)
try:
    CHOSEN = devices.choose("gpu")
    devices.set_environment(CHOSEN)
    GPU: devices.Device | None = CHOSEN
    REASON = ""
except UserError as error:
    GPU, REASON = None, str(error)

Op = Callable[..., Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.gpu)
            if GPU is None:
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture
def gpu() -> Iterator[devices.Device]:
    """The first GPU, as the default device; a test's large memory goes back to the driver."""
    assert GPU is not None
    devices.activate(GPU)
    yield GPU
    give_back(GPU)
    library.import_paddle().set_device("cpu")


def give_back(gpu: devices.Device) -> None:
    """Gives memory that no tensor uses back to the driver where this process holds much."""
    if devices.memory_info(gpu).held > MOST_KEPT:
        devices.release_cached(gpu)
    if devices.memory_info(gpu).held > MOST_KEPT:  # engines are cycles
        gc.collect()
        devices.release_cached(gpu)


@pytest.fixture(autouse=True)
def graphs_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are short: the second step of a shape is recorded, if the first one was not."""
    monkeypatch.setattr("predict.engine.runner.graphs.OFTEN_MET", 2)
    monkeypatch.setattr("predict.engine.runner.graphs.OFTEN_MET_OF_MANY", 2)


@pytest.fixture(scope="session")
def test_ops() -> Path:
    """The library of tests/gpu/ops, compiled unless build/test_ops has a newer one."""
    if FAKE is not None:
        return FAKE / libraries.TEST_OPS_NAME
    return compile_ops(build.BUILD_DIR.parent / "test_ops")


def compile_ops(folder: Path) -> Path:
    target = folder / "libtest_ops.so"
    headers = [build.CSRC / "paddle" / "device.h", build.CSRC / "paddle" / "common.h"]
    newest = max(path.stat().st_mtime for path in [*OPS.iterdir(), *headers])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers of this run want the same
        if not target.is_file() or target.stat().st_mtime < newest:
            made = folder / "made.so"
            _compile_ops(folder / "axpb.o", made)
            made.replace(target)
    return target


def _compile_ops(kernel: Path, target: Path) -> None:
    toolkit, paddle = build.find_cuda_toolkit(), build.find_paddle()
    arch = build.present_architectures() or ("90a",)
    target_flags = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in arch]
    subprocess.run(
        [toolkit.nvcc, *build.CUDA_FLAGS, *target_flags, "-c", str(OPS / "axpb.cu"), "-o", kernel],
        check=True,
    )
    includes = [build.CSRC, build.CSRC / "include", build.CSRC / "paddle"]
    system = [paddle.root / "include", paddle.root / "include" / "third_party", toolkit.include]
    place = "-DPADDLE_WITH_CUDA" if paddle.has_cuda else "-DPADDLE_WITH_CUSTOM_DEVICE"
    subprocess.run(
        [build.find_compiler(), *build.CXX_FLAGS, "-O1", "-DREGATTA_WITH_CUDA", place]
        + [f"-I{path}" for path in includes]
        + [flag for path in system for flag in ("-isystem", str(path))]
        + [str(OPS / "registration.cc"), str(kernel), *build.LINK_FLAGS]
        + [f"-L{paddle.root / name}" for name in ("base", "libs")]
        + [f"-Wl,-rpath-link,{paddle.root / 'libs'}"]
        + [f"-l:{name}" for name in build.PADDLE_LIBRARIES]
        + [f"-L{toolkit.libraries}", *build.CUDA_LIBRARIES, "-o", str(target)],
        check=True,
    )


@pytest.fixture(scope="session")
def cuda_library() -> library.Library:
    """The loaded operator library: that of REGATTA_LIBRARY, with the CUDA operators."""
    return library.require()


@pytest.fixture
def axpb(gpu: devices.Device, test_ops: Path) -> Op:
    """a * x + b of a float32 tensor, one kernel; axpb(x, a, b)."""
    return _op(test_ops, "regatta_test_axpb")


@pytest.fixture
def scale_into(gpu: devices.Device, test_ops: Path) -> Op:
    """Writes a * x into cache, in place; scale_into(cache, x, a)."""
    return _op(test_ops, "regatta_test_scale_into")


def _op(path: Path, name: str) -> Op:
    from paddle.base import core

    from paddle import _C_ops

    if not hasattr(_op, "loaded"):  # Paddle aborts when operators are registered twice
        core.load_op_meta_info_and_register_op(str(path))
        _op.loaded = True  # type: ignore[attr-defined]
    return lambda *arguments: _C_ops._run_custom_op(name, *arguments)[0]
