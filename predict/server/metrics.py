"""The metrics of /metrics: counts and times of requests, and the engine's latest counts.

Names are those of other servers of language models behind `regatta_`, so that a dashboard needs
another prefix and no more.
"""

from __future__ import annotations

from collections.abc import Iterable

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
        self, stats: EngineStats | None, info: ModelInfo | None, names: Iterable[str] = ()
    ) -> None:
        """Sets the engine's counts; None before it has loaded and once it has ended.

        names: of the model, as clients write them.
        """
        self._engine.stats, self._engine.info, self._engine.names = stats, info, tuple(names)

    def render(self) -> bytes:
        """The text of /metrics, of CONTENT_TYPE."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The metrics of the engine's own counts."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None
        self.info: ModelInfo | None = None
        self.names: tuple[str, ...] = ()

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("regatta_engine_up", "Whether the engine answers.")
        up.add_metric((), float(self.stats is not None))
        yield up
        if self.info is not None:
            info = GaugeMetricFamily(
                "regatta_model_info",
                "What runs; always 1.",
                labels=("model_name", "model_type", "dtype", "device", "quantization"),
            )
            for name in self.names:
                kind = self.info.quant_type or "none"
                values = (name, self.info.model_type, self.info.dtype, self.info.device, kind)
                info.add_metric(values, 1.0)
            yield info
        stats = self.stats
        if stats is None:
            return
        looked_up = "Tokens looked up in the prefix cache."
        yield CounterMetricFamily(
            "regatta_prefix_cache_queries", looked_up, value=stats.num_prompt_tokens
        )
        for field, said in metrics():
            family = GaugeMetricFamily if said.is_now else CounterMetricFamily
            help_text = field.metadata["option"].help
            value = getattr(stats, field.name)
            if not said.label:
                yield family(f"regatta_{said.name}", help_text, value=value)
                continue
            made = family(f"regatta_{said.name}", help_text, labels=(said.label,))
            for index, count in enumerate(value):
                made.add_metric((str(index),), count)
            yield made
        for name, text, part, whole in (
            (
                "kv_cache_usage_perc",
                "Share of the KV cache's blocks that unfinished requests hold, 0 to 1.",
                stats.num_used_blocks,
                stats.num_cache_blocks,
            ),
            (
                "prefix_cache_hit_rate",
                "Share of the prompts' tokens that the prefix cache had, since the start.",
                stats.num_prefix_hit_tokens,
                stats.num_prompt_tokens,
            ),
            (
                "spec_decode_draft_acceptance_rate",
                "Share of draft tokens that stood, since the start.",
                stats.num_accepted_draft_tokens,
                stats.num_draft_tokens,
            ),
        ):
            yield GaugeMetricFamily(f"regatta_{name}", text, value=part / whole if whole else 0.0)
