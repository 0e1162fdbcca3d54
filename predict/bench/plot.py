"""Rows of predict.bench.record as a picture: a panel per metric, a bar per case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from predict.bench.cases import UNITS, number_text
from predict.bench.ceilings import share_text
from predict.bench.record import Row

TITLES = {
    "ttft_ms": "time to first token, ms",
    "tpot_ms": "time per output token, ms",
    "input_tokens_per_s": "input tokens/s",
    "output_tokens_per_s": "output tokens/s",
}


def bars(rows: Sequence[Row], metric: str) -> list[tuple[str, float, float, float]]:
    """(case, value, below, above) of the rows with the metric; to the least and most sample."""
    found = []
    for row in rows:
        value = row["values"].get(metric)
        if value is not None:
            samples = row.get("samples", {}).get(metric, [value])
            below, above = value - min(samples), max(samples) - value
            found.append((row["name"], value, max(below, 0.0), max(above, 0.0)))
    return found


def draw(made: Mapping[str, Any]) -> Any:
    """A figure of matplotlib's: ours as bars with all samples' range, peers as lines."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = made["suites"]["throughput"]["rows"]
    figure = Figure(figsize=(11, 2.5 + 0.7 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    settings, device = made.get("settings", {}), made["device"]["name"]
    words = [settings.get(name) for name in ("model", "dtype", "quant_type")]
    said = [word for word in words if word not in (None, "none")]
    figure.suptitle(", ".join([device, *said]), fontsize=10)
    by_name = {row["name"]: row for row in rows}
    for number, metric in enumerate(UNITS, 1):
        axes = figure.add_subplot(2, 2, number)
        axes.set_title(TITLES[metric], fontsize=10)
        found = bars(rows, metric)
        if not found:
            axes.text(0.5, 0.5, "no case has it", ha="center")
            axes.set_axis_off()
            continue
        names, values, below, above = (list(column) for column in zip(*found, strict=True))
        drawn = axes.barh(names, values, xerr=[below, above], color="#00796b", ecolor="#444444")
        axes.bar_label(drawn, [_label(by_name[n], metric, v) for n, v, *_ in found], padding=4)
        for place, name in enumerate(names):
            peer = by_name[name].get("peer", {})
            if peer.get("metric") == metric:
                axes.plot([peer["value"]] * 2, [place - 0.45, place + 0.45], color="#d84315")
                label = axes.annotate(peer["engine"], (peer["value"], place + 0.4), fontsize=7)
                label.set_bbox({"facecolor": "white", "edgecolor": "#d84315", "pad": 1.5})
        axes.invert_yaxis()
        axes.margins(x=0.5)  # room for the labels
    return figure


def _label(row: Row, metric: str, value: float) -> str:
    share = row["values"].get("share_of_limit")
    beside = metric == "output_tokens_per_s" and share is not None
    return number_text(metric, value) + (f" ({share_text(share)} of limit)" if beside else "")
