"""What this machine can do at best: bytes read per second and multiply-adds per second.

On shared or virtual machines both move while a benchmark runs: `Limits` takes them again and again
beside what is held against them. What fits the caches is read from there, faster than memory
allows: the limit is that of reading as many bytes over and over.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.device import cuda, devices, library
from predict.device.place import place_tensor

READ_BYTES = 256 << 20  # beyond any cache
LEAST_BYTES = 4 << 20  # of a pass: less would measure how threads start
PIECE_BYTES = 16 << 20  # half a millisecond or so
REPEATS, LEAST_PASSES = 3, 24
GPU_READ_BYTES = 1 << 30  # what fits beside an engine
# Rows and columns of the products of which the fastest is a GPU's arithmetic limit: one that runs
# into its power limit does less in the larger one.
GPU_MATRICES = (4096, 8192)
MOST_SHARE = 1.03  # what two measurements of one thing differ by


def measure_ceilings(dtype: str, buffer: npt.NDArray[np.float32]) -> dict[str, float]:
    """`read_bytes_per_s` of all threads together, and `flops_per_s` of `dtype`'s best instruction.

    The best of many short passes over `buffer`, some 50 ms. bfloat16 counts tiles, else vdpbf16ps
    or float32 multiply-adds, whichever does more; every other case float32 multiply-adds.
    """
    handle = library.require().handle
    read, flops = handle.regatta_measure_read, handle.regatta_measure_flops
    read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_double
    flops.argtypes, flops.restype = [ctypes.c_int], ctypes.c_double
    passes = _passes(buffer.ctypes.data, buffer.nbytes)

    def best_flops() -> float:
        return float(max(flops(each) for each in ((0, 1) if dtype == "bfloat16" else (0,))))

    return {
        "read_bytes_per_s": max(read(*each) for each in passes),
        "flops_per_s": max(best_flops() for _ in range(REPEATS)),
    }


CACHED_BYTES = 16 << 10  # of each thread, which its first cache keeps


def measure_tiles(buffer: npt.NDArray[np.float32]) -> dict[str, float]:
    """FLOP/s of AMX's tiles in bfloat16 by where one factor comes from; {} where none run."""
    handle = library.require().handle
    flops, tiles = handle.regatta_measure_flops, handle.regatta_measure_tiles
    flops.argtypes, flops.restype = [ctypes.c_int], ctypes.c_double
    tiles.argtypes, tiles.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_double
    address, threads = buffer.ctypes.data, int(library.require().info()["threads"])
    if tiles(address, CACHED_BYTES * threads) == 0.0:
        return {}

    def best(measure: Callable[..., Any], *arguments: int) -> float:
        return float(max(measure(*arguments) for _ in range(REPEATS)))

    return {
        "registers": best(flops, 1),
        "first cache": best(tiles, address, CACHED_BYTES * threads),
        "memory": best(tiles, address, buffer.nbytes),
    }


