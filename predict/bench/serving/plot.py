"""Latency against load, as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from predict.bench.outputs import save_figure
from predict.bench.report import Distribution
from predict.bench.serving.report import LATENCIES, Limits, LoadReport

TITLES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_ms": "between two pieces",
    "e2e_ms": "whole answer",
}
LIMITS = {"ttft_ms": "ttft", "tpot_ms": "tpot", "e2e_ms": "e2e"}
PERCENTILES = ("p50", "p90", "p99")


def write_plot(
    path: str | Path, reports: Sequence[LoadReport], unit: str, limits: Limits, title: str
) -> None:
    """Draws the latencies of all loads into a PNG, a panel each, and the limits as lines.

    unit: of the loads. Raises UserError when the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    reports = sorted(reports, key=lambda report: report.load)
    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for number, name in enumerate(LATENCIES, 1):
        axes = figure.add_subplot(2, 2, number)
        axes.set_title(TITLES[name])
        axes.set_xlabel(unit)
        axes.set_ylabel("ms")
        for percentile in PERCENTILES:
            loads, times = points(reports, name, percentile)
            axes.plot(loads, times, marker="o", label=percentile.upper())
        limit = getattr(limits, LIMITS[name]) if name in LIMITS else None
        if limit is not None:
            axes.axhline(limit, color="gray", linestyle="--", label="limit")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    save_figure(figure, path)


def points(
    reports: Sequence[LoadReport], name: str, percentile: str
) -> tuple[list[float], list[float]]:
    """(loads, times in ms) of one line: of each load the median of its runs.

    A load without such a latency has no point.
    """
    found: dict[float, list[float]] = {}
    for report in reports:
        times: Distribution | None = getattr(report, name)
        if times is not None:
            found.setdefault(report.load, []).append(getattr(times, percentile))
    return list(found), [statistics.median(each) for each in found.values()]
