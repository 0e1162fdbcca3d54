"""The metrics of /metrics: counts and times of requests, and the engine's latest counts.

Names are those of other servers of language models behind `regatta_`, so that a dashboard needs
another prefix and no more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from predict.engine.stats import EngineStats, metrics
from predict.server.wire import AnswerMetrics, ModelInfo

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Seconds. A first token takes 10 ms of a small prompt, and half a minute behind a long queue.
_FIRST = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96)
_EACH = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = tuple(float(1 << power) for power in range(18))
# Histograms of AnswerMetrics: the field, the metric's name, its help text, its buckets.
_ANSWERS = (
    ("time_to_first_token", "time_to_first_token_seconds",
     "From a prompt's arrival to its first token.", _FIRST),
    ("time_per_output_token", "time_per_output_token_seconds",
     "Mean time between two tokens of an answer, an answer counting once.", _EACH),
    ("seconds", "e2e_request_latency_seconds",
     "From a prompt's arrival to its last token.", _WHOLE),
    ("queue_seconds", "request_queue_time_seconds",
     "From a prompt's arrival to its first step.", _FIRST),
    ("num_prompt_tokens", "request_prompt_tokens", "Tokens of each prompt.", _TOKENS),
    ("num_output_tokens", "request_generation_tokens",
     "Tokens of all answers to each prompt.", _TOKENS),
)  # fmt: skip

_BY_MODEL = ("time_to_first_token", "time_per_output_token", "seconds", "num_output_tokens")
MAX_ADAPTER_LABELS = 256  # clients may load adapters of ever other names; the others are "other"


class Metrics:
    """The counters of one server, in a registry of their own. Not thread-safe."""

    def __init__(self) -> None:
        # Else each counter has a second line with the time of its first count.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # of the front
        PlatformCollector(registry=registry)

        self._answers = {
            field: Histogram(f"regatta_{name}", text, buckets=buckets, registry=registry)
            for field, name, text, buckets in _ANSWERS
        }
        self._by_model = {
            field: Histogram(
                f"regatta_by_model_{name}",
                text,
                ("model_name", "adapter"),
                buckets=buckets,
                registry=registry,
            )
            for field, name, text, buckets in _ANSWERS
            if field in _BY_MODEL
        }
        self._adapters: set[str] = set()  # with counts of their own
        self._ended = Counter(
            "regatta_request_success",
            "Answers by the reason of their end.",
            ("finished_reason",),
            registry=registry,
        )
        self._http_seconds = Histogram(
            "regatta_http_request_duration_seconds",
            "From a request's first line to its last byte.",
            ("route",),
            buckets=_WHOLE,
            registry=registry,
        )
        self._http_requests = Counter(
            "regatta_http_requests",
            "Requests by route and status.",
            ("route", "status"),
            registry=registry,
        )
        self._http_errors = Counter(
            "regatta_http_request_errors",
            "Requests that failed, by route and kind of error.",
            ("route", "kind"),
            registry=registry,
        )
        self._http_running = Gauge(
            "regatta_http_requests_in_flight",
            "Requests that are being answered.",
            ("route",),
            registry=registry,
        )
        self._engine = _EngineCollector()
        registry.register(self._engine)

    def answer_ended(self, metrics: AnswerMetrics) -> None:
        """Counts the answers to one prompt."""
        for field, histogram in self._answers.items():
            value = getattr(metrics, field)
            if value is not None:
                histogram.observe(value)
        for reason in metrics.finish_reasons:
            self._ended.labels(reason).inc()

    def answer_of(self, model: str, adapter: str, metrics: AnswerMetrics) -> None:
        """Counts the answers to one prompt by model and adapter, "" where it names none."""
        if adapter and adapter not in self._adapters:
            if len(self._adapters) < MAX_ADAPTER_LABELS:
                self._adapters.add(adapter)
            else:
                adapter = "other"
        for field, histogram in self._by_model.items():
            value = getattr(metrics, field)
            if value is not None:
                histogram.labels(model, adapter).observe(value)

    def request_began(self, route: str) -> None:
        """Counts a request. route: its pattern, as /v1/models/{name}, never a client's path."""
        self._http_running.labels(route).inc()

    def request_ended(
        self, route: str, status: int, seconds: float, error: str | None = None
    ) -> None:
        """Counts a request that began. error: its kind, one of few, where it failed."""
        self._http_running.labels(route).dec()
        self._http_requests.labels(route, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)
        if error is not None:
            self._http_errors.labels(route, error).inc()

    def engine_said(
        self,
        stats: EngineStats | None,
        info: ModelInfo | None,
        names: Iterable[str] = (),
        model: str = "",
    ) -> None:
        """Sets an engine's counts; None before it has loaded and once it has ended.

        names: of the model, as clients write them. model: which of several in the server, whose
        counts have its name as a label; "": there is one.
        """
        self._engine.said[model] = Said(stats, info, tuple(names))

    def render(self) -> bytes:
        """The text of /metrics, of CONTENT_TYPE."""
        return generate_latest(self.registry)


