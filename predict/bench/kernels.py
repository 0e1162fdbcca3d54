"""Speed of single operators against what the machine can do: `python -m predict.bench.kernels`.

Each case of predict.bench.operators is called over and over, on operands that rotate.
The share is (time that the machine's measured limits allow) / (median time), where the limits are
the bandwidth of reading as many bytes as the copies have, and the arithmetic peak, measured between
the slices of every case; ">limit" where a case was faster. With --device gpu (see
predict.bench.gpu_kernels) they are measured once, and PyTorch's kernels beside ours.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from predict.system.interpreter import check_interpreter

if __name__ == "__main__":
    check_interpreter()

import numpy as np

from predict.bench.ceilings import READ_BYTES, Limits, share_text
from predict.bench.operators import (
    CASES,
    DTYPES,
    SHAPES,
    Case,
    Result,
    Settings,
    Sizes,
    least_seconds,
    packed_shape,
)
from predict.bench.record import cpu_identity
from predict.bench.report import percentile, write_json
from predict.cli.command import run_command
from predict.cli.flags import Flag, parse_flags
from predict.device.library import Library, import_paddle, require
from predict.errors import one_of
from predict.nn.cache_formats import KV_FORMATS, CacheTensor
from predict.system.outputs import check_output
from predict.system.signals import Signals

PROG = "python -m predict.bench.kernels"
GROUP = "Operator benchmark"
FLAGS = (
    Flag(GROUP, "ops", "str", None, "Operators, separated by commas; when not given, all."),
    Flag(GROUP, "dtype", "str", "bfloat16", "Dtypes, separated by commas."),
    Flag(GROUP, "device", "str", "cpu", "cpu, gpu or gpu:N."),
    Flag(
        GROUP,
        "shapes",
        "str",
        None,
        "Models, separated by commas; when not given, those that are usual on the device.",
    ),
    Flag(
        GROUP,
        "num_tokens",
        "ints",
        None,
        "Tokens per call, separated by commas; when not "
        "given, 1, 8, 512 on a CPU and 1, 8, 32, 128, 1024, 8192 on a GPU.",
    ),
    Flag(GROUP, "context_len", "int", 1024, "Tokens in the cache of each decoded sequence."),
    Flag(
        GROUP,
        "kv_format",
        "str",
        "dense",
        f"Formats of the cache that attention reads, separated by commas: {', '.join(KV_FORMATS)}.",
    ),
    Flag(GROUP, "seconds", "float", 0.3, "Time spent on each case."),
    Flag(
        GROUP,
        "baseline",
        "bool",
        True,
        "Also time the nearest thing that Paddle has, or on a GPU PyTorch where it is installed.",
    ),
    Flag(GROUP, "output_file", "str", None, "Write the results as JSON."),
)
DEFAULT_SHAPES = {"cpu": ("qwen2.5-0.5b", "llama-1b"), "gpu": ("llama-8b",)}
DEFAULT_TOKENS = {"cpu": (1, 8, 512), "gpu": (1, 8, 32, 128, 1024, 8192)}
MIN_CALLS = 5
SLICES = 3  # of a case's time, each with the limits measured before and after it


class HostOperands:
    """Operands in the CPU's memory."""

    kind = "cpu"

    def full(self, shape: Sequence[int], dtype: str, value: float = 0.01) -> Any:
        import paddle

        return paddle.full(list(shape), value, dtype)

    def cache(self, tensor: CacheTensor) -> Any:
        return self.full(tensor.shape, tensor.dtype, 0x35 if tensor.dtype == "uint8" else 0.01)

    def weight(self, num_inputs: int, num_outputs: int, dtype: str) -> Any:
        return self.full(packed_shape(num_inputs, num_outputs, dtype), dtype)

    def int32(self, values: Any) -> Any:
        import paddle

        return paddle.to_tensor(np.asarray(values, np.int32))

    limits = int32


def times(
    call: Callable[[int], Any],
    num_copies: int,
    seconds: float,
    first: int = 0,
    min_calls: int = MIN_CALLS,
) -> list[float]:
    """Ascending seconds per call over rotating copies, for about `seconds` after a warm-up.

    first: the call that it begins with, of all that rotate; others are the warm-up.
    """
    for i in range(min(num_copies, 3)):
        call((first - 1 - i) % num_copies)
    taken: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(taken) < min_calls or time.perf_counter() < deadline:
        index = (first + len(taken)) % num_copies
        start = time.perf_counter()
        call(index)
        taken.append(time.perf_counter() - start)
    return sorted(taken)


