"""The arithmetic of --benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from predict.bench.report import PARTS, distribution, report_of, table, write_json
from predict.errors import UserError
from predict.request import RequestMetrics, RequestOutput


def output(num_prompt: int, arrival: float, *token_times: float) -> RequestOutput:
    metrics = RequestMetrics(arrival, arrival, token_times, token_times[-1])
    return RequestOutput(0, (1,) * num_prompt, (2,) * len(token_times), "", "length", metrics)


def test_percentiles_are_linear_between_neighbours() -> None:
    found = distribution([0.04, 0.0, 0.03, 0.01, 0.02])
    assert found == pytest.approx({"mean": 20.0, "p50": 20.0, "p90": 36.0, "p99": 39.6})
    assert distribution([0.007]) == dict.fromkeys(PARTS, 7.0)


def test_latencies_and_rates_come_from_token_times() -> None:
    outputs = [output(10, 1.0, 1.5, 1.6, 1.8), output(20, 1.0, 2.0, 2.4)]
    report = report_of(outputs, 2.0, 3 * 2**30, 0.25)
    assert report["ttft_ms"]["mean"] == pytest.approx(750.0)
    assert report["tpot_ms"]["mean"] == pytest.approx((150.0 + 400.0) / 2)
    assert report["inter_token_latency_ms"]["p50"] == pytest.approx(200.0)
    rates = [report[f"{each}_tokens_per_s"] for each in ("input", "output", "total")]
    assert (rates, report["requests_per_s"]) == ([15.0, 2.5, 17.5], 1.0)
    shown = table(report)
    for words in ("P99", "750.00", "output tokens/s", "17.5", "1.000", "3.00 GiB", "0.25 s"):
        assert words in shown


def test_one_token_has_no_time_per_token() -> None:
    report = report_of([output(4, 0.0, 1.0)], 1.0, 0, 0.0)
    assert report["tpot_ms"] is None
    assert report["ttft_ms"] == dict.fromkeys(PARTS, 1000.0)
    assert " ".join(table(report).splitlines()[2].split()) == "time per output token - - - -"
    assert distribution([]) is None


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        write_json({}, tmp_path / "missing" / "numbers.json")