def _passes(address: int, size: int) -> list[tuple[int, int]]:
    """(address, bytes) of what is read one after another, round and round.

    In short pieces: a neighbour that takes the core in the middle of a pass would be measured too.
    """
    piece = min(size, PIECE_BYTES)
    pieces = [(address + at, piece) for at in range(0, size - piece + 1, piece)]
    return pieces * max(REPEATS, LEAST_PASSES // len(pieces))


class Limits:
    """Samples of this machine's limits, beside work that reads `working_bytes` over and over."""

    def __init__(
        self,
        dtype: str,
        working_bytes: float,
        buffer: npt.NDArray[np.float32] | None = None,
        measure: Callable[[str, npt.NDArray[np.float32]], dict[str, float]] = measure_ceilings,
    ) -> None:
        """`buffer`: READ_BYTES of memory, made when not given. measure: of a dtype and a buffer."""
        if buffer is None:
            buffer = np.ones(READ_BYTES // 4, np.float32)
        size = int(min(max(working_bytes, LEAST_BYTES), buffer.nbytes))
        self._buffer = buffer[: size // 4]
        self._dtype = dtype
        self._measure = measure
        self.samples: list[dict[str, float]] = []

    def sample(self) -> None:
        """Measures once more, some 50 ms."""
        self.samples.append(self._measure(self._dtype, self._buffer))

    @property
    def mean(self) -> dict[str, float]:
        return self._of(self.samples)

    @property
    def beside(self) -> dict[str, float]:
        """Of the last two samples, between which the work was that is held against them."""
        return self._of(self.samples[-2:])

    def _of(self, samples: Sequence[dict[str, float]]) -> dict[str, float]:
        read = [sample["read_bytes_per_s"] for sample in samples]
        # Memory is shared and its speed moves; that of arithmetic only seems to, where a neighbour
        # took the core in the middle of a measurement.
        flops = max(sample["flops_per_s"] for sample in self.samples)
        return {"read_bytes_per_s": sum(read) / len(read), "flops_per_s": flops}

    @property
    def spread(self) -> float:
        """The highest bandwidth that was measured over the lowest: how far the limit moved."""
        read = [sample["read_bytes_per_s"] for sample in self.samples]
        return max(read) / min(read)


def share_text(share: float, digits: int = 0) -> str:
    """A share of a limit; more than the whole is no share, and is not shown as one.

    It says that the limit moved, or that it was not what bounds the work.
    """
    return ">limit" if share > MOST_SHARE else f"{share:.{digits}%}"


def measure_gpu_ceilings(gpu: devices.Device, dtype: str) -> dict[str, float]:
    """The same of a GPU: one pass over memory, and a large product; {} without room for them.

    Each is a CUDA graph of many calls, timed by events around its replays.
    """
    import paddle

    devices.release_cached(gpu)
    if devices.memory_info(gpu).free < 2 * GPU_READ_BYTES:
        return {}
    loaded, pool = library.require(), cuda.GraphPool(gpu)
    launch = loaded.handle.regatta_launch_read
    launch.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    buffer, sink = paddle.empty([GPU_READ_BYTES], "uint8"), paddle.empty([4], "uint8")

    def read() -> None:
        stream = cuda.current_stream(gpu)
        if launch(buffer.data_ptr(), GPU_READ_BYTES, sink.data_ptr(), stream):
            raise RuntimeError("the kernel that reads memory could not be launched")

    linear = loaded.op("regatta_linear")
    rng = np.random.default_rng(0)
    # Random values: constants draw less power. An odd number of them, so that rows differ.
    values = rng.standard_normal((1 << 23) + 9, np.float32) / 50
    pattern = place_tensor(values, dtype, gpu.place())
    flops = 0.0
    for size in GPU_MATRICES:
        x, weight = paddle.empty([size, size], dtype), paddle.empty([size, size], dtype)
        for matrix in (x, weight):
            cuda.fill_with(matrix, pattern, cuda.current_stream(gpu))

        def multiply(size: int = size, x: Any = x, weight: Any = weight) -> None:
            linear(x, [weight], None, "dense", size)

        flops = max(flops, 2.0 * size**3 / _seconds_of_calls(pool, multiply, 0.1))
    return {
        "read_bytes_per_s": GPU_READ_BYTES / _seconds_of_calls(pool, read, 0.2),
        "flops_per_s": flops,
    }


def _seconds_of_calls(pool: cuda.GraphPool, call: Callable[[], None], seconds: float) -> float:
    """Seconds of a call in the fastest of the replays that take about `seconds` together."""
    count = 32

    def calls() -> None:
        for _ in range(count):
            call()

    graph = pool.capture(calls)
    graph.replay()
    taken: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(taken) < 5 or time.perf_counter() < deadline:
        start, end = cuda.Event(timing=True), cuda.Event(timing=True)
        start.record(pool.stream)
        graph.replay()
        end.record(pool.stream)
        end.synchronize()
        taken.append(end.milliseconds_since(start) / 1e3 / count)
    graph.reset()
    return min(taken)
