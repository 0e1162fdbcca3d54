"""`predict.bench.kernels --device gpu`: operators on a GPU against what that GPU can do.

A case is recorded as a CUDA graph of many calls over rotating operands and timed by events around
its replays, so the host's part is not in it and kernels overlap as they do in the engine. The
limits are measured on the same GPU: one pass over 4 GiB of memory, and a large matrix product.
PyTorch's kernels, where it is installed, run in a process of their own: it and Paddle do not share
one well, nor the GPU's memory.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from predict.bench.ceilings import share_text
from predict.bench.operators import CASES, SHAPES, Case, Result, Settings, Sizes, least_seconds
from predict.bench.report import percentile
from predict.device import cuda, library
from predict.device import devices as device
from predict.device.place import place_tensor
from predict.nn.cache_formats import CacheTensor

READ_BYTES = 4 << 30
BESIDE_ENGINE = 1 << 30  # of memory to read when an engine has taken its own
# Rows and columns of the products of which the fastest is the arithmetic limit: a GPU that runs
# into its power limit does less in the larger one.
MATRICES = (4096, 8192)
PERIOD = (1 << 23) + 9  # values of the pattern; odd, so that rows of a power-of-two matrix differ
SMALL = 1 << 16  # values up to which an operand is one constant
CALLS_PER_GRAPH = 32
MIN_REPLAYS = 5
TORCH_TIMEOUT = 900  # seconds


class DeviceOperands:
    """Operands on the GPU. Large ones are random: constants would draw less power."""

    kind = "gpu"

    def __init__(self, gpu: device.Device) -> None:
        self.gpu = gpu
        self.values = np.random.default_rng(0).standard_normal(PERIOD, np.float32) / 50
        self.patterns: dict[str, Any] = {}

    def full(self, shape: Sequence[int], dtype: str, value: float = 0.01) -> Any:
        if int(np.prod(shape)) <= SMALL:
            return place_tensor(np.full(shape, value, np.float32), dtype, self.gpu.place())
        return self._filled(shape, dtype, dtype, self.values)

    def cache(self, tensor: CacheTensor) -> Any:
        if tensor.dtype == "uint8":
            codes = np.random.default_rng(0).integers(0, 0x70, PERIOD, np.uint8)
            return self._filled(tensor.shape, tensor.dtype, "codes", codes)
        if tensor.name.endswith("_scale"):
            scales = np.abs(self.values) + np.float32(1e-3)
            return self._filled(tensor.shape, tensor.dtype, "scales", scales)
        return self.full(tensor.shape, tensor.dtype)

    def _filled(self, shape: Sequence[int], dtype: str, pattern: str, values: Any) -> Any:
        """A tensor of the values again and again; pattern: their name, kept on the GPU."""
        import paddle

        if pattern not in self.patterns:
            self.patterns[pattern] = place_tensor(values, dtype, self.gpu.place())
        result = paddle.empty(list(shape), dtype)
        cuda.fill_with(result, self.patterns[pattern], cuda.current_stream(self.gpu))
        return result

    def weight(self, num_inputs: int, num_outputs: int, dtype: str) -> Any:
        return self.full([num_outputs, num_inputs], dtype)

    def int32(self, values: Any) -> Any:
        return self.limits(values)._copy_to(self.gpu.place(), True)

    def limits(self, values: Any) -> Any:
        import paddle

        return paddle.to_tensor(np.asarray(values, np.int32), place=paddle.CPUPlace())


def seconds_per_call(
    pool: cuda.GraphPool, call: Callable[[int], Any], num_copies: int, seconds: float
) -> list[float]:
    """Ascending seconds per call, of replays that take about `seconds` together."""
    count = -(-CALLS_PER_GRAPH // num_copies) * num_copies

    def calls() -> None:
        for i in range(count):
            call(i % num_copies)

    graph = pool.capture(calls)
    stream = pool.stream
    taken: list[float] = []
    graph.replay()
    deadline = time.perf_counter() + seconds
    while len(taken) < MIN_REPLAYS or time.perf_counter() < deadline:
        start, end = cuda.Event(timing=True), cuda.Event(timing=True)
        start.record(stream)
        graph.replay()
        end.record(stream)
        end.synchronize()
        taken.append(end.milliseconds_since(start) / 1e3 / count)
    graph.reset()
    return sorted(taken)


def measure_read(
    pool: cuda.GraphPool, loaded: library.Library, num_bytes: int = READ_BYTES
) -> float:
    """Bytes per second of one pass over so much memory; the best of a few."""
    import paddle

    launch = loaded.handle.regatta_launch_read
    launch.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    buffer, sink = paddle.empty([num_bytes], "uint8"), paddle.empty([4], "uint8")

    def read(_: int) -> None:
        stream = cuda.current_stream(pool.device)
        if launch(buffer.data_ptr(), num_bytes, sink.data_ptr(), stream):
            raise RuntimeError("the kernel that reads memory could not be launched")

    return num_bytes / seconds_per_call(pool, read, 8, 0.2)[0]


def measure_matmul(
    pool: cuda.GraphPool, loaded: library.Library, make: DeviceOperands, dtype: str
) -> float:
    """Operations per second of the fastest of a few large products."""
    op = loaded.op("regatta_linear")
    best = 0.0
    for size in MATRICES:
        x, weight = make.full([size, size], dtype), make.weight(size, size, dtype)

        def call(_: int, size: int = size, x: Any = x, weight: Any = weight) -> Any:
            return op(x, [weight], None, "dense", size)

        best = max(best, 2.0 * size**3 / seconds_per_call(pool, call, 4, 0.1)[0])
    return best


def measure_limits(gpu: device.Device, dtype: str) -> dict[str, float]:
    """Bytes read per second, and operations on matrices of `dtype`; what fits beside an engine."""
    loaded, pool, make = library.require(), cuda.GraphPool(gpu), DeviceOperands(gpu)
    device.release_cached(gpu)
    free = device.memory_info(gpu).free
    limits: dict[str, float] = {}
    if free >= 2 * BESIDE_ENGINE:
        limits["read_bytes_per_s"] = measure_read(pool, loaded, BESIDE_ENGINE)
        limits["flops_per_s"] = measure_matmul(pool, loaded, make, dtype)
    return limits


def torch_seconds(
    specs: Sequence[dict[str, Any]], say: Callable[[str], None]
) -> list[tuple[float, str] | None]:
    """PyTorch's seconds and kernel name for each spec; None for all, said once, without it."""
    nothing: list[tuple[float, str] | None] = [None] * len(specs)
    if importlib.util.find_spec("torch") is None:
        say("PyTorch is not installed: no kernels of others beside ours")
        return nothing
    process = subprocess.run(
        [sys.executable, "-m", "predict.bench.torch_kernels"],
        input=json.dumps(list(specs)),
        capture_output=True,
        text=True,
        check=False,
        timeout=TORCH_TIMEOUT,
        cwd=Path(__file__).resolve().parent.parent.parent,
    )
    if process.returncode != 0:
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        say(f"PyTorch could not be timed: {last}")
        return nothing
    answers = json.loads(process.stdout)
    return [None if answer is None else (answer[0], answer[1]) for answer in answers]


