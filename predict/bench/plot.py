"""A benchmark's file as a picture: a panel per number or latency, a point per case or load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predict.bench.cases import UNITS

TITLES = {
    "ttft_ms": "time to first token, ms",
    "tpot_ms": "time per output token, ms",
    "itl_ms": "between two pieces, ms",
    "e2e_ms": "whole answer, ms",
    "input_tokens_per_s": "input tokens/s",
    "output_tokens_per_s": "output tokens/s",
}
PERCENTILES = ("p50", "p90", "p99")


def panels(name: str) -> dict[str, dict[str, str]]:
    """Of a suite's picture: metric or latency -> label of a line -> column of its values."""
    if name != "serving":
        return {metric: {"": metric} for metric in UNITS}
    latencies = ("ttft", "tpot", "itl", "e2e")
    return {f"{each}_ms": {p.upper(): f"{each}_{p}_ms" for p in PERCENTILES} for each in latencies}


def draw(made: Mapping[str, Any]) -> Any:
    """A figure of matplotlib's: medians, from the least repetition to the most; limits as lines."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    name = "serving" if "serving" in made["suites"] else "throughput"
    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    settings = made.get("settings", {})
    words = (made["device"]["name"], *(settings.get(k) for k in ("model", "dtype", "quant_type")))
    figure.suptitle(", ".join(word for word in words if word not in (None, "none")), fontsize=10)
    for number, (metric, lines) in enumerate(panels(name).items(), 1):
        axes = figure.add_subplot(2, 2, number)
        axes.set_title(TITLES[metric], fontsize=10)
        for label, column in lines.items():
            rows = [row for row in made["suites"][name]["rows"] if column in row["values"]]
            rows = [row for row in rows if row["values"][column] is not None]
            values = [row["values"][column] for row in rows]
            spread = [row.get("spread", {}).get(column, {}) for row in rows]
            below = [max(v - s.get("min", v), 0.0) for v, s in zip(values, spread, strict=True)]
            above = [max(s.get("max", v) - v, 0.0) for v, s in zip(values, spread, strict=True)]
            names = [row["name"] for row in rows]
            axes.errorbar(names, values, [below, above], marker="o", capsize=3, label=label)
        limit = made.get("limits_ms", {}).get(metric.removesuffix("_ms"))
        if limit is not None:
            axes.axhline(limit, color="gray", linestyle="--", label="limit")
        axes.set_ylim(bottom=0)
        axes.tick_params("x", rotation=20)
        axes.grid(alpha=0.3)
        if name == "serving":
            axes.legend()
    return figure
