"""Speed of single operators against what the CPU can do: `python -m predict.bench.kernels`.

Each case of predict.bench.operators is called over and over, on operands that rotate.
The share is (time that the machine's measured limits allow) / (median time), where the limits are
the bandwidth of reading as many bytes as the copies have, and the arithmetic peak, measured between
the slices of every case; ">limit" where a case was faster. Kernels of GPUs are timed by the
programs of tests/gpu/native.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from predict.system.interpreter import check_interpreter

if __name__ == "__main__":
    check_interpreter()

import numpy as np

from predict.bench.ceilings import READ_BYTES, Limits, share_text
from predict.bench.operators import CASES, DTYPES, SHAPES, Case, Sizes
from predict.bench.record import cpu_identity
from predict.bench.report import percentile, write_json
from predict.cli.command import run_command
from predict.cli.flags import Flag, parse_flags
from predict.device.library import Library, import_paddle, require
from predict.errors import one_of
from predict.nn.cache_formats import KV_FORMATS
from predict.system.outputs import check_output
from predict.system.signals import Signals

PROG = "python -m predict.bench.kernels"
GROUP = "Operator benchmark"
FLAGS = (
    Flag(GROUP, "ops", "str", None, "Operators, separated by commas; when not given, all."),
    Flag(GROUP, "dtype", "str", "bfloat16", "Dtypes, separated by commas."),
    Flag(
        GROUP,
        "shapes",
        "str",
        "qwen2.5-0.5b,llama-1b",
        f"Models, separated by commas: {', '.join(SHAPES)}.",
    ),
    Flag(
        GROUP,
        "num_tokens",
        "ints",
        None,
        "Tokens per call, separated by commas; when not given, 1, 8, 512.",
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
    Flag(GROUP, "baseline", "bool", True, "Also time the nearest thing that Paddle has."),
    Flag(GROUP, "output_file", "str", None, "Write the results as JSON."),
)
MIN_CALLS = 5
SLICES = 3  # of a case's time, each with the limits measured before and after it


@dataclass(frozen=True)
class Settings:
    """What the command line asks for."""

    ops: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[str, ...]
    num_tokens: tuple[int, ...]
    context_len: int
    kv_formats: tuple[str, ...]
    seconds: float
    baseline: bool
    output_file: str | None


def least_seconds(case: Case, limits: dict[str, float]) -> tuple[float, float]:
    """Seconds that the limits of memory and of arithmetic allow."""
    return case.num_bytes / limits["read_bytes_per_s"], case.num_flops / limits["flops_per_s"]


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
) -> dict[str, Any]:
    """Times one case in a few slices, each between two measurements of the machine's limits.

    Returns a row: share is that of the limit in the median, each slice against the limits beside
    it; read_spread is the highest measured bandwidth over the lowest.
    """
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
    return {
        "op": case.op,
        "name": case.name,
        "shape": shape,
        "dtype": sizes.dtype,
        "num_tokens": sizes.num_tokens,
        "median_us": 1e6 * median,
        "p10_us": 1e6 * percentile(taken, 10),
        "p90_us": 1e6 * percentile(taken, 90),
        "gbs": case.num_bytes / median / 1e9,
        "gflops": case.num_flops / median / 1e9,
        "bound": "memory" if memory_seconds >= compute_seconds else "compute",
        "share": statistics.median(shares),
        "read_gbs": limits.mean["read_bytes_per_s"] / 1e9,
        "read_spread": limits.spread,
        "peak_gflops": limits.mean["flops_per_s"] / 1e9,
        "baseline_us": baseline,
        "baseline_name": case.baseline_name,
    }


HEADER = (
    f"{'operator':<21}{'tokens':>6}  {'sizes':<29}{'median us':>10}{'p10':>9}{'p90':>9}"
    f"{'GB/s':>7}{'GFLOP/s':>9}{'share':>7} of {'limit':<9}{'baseline us':>12}"
)


def row(result: Mapping[str, Any]) -> str:
    """One line of the table."""
    limit = f"{result['peak_gflops']:.0f} GF/s"
    if result["bound"] == "memory":
        limit = f"{result['read_gbs']:.0f} GB/s"
    baseline = "" if result["baseline_us"] is None else f"{result['baseline_us']:.1f}"
    return (
        f"{result['op']:<21}{result['num_tokens']:>6}  {result['name']:<29}"
        f"{result['median_us']:>10.1f}{result['p10_us']:>9.1f}{result['p90_us']:>9.1f}"
        f"{result['gbs']:>7.1f}{result['gflops']:>9.1f}{share_text(result['share']):>7} of "
        f"{limit:<9}{baseline:>12}  {result['baseline_name']}".rstrip()
    )


def parse(argv: Sequence[str]) -> Settings:
    """The settings; raises UserError for names that are not known."""
    flags = parse_flags(argv, FLAGS, PROG, __doc__ or "")

    def names(flag: str, allowed: Sequence[str]) -> tuple[str, ...]:
        if flags[flag] is None:
            return tuple(allowed)
        chosen = tuple(name.strip() for name in flags[flag].split(",") if name.strip())
        for name in chosen:
            if name not in allowed:
                raise one_of(f"--{flag}", name, allowed)
        return chosen

    if flags["output_file"] is not None:
        check_output("output_file", flags["output_file"])
    return Settings(
        ops=names("ops", tuple(CASES)),
        dtypes=names("dtype", tuple(DTYPES)),
        shapes=names("shapes", tuple(SHAPES)),
        num_tokens=tuple(flags["num_tokens"] or (1, 8, 512)),
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
    results: list[dict[str, Any]] = []
    for shape in settings.shapes:
        for dtype in settings.dtypes:
            say(f"\n{shape} {dtype}\n{HEADER}")
            for op in settings.ops:
                if f"regatta_{op}" not in library.operators:
                    say(f"{op:<21} is not in {library.path.name}")
                    continue
                for num_tokens in settings.num_tokens:
                    sizes = Sizes(
                        SHAPES[shape], num_tokens, settings.context_len, dtype, settings.kv_formats
                    )
                    for case in CASES[op](sizes):
                        results.append(run_case(library, case, sizes, shape, settings, buffer))
                        say(row(results[-1]))
    return {"machine": described, "results": results}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""

    def action(signals: Signals) -> int:
        settings = parse(sys.argv[1:] if argv is None else argv)
        import_paddle()
        report = run(settings)
        if settings.output_file is not None:
            write_json(report, settings.output_file)
        return 0

    return run_command(action)


if __name__ == "__main__":
    sys.exit(main())
