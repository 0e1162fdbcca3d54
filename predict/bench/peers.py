"""What other engines reach in a case: read from files of numbers, benchmarks/ by default.

A file, or a suite of it, says which engine it is of (`engine`), what it was measured on (`device`),
and of which network (`shape`: fields of DecoderSpec), a suite or a row with which types (`work`), a
row in which case. What says less is no peer of any run here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predict.bench.cases import UNITS
from predict.errors import UserError
from predict.nn.spec import DecoderSpec
from predict.system.files import read_json_object

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"  # of a checkout
# Of a device, where the file has them: virtual machines call unlike processors the same.
IDENTITY = ("name", "family", "model", "num_threads")
METRICS = {
    "ms per token": "tpot_ms",
    "ms to the first token": "ttft_ms",
    "output tokens/s": "output_tokens_per_s",
}


@dataclass(frozen=True)
class Work:
    """What a run computes, on what: peers are of the same."""

    device: Mapping[str, Any]  # of predict.bench.record
    spec: DecoderSpec
    dtype: str
    quant_type: str  # "none": as they are
    kv_format: str
    lm_head_quant_type: str = "none"

    def is_on(self, device: Mapping[str, Any]) -> bool:
        """Whether a file's device is this one."""
        return "name" in device and all(
            device[name] == self.device.get(name) for name in IDENTITY if name in device
        )

    def is_of(self, shape: Mapping[str, Any]) -> bool:
        """Whether a file's network has these sizes."""
        return all(getattr(self.spec, name) == size for name, size in shape.items())

    def has(self, types: Mapping[str, Any]) -> bool:
        """Whether a file's weights, activations and cache are of these types."""
        names = ("dtype", "quant_type", "kv_format", "lm_head_quant_type")
        return {"lm_head_quant_type": "none", **types} == {n: getattr(self, n) for n in names}


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

    A folder's folders are read too. place: None is the checkout's own folder, which may not be
    there. Raises UserError for a file
    that cannot be read, or is none of this format.
    """
    path = FOLDER if place is None else Path(place)
    if place is not None and not path.exists():
        raise UserError(f"--peers {path} does not exist; give a JSON file, or a folder of them")
    found: dict[str, Peer] = {}
    for file in sorted(path.rglob("*.json")) if path.is_dir() else filter(Path.is_file, [path]):
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
    for suite in content["suites"].values():
        engine = suite.get("engine", content.get("engine"))
        if engine is None or not work.is_on(content["device"]):
            continue
        for row in suite["rows"]:
            shape = row.get("shape", content.get("shape"))
            types = row.get("work", suite.get("work"))
            if shape is None or types is None or not work.is_of(shape) or not work.has(types):
                continue
            cases = row.get("cases", {"value": row["case"]} if "case" in row else {})
            for column, case in cases.items():
                unit = row.get("units", {}).get(column, row.get("unit", ""))
                metric = column if column in UNITS else METRICS.get(unit)
                if metric is not None:
                    yield case, Peer(engine, metric, float(row["values"][column]))
