"""Latency and throughput of finished requests, as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from predict.errors import UserError
from predict.request import RequestOutput
from predict.system.outputs import write_whole

PARTS = ("mean", "p50", "p90", "p99")  # of the distribution of a latency
LATENCIES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "inter_token_latency_ms": "inter-token latency",
}


def distribution(seconds: Iterable[float | None]) -> dict[str, float] | None:
    """PARTS of times, in milliseconds, without those that are None; None where none is left."""
    import numpy as np  # --help answers at once without it

    times = [1000.0 * value for value in seconds if value is not None]
    if not times:
        return None
    parts = [math.fsum(times) / len(times), *np.percentile(times, (50, 90, 99)).tolist()]
    return dict(zip(PARTS, parts, strict=True))


def report_of(
    outputs: Sequence[RequestOutput], elapsed_s: float, peak_memory_bytes: int, startup_s: float
) -> dict[str, Any]:
    """The numbers of requests that took `elapsed_s` seconds together, for JSON.

    LATENCIES are distributions, None where no request has two tokens: from a request's arrival to
    its first token, per token after the first, and between two consecutive tokens.
    """
    metrics = [output.metrics for output in outputs]
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(output.token_ids) for output in outputs)
    return {
        "num_requests": len(outputs),
        "num_input_tokens": num_input,
        "num_output_tokens": num_output,
        "elapsed_s": elapsed_s,
        "ttft_ms": distribution(each.time_to_first_token for each in metrics),
        "tpot_ms": distribution(each.time_per_output_token for each in metrics),
        "inter_token_latency_ms": distribution(
            seconds for each in metrics for seconds in each.inter_token_latencies
        ),
        "peak_memory_bytes": peak_memory_bytes,
        "startup_s": startup_s,
        "requests_per_s": len(outputs) / elapsed_s,  # PaddleNLP's QPS
        "input_tokens_per_s": num_input / elapsed_s,
        "output_tokens_per_s": num_output / elapsed_s,  # PaddleNLP's IPS
        "total_tokens_per_s": (num_input + num_output) / elapsed_s,
    }


def table(report: dict[str, Any]) -> str:
    """The report for a terminal."""
    rows = [f"{'latency (ms)':<24}{'mean':>10}{'P50':>10}{'P90':>10}{'P99':>10}"]
    for key, name in LATENCIES.items():
        times = report[key]
        cells = ["-"] * 4 if times is None else [f"{times[part]:.2f}" for part in PARTS]
        rows.append(f"{name:<24}" + "".join(f"{cell:>10}" for cell in cells))
    for name in ("input tokens/s", "output tokens/s", "total tokens/s"):
        rate = report[name.replace(" ", "_").replace("/", "_per_")]
        rows.append(f"{name:<24}{rate:>14.1f}")
    rows.append(f"{'requests/s':<24}{report['requests_per_s']:>14.3f}")
    rows.append(f"{'peak memory':<24}{report['peak_memory_bytes'] / 2**30:>10.2f} GiB")
    rows.append(f"{'start-up':<24}{report['startup_s']:>12.2f} s")
    return "\n".join(rows)


def write_json(values: Mapping[str, Any], path: str | Path) -> None:
    """Makes the numbers the content of a file; raises UserError when it cannot be written."""
    write_output(path, (json.dumps(values, indent=2) + "\n").encode())


def write_output(path: str | Path, data: bytes) -> None:
    """Makes `data` the content of a file; raises UserError when it cannot be written."""
    try:
        write_whole(path, data)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}", 1) from None
