"""What requests of one load took, and which of them held the limits."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from predict.bench.report import Distribution
from predict.errors import UserError, nearest, quoted

LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """The times of one request, in seconds of one clock."""

    due_s: float  # when it should have been sent: latencies count from here
    sent_s: float
    chunk_s: tuple[float, ...]  # of each piece of the answer that held something
    end_s: float
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None  # a kind, the same for all requests that failed alike

    @property
    def ttft_s(self) -> float | None:
        """Until the first piece; None for an answer without any."""
        return self.chunk_s[0] - self.due_s if self.chunk_s else None

    @property
    def tpot_s(self) -> float | None:
        """Per token behind the first; None for less than two tokens."""
        if self.num_output_tokens < 2 or not self.chunk_s:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between pieces. A server that sends several tokens at once has fewer of them."""
        return [late - early for early, late in pairwise(self.chunk_s)]

    @property
    def e2e_s(self) -> float:
        """Until the end of the answer."""
        return self.end_s - self.due_s


@dataclass(frozen=True)
class Limits:
    """What a request may take to be a good one, in milliseconds; None: as long as it likes."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, words: Sequence[str]) -> Limits:
        """Of texts such as ttft:500. Raises UserError."""
        known = [field.name for field in dataclasses.fields(cls)]
        found: dict[str, float] = {}
        for word in words:
            name, colon, text = word.partition(":")
            if name not in known:
                guess = nearest(name, known)
                hint = f"; did you mean {guess}?" if guess else ""
                raise UserError(
                    f"--limits {quoted(word)} limits nothing known (allowed: {', '.join(known)}, "
                    f"as in ttft:500){hint}"
                )
            found[name] = positive("limits", text if colon else word)
        return cls(**found)

    def hold(self, record: RequestRecord) -> bool:
        """Whether the request was answered within them. Without a second token, any tpot is."""
        if record.error is not None or (self.ttft is not None and record.ttft_s is None):
            return False
        taken = (
            (self.ttft, record.ttft_s),
            (self.tpot, record.tpot_s),
            (self.e2e, record.e2e_s),
        )
        return all(
            limit is None or seconds is None or 1000.0 * seconds <= limit
            for limit, seconds in taken
        )

    def __bool__(self) -> bool:
        return any(limit is not None for limit in dataclasses.astuple(self))


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """One load and what it brought. Latencies are of the answers that came, None without any."""

    load: float  # requests/s, or requests in flight
    num_requests: int
    num_good: int  # answered within the limits; without limits, answered
    errors: Mapping[str, int]  # failed requests by kind
    elapsed_s: float  # from when the first was due to the end of the last
    num_input_tokens: int
    num_output_tokens: int
    max_late_ms: float  # how much behind its time the client sent a request
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None

    @classmethod
    def of(cls, load: float, records: Sequence[RequestRecord], limits: Limits) -> LoadReport:
        """The report of at least one request."""
        done = [record for record in records if record.error is None]
        start = min(record.due_s for record in records)
        tpot = [record.tpot_s for record in done]
        ttft = [record.ttft_s for record in done]
        return cls(
            load=load,
            num_requests=len(records),
            num_good=sum(limits.hold(record) for record in records),
            errors=dict(Counter(record.error for record in records if record.error is not None)),
            elapsed_s=max(record.end_s for record in records) - start,
            num_input_tokens=sum(record.num_input_tokens for record in done),
            num_output_tokens=sum(record.num_output_tokens for record in done),
            max_late_ms=1000.0 * max(record.sent_s - record.due_s for record in records),
            ttft_ms=Distribution.of_seconds(value for value in ttft if value is not None),
            tpot_ms=Distribution.of_seconds(value for value in tpot if value is not None),
            itl_ms=Distribution.of_seconds(gap for record in done for gap in record.gaps_s),
            e2e_ms=Distribution.of_seconds(record.e2e_s for record in done),
        )

    @property
    def num_failed(self) -> int:
        """Requests without an answer, or with half of one."""
        return sum(self.errors.values())

    @property
    def good_share(self) -> float:
        """Of all requests, failed ones too."""
        return self.num_good / self.num_requests

    @property
    def requests_per_s(self) -> float:
        """Answers over the whole time."""
        return self._rate(self.num_requests - self.num_failed)

    @property
    def goodput_requests_per_s(self) -> float:
        """Answers within the limits over the whole time."""
        return self._rate(self.num_good)

    @property
    def output_tokens_per_s(self) -> float:
        """Of answers that are whole, over the whole time."""
        return self._rate(self.num_output_tokens)

    def _rate(self, count: int) -> float:
        return count / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def metrics(self) -> dict[str, float]:
        """The numbers that METRICS names; latencies that no request has are left out."""
        found = {}
        for metric in METRICS:
            latency, _, part = metric.removesuffix("_ms").rpartition("_")
            if f"{latency}_ms" in LATENCIES:
                times: Distribution | None = getattr(self, f"{latency}_ms")
                if times is not None:
                    found[metric] = float(getattr(times, part))
            else:
                found[metric] = float(getattr(self, metric))
        return found

    def as_dict(self) -> dict[str, Any]:
        """Fields and rates by name, ready for JSON."""
        rates = ("num_failed", "good_share", "requests_per_s", "goodput_requests_per_s")
        names = (*rates, "output_tokens_per_s")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in names}


# What predict.bench.compare holds against another file's, of each load: its unit by name.
METRICS = {
    **{
        f"{latency.removesuffix('_ms')}_{part}_ms": "ms"
        for latency in LATENCIES
        for part in ("mean", "p50", "p90", "p99")
    },
    "requests_per_s": "requests/s",
    "goodput_requests_per_s": "requests/s",
    "output_tokens_per_s": "tokens/s",
    "good_share": "share of requests",
}


def load_rows(reports: Sequence[LoadReport], unit: str) -> list[dict[str, Any]]:
    """Rows of predict.bench.record, one per load: a sample of each metric per run of it."""
    found: dict[float, dict[str, list[float]]] = {}
    for report in reports:
        samples = found.setdefault(report.load, {})
        for metric, value in report.metrics().items():
            samples.setdefault(metric, []).append(value)
    return [
        {
            "name": f"{load:g} {unit}",
            "values": {metric: statistics.median(each) for metric, each in samples.items()},
            "samples": samples,
        }
        for load, samples in sorted(found.items())
    ]


def table(reports: Sequence[LoadReport], unit: str) -> str:
    """The reports for a terminal, a line per load and latency."""
    head = f"{unit:>18}{'latency (ms)':>16}{'mean':>10}{'P50':>10}{'P90':>10}{'P99':>10}"
    rows = [head]
    for report in reports:
        for name in LATENCIES:
            times: Distribution | None = getattr(report, name)
            cells = ["-"] * 4 if times is None else [f"{t:.2f}" for t in dataclasses.astuple(times)]
            label = name.removesuffix("_ms").upper()
            load = f"{report.load:g}" if name == LATENCIES[0] else ""
            rows.append(f"{load:>18}{label:>16}" + "".join(f"{cell:>10}" for cell in cells))
        rows.append(
            f"{'':>18}{report.requests_per_s:.3f} requests/s, "
            f"{report.goodput_requests_per_s:.3f} of them within the limits "
            f"({report.good_share:.1%}), {report.output_tokens_per_s:.1f} output tokens/s"
        )
        if report.errors:
            kinds = ", ".join(f"{count} x {kind}" for kind, count in report.errors.items())
            rows.append(f"{'':>18}{report.num_failed} of {report.num_requests} failed: {kinds}")
    return "\n".join(rows)


def positive(flag: str, text: str) -> float:
    """The number above zero that a text stands for. Raises UserError naming the flag."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < 1e9:
        raise UserError(f"--{flag} {quoted(text)} is not supported (allowed: numbers above 0)")
    return value
