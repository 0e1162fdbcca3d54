"""What other engines reach in a case: read from files of numbers, benchmarks/peers/ by default.

A file says what it was measured on (`device.name`, and `shape`: fields of DecoderSpec), a suite or
a row with which types (`work`), a row in which case. What says less is no peer of any run here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predict.errors import UserError
from predict.nn.spec import DecoderSpec
from predict.system.files import read_json_object

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"  # of a checkout
METRICS = {
    "ms per token": "tpot_ms",
    "ms to the first token": "ttft_ms",
    "output tokens/s": "output_tokens_per_s",
}


@dataclass(frozen=True)
class Work:
    """What a run computes, on what: peers are of the same."""

    device: str  # as its driver calls it
    spec: DecoderSpec
    dtype: str
    quant_type: str  # "none": as they are
    kv_format: str


@dataclass(frozen=True)
class Peer:
    """What another engine reaches in a case; metric: a key of predict.bench.cases.UNITS."""

    engine: str
    metric: str
    value: float

    def times_as_good(self, ours: float) -> float:
        """Above 1 where ours is better: rates are better when more, times when less."""
        return ours / self.value if self.metric.endswith("_per_s") else self.value / ours

    def beside(self, values: Mapping[str, float | None]) -> dict[str, Any] | None:
        """The peer's part of a row with our `values`; None where ours lacks its metric."""
        ours = values.get(self.metric)
        if ours is None:
            return None
        return {
            "engine": self.engine,
            "metric": self.metric,
            "value": self.value,
            "times_as_good": self.times_as_good(ours),
        }


def read_peers(place: str | Path | None, work: Work) -> dict[str, Peer]:
    """By case, the peers of a run in a file, or in all files of a folder.

    place: None is the checkout's own folder, which may not be there. Raises UserError for a file
    that cannot be read, or is none of this format.
    """
    path = FOLDER if place is None else Path(place)
    if place is not None and not path.exists():
        raise UserError(f"--peers {path} does not exist; give a JSON file, or a folder of them")
    found: dict[str, Peer] = {}
    for file in sorted(path.glob("*.json")) if path.is_dir() else filter(Path.is_file, [path]):
        try:
            for case, peer in _of_file(read_json_object(file), work):
                found.setdefault(case, peer)
        except (AttributeError, KeyError, TypeError, ZeroDivisionError) as error:
            raise UserError(
                f"{file} is no file of peers ({type(error).__name__}: {error}); "
                "benchmarks/README.md says what one holds"
            ) from None
    return found


def _of_file(content: dict[str, Any], work: Work) -> Iterator[tuple[str, Peer]]:
    shape = content.get("shape")
    if shape is None or content["device"]["name"] != work.device:
        return
    if any(getattr(work.spec, name) != size for name, size in shape.items()):
        return
    for suite in content["suites"].values():
        for row in suite["rows"]:
            types = row.get("work", suite.get("work", {}))
            mine = {"dtype": work.dtype, "quant_type": work.quant_type, "kv_format": work.kv_format}
            if types != mine:
                continue
            cases = row.get("cases", {"value": row["case"]} if "case" in row else {})
            for column, case in cases.items():
                metric = METRICS.get(row.get("units", {}).get(column, row.get("unit", "")))
                if metric is not None:
                    yield case, Peer(content["engine"], metric, float(row["values"][column]))