def run_case(
    library: Library, case: Case, sizes: Sizes, shape: str, settings: Settings, buffer: Any
) -> Result:
    """Times one case in a few slices, each between two measurements of the machine's limits."""
    op = library.op(f"regatta_{case.op}")
    count = len(case.copies)
    limits = Limits(sizes.dtype, case.num_bytes * count, buffer)
    limits.sample()
    taken: list[float] = []
    shares: list[float] = []
    for _ in range(SLICES):
        seconds = settings.seconds / SLICES
        part = times(lambda i: op(*case.copies[i]), count, seconds, len(taken), MIN_CALLS // 2)
        limits.sample()
        shares.append(max(least_seconds(case, limits.beside)) / statistics.median(part))
        taken += part
    taken.sort()
    baseline = None
    if settings.baseline and case.baseline is not None:
        others = times(case.baseline, len(case.copies), settings.seconds / 3)
        baseline = 1e6 * statistics.median(others)
    median = statistics.median(taken)
    memory_seconds, compute_seconds = least_seconds(case, limits.mean)
    return Result(
        op=case.op,
        name=case.name,
        shape=shape,
        dtype=sizes.dtype,
        num_tokens=sizes.num_tokens,
        median_us=1e6 * median,
        p10_us=1e6 * percentile(taken, 10),
        p90_us=1e6 * percentile(taken, 90),
        gbs=case.num_bytes / median / 1e9,
        gflops=case.num_flops / median / 1e9,
        bound="memory" if memory_seconds >= compute_seconds else "compute",
        share=statistics.median(shares),
        read_gbs=limits.mean["read_bytes_per_s"] / 1e9,
        read_spread=limits.spread,
        peak_gflops=limits.mean["flops_per_s"] / 1e9,
        baseline_us=baseline,
        baseline_name=case.baseline_name,
    )


HEADER = (
    f"{'operator':<21}{'tokens':>6}  {'sizes':<29}{'median us':>10}{'p10':>9}{'p90':>9}"
    f"{'GB/s':>7}{'GFLOP/s':>9}{'share':>7} of {'limit':<9}{'baseline us':>12}"
)


def row(result: Result) -> str:
    """One line of the table."""
    limit = f"{result.read_gbs:.0f} GB/s" if result.bound == "memory" else ""
    limit = limit or f"{result.peak_gflops:.0f} GF/s"
    baseline = "" if result.baseline_us is None else f"{result.baseline_us:.1f}"
    return (
        f"{result.op:<21}{result.num_tokens:>6}  {result.name:<29}{result.median_us:>10.1f}"
        f"{result.p10_us:>9.1f}{result.p90_us:>9.1f}{result.gbs:>7.1f}{result.gflops:>9.1f}"
        f"{share_text(result.share):>7} of {limit:<9}{baseline:>12}"
        f"  {result.baseline_name}".rstrip()
    )


def parse(argv: Sequence[str]) -> Settings:
    """The settings; raises UserError for names that are not known."""
    flags = parse_flags(argv, FLAGS, PROG, __doc__ or "")

    kind = flags["device"].partition(":")[0]
    if kind not in DEFAULT_SHAPES:
        raise one_of("--device", flags["device"], ("cpu", "gpu", "gpu:N"))

    def names(
        flag: str, allowed: Sequence[str], default: Sequence[str] | None = None
    ) -> tuple[str, ...]:
        if flags[flag] is None:
            return tuple(default or allowed)
        chosen = tuple(name.strip() for name in flags[flag].split(",") if name.strip())
        for name in chosen:
            if name not in allowed:
                raise one_of(f"--{flag}", name, allowed)
        return chosen

    if flags["output_file"] is not None:
        check_output("output_file", flags["output_file"])
    num_tokens = tuple(flags["num_tokens"] or DEFAULT_TOKENS[kind])
    return Settings(
        device=flags["device"],
        ops=names("ops", tuple(CASES)),
        dtypes=names("dtype", tuple(DTYPES)),
        shapes=names("shapes", tuple(SHAPES), DEFAULT_SHAPES[kind]),
        num_tokens=num_tokens,
        context_len=flags["context_len"],
        kv_formats=names("kv_format", KV_FORMATS),
        seconds=flags["seconds"],
        baseline=flags["baseline"],
        output_file=flags["output_file"],
    )


def machine(library: Library) -> dict[str, Any]:
    """The device and the versions that a result belongs to."""
    import paddle

    info = library.info()
    return {
        "cpu": cpu_identity()["name"],
        "num_threads": info.get("threads"),
        "features": info.get("features"),
        "paddle_version": paddle.__version__,
        "python_version": platform.python_version(),
        "compiler": library.metadata.compiler,
        "library": str(library.path.name),
    }


def run(settings: Settings, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Runs every case, saying each row as it is done; returns machine and rows."""
    from paddle.base import core

    library = require()
    library.keep_freed_memory()  # as the engine does
    described = machine(library)
    core.set_num_threads(described["num_threads"])  # of the baselines; Paddle starts with one
    say("  ".join(f"{key} {value}" for key, value in described.items() if key != "features"))
    buffer = np.ones(READ_BYTES // 4, np.float32)
    results: list[Result] = []
    for shape in settings.shapes:
        for dtype in settings.dtypes:
            say(f"\n{shape} {dtype}\n{HEADER}")
            for op in settings.ops:
                if f"regatta_{op}" not in library.operators:
                    say(f"{op:<21} is not in {library.path.name}")
                    continue
                for num_tokens in settings.num_tokens:
                    sizes = Sizes(
                        SHAPES[shape],
                        num_tokens,
                        settings.context_len,
                        dtype,
                        HostOperands(),
                        settings.kv_formats,
                    )
                    for case in CASES[op](sizes):
                        results.append(run_case(library, case, sizes, shape, settings, buffer))
                        say(row(results[-1]))
    return {"machine": described, "results": [asdict(result) for result in results]}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""

    def action(signals: Signals) -> int:
        settings = parse(sys.argv[1:] if argv is None else argv)
        if settings.device == "cpu":
            import_paddle()
            report = run(settings)
        else:
            from predict.bench.gpu_kernels import run as run_on_gpu

            report = run_on_gpu(settings)
        if settings.output_file is not None:
            write_json(report, settings.output_file)
        return 0

    return run_command(action)


if __name__ == "__main__":
    sys.exit(main())
