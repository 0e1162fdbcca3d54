"""The benchmark's arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from predict.bench.report import (
    BenchmarkReport,
    Distribution,
    paddlenlp_lines,
    percentile,
    table,
    write_json,
)
from predict.errors import UserError
from predict.request import RequestMetrics, RequestOutput


def output(num_prompt: int, arrival: float, *token_times: float) -> RequestOutput:
    metrics = RequestMetrics(arrival, arrival, token_times, token_times[-1])
    return RequestOutput(0, (1,) * num_prompt, (2,) * len(token_times), "", "length", metrics)


def test_percentiles_are_linear_between_neighbours() -> None:
    values = [0.0, 10.0, 20.0, 30.0, 40.0]
    assert [percentile(values, p) for p in (0, 50, 90, 100)] == [0.0, 20.0, 36.0, 40.0]
    assert percentile([7.0], 99) == 7.0


def test_latencies_and_rates_come_from_token_times() -> None:
    outputs = [output(10, 1.0, 1.5, 1.6, 1.8), output(20, 1.0, 2.0, 2.4)]
    report = BenchmarkReport.from_outputs(outputs, 2.0, 2**30, 0.25)
    assert report.ttft_ms is not None
    assert report.ttft_ms.mean == pytest.approx(750.0)
    assert report.tpot_ms is not None
    assert report.tpot_ms.mean == pytest.approx((150.0 + 400.0) / 2)
    assert report.inter_token_latency_ms is not None
    assert report.inter_token_latency_ms.p50 == pytest.approx(200.0)
    rates = (report.input_tokens_per_s, report.output_tokens_per_s, report.total_tokens_per_s)
    assert rates == (15.0, 2.5, 17.5)
    assert report.requests_per_s == 1.0


def test_one_token_has_no_time_per_token() -> None:
    report = BenchmarkReport.from_outputs([output(4, 0.0, 1.0)], 1.0, 0, 0.0)
    assert report.tpot_ms is None
    assert report.inter_token_latency_ms is None
    assert "time per output token" in table(report)
    assert Distribution.of_seconds([]) is None


def test_the_table_and_the_json_say_the_same(tmp_path: Path) -> None:
    report = BenchmarkReport.from_outputs([output(10, 1.0, 1.5, 1.6)], 2.0, 3 * 2**30, 0.25)
    path = tmp_path / "numbers.json"
    write_json(report.as_dict(), path)
    numbers = json.loads(path.read_text())
    assert numbers["ttft_ms"] == {"mean": 500.0, "p50": 500.0, "p90": 500.0, "p99": 500.0}
    assert numbers["output_tokens_per_s"] == 1.0
    shown = table(report)
    for words in ("P99", "500.00", "output tokens/s", "3.00 GiB", "0.25 s"):
        assert words in shown
    with pytest.raises(UserError, match="cannot be written"):
        write_json({}, tmp_path / "missing" / "numbers.json")


def test_paddlenlps_lines_have_its_wording() -> None:
    report = BenchmarkReport.from_outputs([output(10, 1.0, 1.5, 1.6)] * 2, 4.0, 0, 0.0)
    assert paddlenlp_lines(report, 10, 2, 1, num_runs=2).splitlines() == [
        "Avg Elapse time is:  2.0",
        "Output tokens is:  4",
        "Input length is: 10, Output length is: 2, bs is: 1, "
        "IPS: 1.000 tokens/s, QPS: 0.500 requests/s. ",
    ]
