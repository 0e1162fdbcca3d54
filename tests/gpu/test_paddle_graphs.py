"""Paddle's own CUDAGraph class works on the plugin, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from predict.device import devices

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/csrc"]
from predict.device import devices as device
gpu = device.choose("gpu")
device.activate(gpu)
import paddle
from paddle.base import core
from paddle import _C_ops
from paddle.device.cuda.graphs import CUDAGraph
core.load_op_meta_info_and_register_op({ops!r})
x = paddle.ones([8])
def step():
    y = x
    for _ in range(5):
        y = _C_ops._run_custom_op("regatta_test_axpb", y, 1.0, 1.0)[0]
    return y
step()
graph = CUDAGraph(place=gpu.place(), mode={mode!r})
graph.capture_begin()
y = step()
graph.capture_end()
x.set_value(x * 10)
graph.replay()
assert (y.numpy() == 15).all(), y
graph.reset()
"""


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_capture_in_each_mode(gpu: devices.Device, test_ops: Path, mode: str) -> None:
    program = PROGRAM.format(root=str(ROOT), ops=str(test_ops), mode=mode)
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