@dataclasses.dataclass(frozen=True)
class Timed:
    """One case's times, before the limits and the peers are known."""

    case: Case
    shape: str
    dtype: str
    num_tokens: int
    taken: list[float]


def result_of(timed: Timed, limits: dict[str, float], peer: tuple[float, str] | None) -> Result:
    """The row of the table, as predict.bench.operators has them."""
    case, median = timed.case, statistics.median(timed.taken)
    memory, compute = least_seconds(case, limits)
    return Result(
        op=case.op,
        name=case.name,
        shape=timed.shape,
        dtype=timed.dtype,
        num_tokens=timed.num_tokens,
        median_us=1e6 * median,
        p10_us=1e6 * percentile(timed.taken, 10),
        p90_us=1e6 * percentile(timed.taken, 90),
        gbs=case.num_bytes / median / 1e9,
        gflops=case.num_flops / median / 1e9,
        bound="memory" if memory >= compute else "compute",
        share=max(memory, compute) / median,
        read_gbs=limits["read_bytes_per_s"] / 1e9,
        read_spread=1.0,  # measured once
        peak_gflops=limits["flops_per_s"] / 1e9,
        baseline_us=None if peer is None else 1e6 * peer[0],
        baseline_name="" if peer is None else peer[1],
    )


HEADER = (
    f"{'operator':<21}{'tokens':>6}  {'sizes':<34}{'median us':>10}{'p10':>9}{'p90':>9}"
    f"{'TB/s':>7}{'TFLOP/s':>9}{'share':>7} of {'limit':<10}{'PyTorch us':>11}{'ratio':>7}"
)


