"""Latency and throughput of finished requests, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predict.errors import UserError
from predict.request import RequestOutput
from predict.system.outputs import write_whole


@dataclass(frozen=True)
class Distribution:
    """Mean and percentiles of a set of times, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of_seconds(cls, seconds: Iterable[float]) -> Distribution | None:
        """The distribution of times in seconds; None for none."""
        times = sorted(1000.0 * value for value in seconds)
        if not times:
            return None
        return cls(
            mean=math.fsum(times) / len(times),
            p50=percentile(times, 50),
            p90=percentile(times, 90),
            p99=percentile(times, 99),
        )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The percentile of an ascending, non-empty sequence, linear between neighbours."""
    position = (len(ordered) - 1) * percent / 100.0
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True, kw_only=True)
class BenchmarkReport:
    """What one benchmark measured. The latencies are None where no request has two tokens."""

    num_requests: int
    num_input_tokens: int
    num_output_tokens: int
    elapsed_s: float  # all timed runs together
    ttft_ms: Distribution | None  # from a request's arrival to its first token
    tpot_ms: Distribution | None  # per request: seconds per token after the first
    inter_token_latency_ms: Distribution | None  # between any two consecutive tokens
    peak_memory_bytes: int
    startup_s: float

    @classmethod
    def from_outputs(
        cls,
        outputs: Sequence[RequestOutput],
        elapsed_s: float,
        peak_memory_bytes: int,
        startup_s: float,
    ) -> BenchmarkReport:
        """The report of requests that took `elapsed_s` seconds together."""
        metrics = [output.metrics for output in outputs]
        first = [m.time_to_first_token for m in metrics]
        per_token = [m.time_per_output_token for m in metrics]
        between = [seconds for m in metrics for seconds in m.inter_token_latencies]
        return cls(
            num_requests=len(outputs),
            num_input_tokens=sum(len(output.prompt_token_ids) for output in outputs),
            num_output_tokens=sum(len(output.token_ids) for output in outputs),
            elapsed_s=elapsed_s,
            ttft_ms=Distribution.of_seconds(value for value in first if value is not None),
            tpot_ms=Distribution.of_seconds(value for value in per_token if value is not None),
            inter_token_latency_ms=Distribution.of_seconds(between),
            peak_memory_bytes=peak_memory_bytes,
            startup_s=startup_s,
        )

    @property
    def requests_per_s(self) -> float:
        """PaddleNLP's QPS."""
        return self.num_requests / self.elapsed_s

    @property
    def input_tokens_per_s(self) -> float:
        """Prompt tokens over the whole time, decoding included."""
        return self.num_input_tokens / self.elapsed_s

    @property
    def output_tokens_per_s(self) -> float:
        """PaddleNLP's IPS."""
        return self.num_output_tokens / self.elapsed_s

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt and output tokens over the whole time."""
        return self.input_tokens_per_s + self.output_tokens_per_s

    def as_dict(self) -> dict[str, Any]:
        """Fields and rates by name, ready for JSON."""
        rates = ("requests_per_s", "input_tokens_per_s", "output_tokens_per_s")
        names = (*rates, "total_tokens_per_s")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in names}


def paddlenlp_lines(
    report: BenchmarkReport, input_length: int, output_length: int, batch_size: int, num_runs: int
) -> str:
    """The lines that PaddleNLP's --benchmark ends with; its Output length counts output alone."""
    return "\n".join(
        (
            f"Avg Elapse time is:  {report.elapsed_s / num_runs}",
            f"Output tokens is:  {report.num_output_tokens}",
            f"Input length is: {input_length}, Output length is: {output_length}, "
            f"bs is: {batch_size}, IPS: {report.output_tokens_per_s:.3f} tokens/s, "
            f"QPS: {report.requests_per_s:.3f} requests/s. ",
        )
    )


def table(report: BenchmarkReport) -> str:
    """The report for a terminal."""
    rows = [f"{'latency (ms)':<24}{'mean':>10}{'P50':>10}{'P90':>10}{'P99':>10}"]
    latencies = (
        ("time to first token", report.ttft_ms),
        ("time per output token", report.tpot_ms),
        ("inter-token latency", report.inter_token_latency_ms),
    )
    for name, times in latencies:
        cells = ["-"] * 4 if times is None else [f"{t:.2f}" for t in dataclasses.astuple(times)]
        rows.append(f"{name:<24}" + "".join(f"{cell:>10}" for cell in cells))
    rates = (
        ("input tokens/s", f"{report.input_tokens_per_s:.1f}"),
        ("output tokens/s", f"{report.output_tokens_per_s:.1f}"),
        ("total tokens/s", f"{report.total_tokens_per_s:.1f}"),
        ("requests/s", f"{report.requests_per_s:.3f}"),
        ("peak memory", f"{report.peak_memory_bytes / 2**30:.2f} GiB"),
        ("start-up", f"{report.startup_s:.2f} s"),
    )
    return "\n".join([*rows, *(f"{name:<24}{value:>14}" for name, value in rates)])


def write_json(values: dict[str, Any], path: str | Path) -> None:
    """Makes the numbers the content of a file; raises UserError when it cannot be written."""
    try:
        write_whole(path, (json.dumps(values, indent=2) + "\n").encode())
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}", 1) from None
