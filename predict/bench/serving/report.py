"""What requests of one load took, and which of them held the limits."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from predict.bench.record import RecordRow, repeated_row
from predict.bench.report import PARTS, distribution
from predict.errors import UserError, quoted
from predict.names import hint

LATENCIES = ("ttft", "tpot", "itl", "e2e")
# What predict.bench.compare holds against another file's, of each load: its unit by name.
METRICS = {
    **{f"{latency}_{part}_ms": "ms" for latency in LATENCIES for part in PARTS},
    "requests_per_s": "requests/s",
    "goodput_requests_per_s": "requests/s",
    "output_tokens_per_s": "tokens/s",
    "good_share": "share of requests",
}


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
class LatencyLimits:
    """The most that a good request takes, in milliseconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, words: Sequence[str]) -> LatencyLimits:
        """Of texts such as ttft:500. Raises UserError."""
        known = [field.name for field in dataclasses.fields(cls)]
        found: dict[str, float] = {}
        for word in words:
            name, colon, text = word.partition(":")
            if name not in known:
                raise UserError(
                    f"--limits {quoted(word)} limits nothing known (allowed: {', '.join(known)}, "
                    f"as in ttft:500){hint(name, known)}"
                )
            found[name] = positive("limits", text if colon else word)
        return cls(**found)

    def hold(self, record: RequestRecord) -> bool:
        """Whether the request kept all limits; one without a second token keeps any tpot."""
        if record.error is not None or (self.ttft is not None and record.ttft_s is None):
            return False
        taken = ((self.ttft, record.ttft_s), (self.tpot, record.tpot_s), (self.e2e, record.e2e_s))
        return all(
            limit is None or seconds is None or 1000.0 * seconds <= limit
            for limit, seconds in taken
        )

    def __bool__(self) -> bool:
        return any(limit is not None for limit in dataclasses.astuple(self))


@dataclass(frozen=True)
class LoadReport:
    """The numbers of one load."""

    load: float  # requests/s, or requests in flight
    errors: Mapping[str, int]  # failed requests by kind
    # METRICS, but for latencies that no answer has, and counts. Latencies are of whole answers,
    # rates of the time from when the first request was due to the end of the last.
    numbers: Mapping[str, float]

    @classmethod
    def of(cls, load: float, records: Sequence[RequestRecord], limits: LatencyLimits) -> LoadReport:
        """The report of at least one request."""
        done = [record for record in records if record.error is None]
        seconds = max(each.end_s for each in records) - min(each.due_s for each in records)
        good = sum(limits.hold(record) for record in records)
        tokens = sum(record.num_output_tokens for record in done)
        numbers: dict[str, float] = {
            "num_requests": len(records),
            "num_failed": len(records) - len(done),
            "num_good": good,
            "num_input_tokens": sum(record.num_input_tokens for record in done),
            "num_output_tokens": tokens,
            # How much behind its time the client sent a request.
            "max_late_ms": 1000.0 * max(each.sent_s - each.due_s for each in records),
            "good_share": good / len(records),
            "requests_per_s": len(done) / seconds if seconds else 0.0,
            "goodput_requests_per_s": good / seconds if seconds else 0.0,
            "output_tokens_per_s": tokens / seconds if seconds else 0.0,
        }
        taken = {
            "ttft": distribution(each.ttft_s for each in done),
            "tpot": distribution(each.tpot_s for each in done),
            "itl": distribution(gap for each in done for gap in each.gaps_s),
            "e2e": distribution(each.e2e_s for each in done),
        }
        for latency, times in taken.items():
            numbers |= {f"{latency}_{part}_ms": value for part, value in (times or {}).items()}
        errors = Counter(record.error for record in records if record.error is not None)
        return cls(load, dict(errors), numbers)


def load_rows(reports: Sequence[LoadReport], unit: str) -> list[RecordRow]:
    """Rows of predict.bench.record, one per load: medians over its runs."""
    rows = []
    for load in sorted({report.load for report in reports}):
        runs = [report for report in reports if report.load == load]
        names = [name for name in runs[0].numbers if all(name in run.numbers for run in runs)]
        row = repeated_row(
            f"{load:g} {unit}", {name: [run.numbers[name] for run in runs] for name in names}
        )
        # The others are no speeds of the server.
        row["spread"] = {name: each for name, each in row["spread"].items() if name in METRICS}
        row["errors"] = dict(sum((Counter(run.errors) for run in runs), Counter()))
        rows.append(row)
    return rows


def table(reports: Sequence[LoadReport], unit: str) -> str:
    """The reports for a terminal, a line per load and latency."""
    rows = [f"{unit:>18}{'latency (ms)':>16}{'mean':>10}{'P50':>10}{'P90':>10}{'P99':>10}"]
    for report in reports:
        numbers = report.numbers
        for name in LATENCIES:
            found = (numbers.get(f"{name}_{part}_ms") for part in PARTS)
            cells = ["-" if value is None else f"{value:.2f}" for value in found]
            load = f"{report.load:g}" if name == LATENCIES[0] else ""
            rows.append(f"{load:>18}{name.upper():>16}" + "".join(f"{cell:>10}" for cell in cells))
        rows.append(
            f"{'':>18}{numbers['requests_per_s']:.3f} requests/s, "
            f"{numbers['goodput_requests_per_s']:.3f} of them within the limits "
            f"({numbers['good_share']:.1%}), {numbers['output_tokens_per_s']:.1f} output tokens/s"
        )
        if report.errors:
            kinds = ", ".join(f"{count} x {kind}" for kind, count in report.errors.items())
            failed = f"{numbers['num_failed']} of {numbers['num_requests']} failed"
            rows.append(f"{'':>18}{failed}: {kinds}")
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