def row(result: Result) -> str:
    """One line of the table; ratio is PyTorch's time over ours."""
    limit = f"{result.read_gbs / 1e3:.2f} TB/s"
    if result.bound == "compute":
        limit = f"{result.peak_gflops / 1e3:.0f} TF/s"
    peer = ratio = ""
    if result.baseline_us is not None:
        peer = f"{result.baseline_us:.1f}"
        ratio = f"{result.baseline_us / result.median_us:.2f}"
    return (
        f"{result.op:<21}{result.num_tokens:>6}  {result.name:<34}{result.median_us:>10.1f}"
        f"{result.p10_us:>9.1f}{result.p90_us:>9.1f}{result.gbs / 1e3:>7.2f}"
        f"{result.gflops / 1e3:>9.1f}{share_text(result.share):>7} of {limit:<10}{peer:>11}"
        f"{ratio:>7}  {result.baseline_name}".rstrip()
    )


def machine(gpu: device.Device, loaded: library.Library) -> dict[str, Any]:
    """The device and the versions that a result belongs to."""
    import paddle

    info = device.driver_info()
    return {
        "gpu": info.gpus[gpu.index].name,
        "driver_cuda": info.driver,
        "paddle_version": paddle.__version__,
        "compiler": loaded.metadata.compiler,
        "library": loaded.path.name,
    }


def run(settings: Settings, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Times every case and says the table; returns machine and rows.

    Raises UserError when the GPU cannot be used.
    """
    gpu = device.choose(settings.device)
    device.activate(gpu)
    loaded = library.require()
    pool, make = cuda.GraphPool(gpu), DeviceOperands(gpu)
    described = machine(gpu, loaded)
    say("  ".join(f"{key} {value}" for key, value in described.items()))
    read = measure_read(pool, loaded)
    rows: list[Timed] = []
    limits: dict[str, dict[str, float]] = {}
    for dtype in settings.dtypes:
        flops = measure_matmul(pool, loaded, make, dtype)
        limits[dtype] = {"read_bytes_per_s": read, "flops_per_s": flops}
        for shape in settings.shapes:
            rows += _time_shape(settings, pool, loaded, make, shape, dtype)
            device.release_cached(gpu)
    peers: list[tuple[float, str] | None] = [None] * len(rows)
    if settings.baseline:
        specs: list[dict[str, Any]] = [
            {"kind": "matmul", "size": size, "dtype": dtype, "seconds": settings.seconds}
            for dtype in settings.dtypes
            for size in MATRICES
        ]
        num_limits = len(specs)
        asked = [index for index, timed in enumerate(rows) if timed.case.peer is not None]
        for timed in (rows[index] for index in asked):
            sizes = {"num_tokens": timed.num_tokens, "dtype": timed.dtype}
            specs.append({**(timed.case.peer or {}), **sizes, "seconds": settings.seconds})
        answers = torch_seconds(specs, say)
        for spec, answer in zip(specs[:num_limits], answers, strict=False):
            if answer is not None:
                mine = limits[spec["dtype"]]
                theirs = 2.0 * spec["size"] ** 3 / answer[0]
                mine["flops_per_s"] = max(mine["flops_per_s"], theirs)
        for index, answer in zip(asked, answers[num_limits:], strict=True):
            peers[index] = answer
    results = [
        result_of(timed, limits[timed.dtype], peer) for timed, peer in zip(rows, peers, strict=True)
    ]
    for shape in settings.shapes:
        for dtype in settings.dtypes:
            say(f"\n{shape} {dtype}\n{HEADER}")
            for result in results:
                if (result.shape, result.dtype) == (shape, dtype):
                    say(row(result))
    return {"machine": described, "results": [dataclasses.asdict(result) for result in results]}


def _time_shape(
    settings: Settings,
    pool: cuda.GraphPool,
    loaded: library.Library,
    make: DeviceOperands,
    shape: str,
    dtype: str,
) -> list[Timed]:
    """Every case of one model in one dtype; operands are freed case by case."""
    rows: list[Timed] = []
    for op_name in settings.ops:
        op = loaded.op(f"regatta_{op_name}")
        for num_tokens in settings.num_tokens:
            sizes = Sizes(
                SHAPES[shape],
                num_tokens,
                settings.context_len,
                dtype,
                make,
                settings.kv_formats,
            )
            for case in CASES[op_name](sizes):
                taken = seconds_per_call(
                    pool,
                    lambda i, op=op, case=case: op(*case.copies[i]),  # type: ignore[misc]
                    len(case.copies),
                    settings.seconds,
                )
                bare = dataclasses.replace(case, copies=(), baseline=None)
                rows.append(Timed(bare, shape, dtype, num_tokens, taken))
    return rows
