"""Speed of single operators against what the CPU can do: `python -m predict.bench.kernels`.

Each case of predict.bench.operators is called over and over, on operands that rotate.
The share is (time that the machine's measured limits allow) / (median time), where the limits are
the bandwidth of reading as many bytes as the copies have, and the arithmetic peak, measured between
the slices of every case; ">limit" where a case was faster. Where AMX's tiles run, their rates stand
above: of factors in registers, and of one that comes from the first cache or from memory. Kernels
of GPUs are timed by the programs of tests/gpu/native.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from predict.system.interpreter import check_interpreter

if __name__ == "__main__":
    check_interpreter()

import numpy as np

from predict.bench.ceilings import READ_BYTES, Limits, measure_tiles, share_text
from predict.bench.operators import CASES, DTYPES, SHAPES, OperatorCase, Sizes
from predict.bench.outputs import Outputs
from predict.bench.record import (
    RecordRow,
    command_line,
    cpu_device,
    own_versions,
    record,
    repeated_row,
    suite,
)
from predict.cli.command import command
from predict.cli.flags import Flag, FlagValues, parse_flags
from predict.device.library import Library, import_paddle, require
from predict.nn.cache_formats import KV_FORMATS
from predict.system.console import show
from predict.system.signals import Signals

PROG = "python -m predict.bench.kernels"
GROUP = "Operator benchmark"
# fmt: off
FLAGS = (
    Flag(GROUP, "ops", "strs", list(CASES), "Operators.", choices=tuple(CASES)),
    Flag(GROUP, "dtype", "strs", ["bfloat16"], "Dtypes.", choices=tuple(DTYPES)),
    Flag(GROUP, "shapes", "strs", ["qwen2.5-0.5b", "llama-1b"], "Models.", choices=tuple(SHAPES)),
    Flag(GROUP, "num_tokens", "ints", None, "Tokens per call; when not given, 1, 8, 512."),
    Flag(GROUP, "context_len", "int", 1024, "Tokens in the cache of each decoded sequence."),
    Flag(GROUP, "kv_format", "strs", ["dense"], "Formats of the cache that attention reads.",
         choices=tuple(KV_FORMATS)),
    Flag(GROUP, "seconds", "float", 0.3, "Time spent on each case."),
    Flag(GROUP, "output_file", "str", None, "Write device, versions and all numbers as JSON."),
)
# fmt: on
MIN_CALLS = 2  # of a slice
SLICES = 3  # of a case's time, each with the limits measured before and after it
UNITS = {"time_us": "us", "limit_share": "share of the limit", "gbs": "GB/s", "gflops": "GFLOP/s"}
METHOD = (
    "Calls over rotating copies of the operands. Share: time that the limits measured beside a "
    "slice allow, over its median."
)


def least_seconds(case: OperatorCase, limits: dict[str, float]) -> tuple[float, float]:
    """Seconds that the limits of memory and of arithmetic allow."""
    return case.num_bytes / limits["read_bytes_per_s"], case.num_flops / limits["flops_per_s"]


def times(call: Callable[[int], Any], num_copies: int, seconds: float, first: int) -> list[float]:
    """Seconds of each call over rotating copies, for about `seconds` after a warm-up.

    first: the call that it begins with, of all that rotate; others are the warm-up.
    """
    for i in range(min(num_copies, 3)):
        call((first - 1 - i) % num_copies)
    taken: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(taken) < MIN_CALLS or time.perf_counter() < deadline:
        index = (first + len(taken)) % num_copies
        start = time.perf_counter()
        call(index)
        taken.append(time.perf_counter() - start)
    return taken


def run_case(
    library: Library, case: OperatorCase, sizes: Sizes, seconds: float, buffer: Any
) -> RecordRow:
    """Times one case in a few slices, each between two measurements of the machine's limits.

    read_spread is the highest measured bandwidth over the lowest.
    """
    op = library.op(f"regatta_{case.op}")
    count = len(case.copies)
    limits = Limits(sizes.dtype, case.num_bytes * count, buffer)
    limits.sample()
    taken: list[float] = []
    shares: list[float] = []
    for _ in range(SLICES):
        part = times(lambda i: op(*case.copies[i]), count, seconds / SLICES, len(taken))
        limits.sample()
        shares.append(max(least_seconds(case, limits.beside)) / statistics.median(part))
        taken += part
    name = f"{case.op}, {case.name}, {sizes.num_tokens} tokens"
    row = repeated_row(name, {"time_us": [1e6 * each for each in taken]})
    memory_seconds, compute_seconds = least_seconds(case, limits.mean)
    median = statistics.median(taken)
    row["limit"] = "bandwidth" if memory_seconds >= compute_seconds else "products"
    row["values"] |= {
        "limit_share": statistics.median(shares),
        "gbs": case.num_bytes / median / 1e9,
        "gflops": case.num_flops / median / 1e9,
        "measured_bandwidth_gbs": limits.mean["read_bytes_per_s"] / 1e9,
        "measured_bandwidth_spread": limits.spread,
        "measured_gflops_ceiling": limits.mean["flops_per_s"] / 1e9,
    }
    return row


HEADER = (
    f"{'operator, sizes':<62}{'median us':>10}{'q1':>9}{'q3':>9}{'GB/s':>7}{'GFLOP/s':>9}"
    f"{'share':>7} of limit"
)


def line_of(row: Mapping[str, Any]) -> str:
    """One line of the table."""
    values, spread = row["values"], row["spread"]["time_us"]
    limit = f"{values['measured_gflops_ceiling']:.0f} GF/s"
    if row["limit"] == "bandwidth":
        limit = f"{values['measured_bandwidth_gbs']:.0f} GB/s"
    return (
        f"{row['name']:<62}{values['time_us']:>10.1f}{spread['q1']:>9.1f}{spread['q3']:>9.1f}"
        f"{values['gbs']:>7.1f}{values['gflops']:>9.1f}{share_text(values['limit_share']):>7} of "
        f"{limit}"
    )


def parse(argv: Sequence[str]) -> FlagValues:
    """The flags; raises UserError for names that are not known."""
    flags = parse_flags(argv, FLAGS, PROG, __doc__ or "")
    Outputs(flags["output_file"]).check()
    return flags


def run(flags: FlagValues, command: str) -> dict[str, Any]:
    """Runs every case, showing each row as it is done; returns what the file holds.

    command: the line that asked for it.
    """
    library = require()
    library.keep_freed_memory()  # as the engine does
    buffer = np.ones(READ_BYTES // 4, np.float32)
    tiles = {place: rate / 1e9 for place, rate in measure_tiles(buffer).items()}
    if tiles:
        show("tiles, bfloat16, GFLOP/s: " + ", ".join(f"{of}: {x:,.0f}" for of, x in tiles.items()))
    rows: list[RecordRow] = []
    for shape in flags["shapes"]:
        for dtype in flags["dtype"]:
            show(f"\n{shape} {dtype}\n{HEADER}")
            for op in flags["ops"]:
                for num_tokens in flags["num_tokens"] or (1, 8, 512):
                    given = num_tokens, flags["context_len"], dtype, tuple(flags["kv_format"])
                    sizes = Sizes(SHAPES[shape], *given)
                    for case in CASES[op](sizes):
                        row = run_case(library, case, sizes, flags["seconds"], buffer)
                        show(line_of(row))
                        rows.append({**row, "name": f"{shape} {dtype}, {row['name']}"})
    settings = {name: value for name, value in flags.values.items() if name != "output_file"}
    suites = {"operators": suite(rows, UNITS, command, METHOD)}
    device = cpu_device() | ({"tiles_gflops": tiles} if tiles else {})
    return record(device, own_versions(), settings, suites)


@command()
def main(words: Sequence[str], signals: Signals) -> int:
    """The command line; returns the exit code."""
    flags = parse(words)
    import_paddle()
    Outputs(flags["output_file"]).write(run(flags, command_line(PROG, words)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
