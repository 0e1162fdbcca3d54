"""The plugin in Paddle, over a CUDA runtime made of ordinary memory (fake_gpu)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Protocol

import pytest

from predict.device import devices
from tests.support.processes import run_python

START = """
import os, pathlib, sys
import numpy as np
from predict.device import devices as device
device.PLUGIN_FOLDER = pathlib.Path({folder!r})
device.built_architectures = lambda: ("90a",)
"""
PADDLE = """
gpu = device.choose("gpu:1")
device.activate(gpu)
import paddle
from predict.device import cuda
"""
# Programs of one process, in this order: the first counts the memory that is in use.
PROGRAMS = {
    "out of memory is explained and cached memory found again": """
kept = paddle.empty([100 << 20], "uint8")
try:
    with device.explained_out_of_memory(gpu, "lower --batch_size"):
        paddle.empty([200 << 20], "uint8")
    raise SystemExit("allocated")
except ValueError as error:
    assert str(error) == (
        "GPU 1 (fake GPU) is out of memory: 200.00 MiB were asked for (209715200 bytes), "
        "156.00 MiB of 256.00 MiB are free, and this process holds 100.00 MiB, of which "
        "100.00 MiB are in use; lower --batch_size"), error
pieces = [paddle.empty([12 << 20], "uint8") for _ in range(12)]
del pieces
paddle.empty([150 << 20], "uint8")
assert device.memory_info(gpu).in_use == 250 << 20
del kept
device.release_cached(gpu)
info = device.memory_info(gpu)
assert (info.held, info.in_use, info.free) == (0, 0, 256 << 20), info
""",
    "tensors copies and fallback kernels": """
x = np.arange(12, dtype="float32").reshape(3, 4)
tensor = paddle.to_tensor(x)
assert str(tensor.place) == "Place(nvgpu:1)", tensor.place
assert ((tensor + 1).numpy() == x + 1).all()
there = tensor._copy_to(paddle.CustomPlace("nvgpu", 0), True)
assert str(there.place) == "Place(nvgpu:0)" and (there.numpy() == x).all()
""",
    "graphs record in memory of their own": """
source, target = cuda.pinned([1000], "float32"), paddle.zeros([1000])
pool = cuda.GraphPool(gpu)
def function():
    scratch = paddle.empty([1000])
    cuda.copy_to_device(scratch, source, cuda.current_stream(gpu))
    cuda.copy_front_to_host(source, scratch, cuda.current_stream(gpu))
    cuda.copy_to_device(target, source, cuda.current_stream(gpu))
    return target, scratch.data_ptr()
graph = pool.capture(function)
assert graph.num_nodes == 3
others = [paddle.full([1000], 7.0) for _ in range(20)]
assert graph.outputs[1] not in [tensor.data_ptr() for tensor in others]
source[:] = 5
graph.replay()
assert (graph.outputs[0].numpy() == 5).all()
assert all((tensor.numpy() == 7).all() for tensor in others)
""",
    "clones never leave the device": """
x = paddle.to_tensor(np.arange(12, dtype="float32").reshape(3, 4))
graph = cuda.GraphPool(gpu).capture(lambda: (x.clone(), x[:, 1:3].clone(), x[3:].clone()))
assert graph.num_nodes == 3, graph.num_nodes  # a copy, a view made contiguous, its copy
cuda.copy_to_device(x, np.full([3, 4], 5, "float32"), cuda.current_stream(gpu))
graph.replay()
whole, view, empty = graph.outputs
assert (whole.numpy() == 5).all() and (view.numpy() == 5).all() and empty.shape == [0, 4]
""",
    "fallback to the cpu cannot be captured": """
pool = cuda.GraphPool(gpu)
x = paddle.ones([8])
saved = os.dup(2)
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the plugin names the operation there
try:
    pool.capture(lambda: x + 1)
    raise SystemExit("captured")
except Exception:
    pass
os.dup2(saved, 2)
assert "a copy during a capture" in device.device_library().regatta_device_error().decode()
assert pool.capture(lambda: None).num_nodes == 0
""",
}

EACH = """
import json, traceback
ends = {{}}
for name, program in {programs!r}.items():
    try:
        exec(compile(program, name, "exec"), {{**globals()}})
        ends[name] = ""
    except BaseException:
        ends[name] = traceback.format_exc()
print(json.dumps(ends))
"""


class Run(Protocol):
    def __call__(self, program: str, **environment: str) -> None: ...


def run_on_fake_gpu(
    fake_gpu: Path, program: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A process that has the plugin, linked to runtime.cc in the CUDA runtime's place."""
    start = START.format(folder=str(fake_gpu / devices.PLUGIN_FOLDER.name))
    environment = {"PATH": "/usr/bin:/bin", **environment}
    return run_python("-W", "ignore", "-c", start + program, env=environment)


@pytest.fixture
def run(fake_gpu: Path) -> Run:
    """Runs a program in a fresh process; it must end with status 0 and say nothing on stderr."""

    def run(program: str, **environment: str) -> None:
        process = run_on_fake_gpu(fake_gpu, program, **environment)
        assert (process.returncode, process.stderr) == (0, "")

    return run


def test_no_driver_means_no_devices_and_a_working_cpu(run: Run) -> None:
    run(
        """
try:
    device.choose("gpu")
    raise SystemExit("chosen")
except ValueError as error:
    assert "no NVIDIA driver was found" in str(error), error
os.environ["CUSTOM_DEVICE_ROOT"] = str(device.PLUGIN_FOLDER)
os.environ["GLOG_minloglevel"] = "1"
import paddle
assert paddle.device.get_available_custom_device() == []
assert (paddle.ones([2]) + 1).tolist() == [2, 2]
""",
        FAKE_CUDA_DEVICES="0",
    )


@pytest.fixture(scope="module")
def ends(fake_gpu: Path) -> dict[str, str]:
    """How each of PROGRAMS ended in one process, by its name: "" where all was as it says."""
    process = run_on_fake_gpu(fake_gpu, PADDLE + EACH.format(programs=PROGRAMS))
    assert (process.returncode, process.stderr) == (0, "")
    found: dict[str, str] = json.loads(process.stdout)
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_paddle_on_the_plugin(name: str, ends: dict[str, str]) -> None:
    assert not ends[name]


def test_paddle_imported_too_early_is_said(run: Run) -> None:
    run(
        """
import paddle
try:
    device.activate(device.choose("gpu"))
    raise SystemExit("activated")
except ValueError as error:
    assert "imported without the GPU plugin" in str(error), error
"""
    )


def test_another_plugin_folder_is_refused(run: Run) -> None:
    run(
        """
try:
    device.activate(device.choose("gpu"))
    raise SystemExit("activated")
except ValueError as error:
    assert "CUSTOM_DEVICE_ROOT=/elsewhere is set" in str(error), error
""",
        CUSTOM_DEVICE_ROOT="/elsewhere",
    )