class Said(NamedTuple):
    """What an engine has said last."""

    stats: EngineStats | None
    info: ModelInfo | None
    names: tuple[str, ...]


class _EngineCollector(Collector):
    """The metrics of the engines' own counts."""

    def __init__(self) -> None:
        self.said: dict[str, Said] = {}  # by the names of several models; of one, by ""

    def collect(self) -> Iterable[Metric]:
        labels = () if "" in self.said or not self.said else ("model_name",)
        said = self.said or {"": Said(None, None, ())}

        def values(model: str) -> tuple[str, ...]:
            return (model,) if labels else ()

        up = GaugeMetricFamily("regatta_engine_up", "Whether the engine answers.", labels=labels)
        for model, each in said.items():
            up.add_metric(values(model), float(each.stats is not None))
        yield up
        yield from self._infos()
        counted = [(values(m), each.stats) for m, each in said.items() if each.stats is not None]
        if not counted:
            return
        queries = CounterMetricFamily(
            "regatta_prefix_cache_queries", "Tokens looked up in the prefix cache.", labels=labels
        )
        for own, stats in counted:
            queries.add_metric(own, stats.num_prompt_tokens)
        yield queries
        for field, metric in metrics():
            family = GaugeMetricFamily if metric.is_now else CounterMetricFamily
            extra = (metric.label,) if metric.label else ()
            help_text = field.metadata["option"].help
            made = family(f"regatta_{metric.name}", help_text, labels=(*labels, *extra))
            for own, stats in counted:
                value = getattr(stats, field.name)
                if not extra:
                    made.add_metric(own, value)
                    continue
                for index, count in enumerate(value):
                    made.add_metric((*own, str(index)), count)
            yield made
        for name, text, part, whole in _SHARES:
            share = GaugeMetricFamily(f"regatta_{name}", text, labels=labels)
            for own, stats in counted:
                count = getattr(stats, whole)
                share.add_metric(own, getattr(stats, part) / count if count else 0.0)
            yield share

    def _infos(self) -> Iterable[Metric]:
        found = [(each.info, each.names) for each in self.said.values() if each.info is not None]
        if not found:
            return
        info = GaugeMetricFamily(
            "regatta_model_info",
            "What runs; always 1.",
            labels=("model_name", "model_type", "dtype", "device", "quantization"),
        )
        for own, names in found:
            for name in names:
                kind = own.quant_type or "none"
                info.add_metric((name, own.model_type, own.dtype, own.device, kind), 1.0)
        yield info


# Shares of counts: the metric's name, its help text, and the fields of EngineStats.
_SHARES = (
    ("kv_cache_usage_perc",
     "Share of the KV cache's blocks that unfinished requests hold, 0 to 1.",
     "num_used_blocks", "num_cache_blocks"),
    ("prefix_cache_hit_rate",
     "Share of the prompts' tokens that the prefix cache had, since the start.",
     "num_prefix_hit_tokens", "num_prompt_tokens"),
    ("spec_decode_draft_acceptance_rate",
     "Share of draft tokens that stood, since the start.",
     "num_accepted_draft_tokens", "num_draft_tokens"),
)  # fmt: skip
