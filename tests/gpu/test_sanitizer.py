"""The operators under compute-sanitizer: no access outside of a tensor, no misused barrier."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from predict.device import devices
from tests.support.gpu_sanitizer import sanitizer

TOUR = Path(__file__).parent / "op_tour.py"


def run(gpu: devices.Device, tool: str, argument: str) -> tuple[int, str]:
    """Exit status and output of the tour; 9 is the sanitizer's own status."""
    program = sanitizer()
    if program is None:
        pytest.skip("compute-sanitizer is neither on PATH nor beside nvcc")
    # What earlier tests of this process leave in its pool is not there for another's.
    gc.collect()
    devices.release_cached(gpu)
    command = [program, "--tool", tool, "--error-exitcode", "9", "--print-limit", "5"]
    # No pool below Paddle, and none in it: a tensor's end is the end of its memory.
    exact = {"REGATTA_DEVICE_POOL": "off", "FLAGS_free_idle_chunk": "1"}
    process = subprocess.run(
        [*command, sys.executable, "-W", "ignore", str(TOUR), argument],
        env={**os.environ, **exact},
        capture_output=True,
        text=True,
        check=False,
    )
    return process.returncode, process.stdout[-6000:] + process.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_operators_touch_only_their_own_memory(gpu: devices.Device, tool: str, dtype: str) -> None:
    status, output = run(gpu, tool, dtype)
    assert status == 0, output
    assert "ERROR SUMMARY: 0 errors" in output
    assert "the tour is done" in output


@pytest.mark.slow
def test_a_read_behind_a_tensors_end_is_seen(gpu: devices.Device) -> None:
    status, output = run(gpu, "memcheck", "beyond")
    assert status == 9, output
    assert "Invalid __global__ read of size 16 bytes" in output
