"""What this machine can do at best: bytes read per second and multiply-adds per second.

On shared or virtual machines both move while a benchmark runs: measure right beside it.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from predict import library

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

READ_BYTES = 256 << 20  # beyond any cache
REPEATS = 3


def measure_ceilings(dtype: str, buffer: npt.NDArray[np.float32] | None = None) -> dict[str, float]:
    """`read_bytes_per_s` of all threads together, and `flops_per_s` of `dtype`'s best instruction.

    The best of a few passes, some 50 ms. `buffer`: memory to read, several times the caches' size;
    made for the call when not given. bfloat16 counts vdpbf16ps where the CPU has it, every other
    case float32 multiply-adds. Without a compiled library: what Paddle itself reaches.
    """
    if buffer is None:
        buffer = np.ones(READ_BYTES // 4, np.float32)
    if library.find() is None:
        return _paddle_ceilings(buffer)
    handle = library.require().handle
    read, flops = handle.regatta_measure_read, handle.regatta_measure_flops
    read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_double
    flops.argtypes, flops.restype = [ctypes.c_int], ctypes.c_double
    address, size = buffer.ctypes.data, buffer.nbytes

    def best_flops() -> float:
        pairs = flops(1) if dtype == "bfloat16" else 0.0
        return float(pairs or flops(0))

    return {
        "read_bytes_per_s": max(read(address, size) for _ in range(REPEATS)),
        "flops_per_s": max(best_flops() for _ in range(REPEATS)),
    }


def _paddle_ceilings(buffer: npt.NDArray[np.float32]) -> dict[str, float]:
    import paddle

    width = 1024
    square = paddle.ones([width, width])
    vector = paddle.to_tensor(buffer)
    return {
        "read_bytes_per_s": buffer.nbytes / _best_seconds(lambda: paddle.max(vector)),
        "flops_per_s": 2 * width**3 / _best_seconds(lambda: paddle.matmul(square, square)),
    }


def _best_seconds(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
