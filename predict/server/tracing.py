"""Spans of requests for an OpenTelemetry collector: one tree for each request.

The root is the request over HTTP, below the span that the client's `traceparent` names (W3C trace
context). Its children say where the time of each prompt's answer went: guide, queue, prompt,
decode, detokenize. Spans have numbers and names of ours: no text of a prompt or an answer, no key,
and nothing that a client makes up but its ids.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from predict.errors import UserError
from predict.server.wire import AnswerMetrics

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

SERVICE = "regatta"


class Trace(Protocol):
    """The spans of one request."""

    def answer(self, sent_at: float, metrics: AnswerMetrics, model: str, adapter: str) -> None:
        """Adds the spans of one prompt's answer. sent_at: time.perf_counter() of its sending."""

    def end(self, route: str, status: int, error: str | None) -> None:
        """Ends the request's span. route: its pattern."""


class Tracer:
    """Makes traces, and sends them on a thread of its own."""

    def __init__(self, endpoint: str, exporter: SpanExporter | None = None) -> None:
        """endpoint: of OTLP over HTTP. exporter: another one. Raises UserError where none is."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(endpoint=endpoint)
        except ImportError as error:
            raise UserError(
                f"--otlp_traces_endpoint needs packages that are not installed ({error}); "
                'pip install "regatta[otel]"'
            ) from None
        # A resource of ours alone: what the environment says may be secret.
        self._provider = TracerProvider(resource=Resource({"service.name": SERVICE}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(SERVICE)

    def begin(self, headers: Mapping[str, str], request_id: str) -> Trace:
        """The trace of a request that has come."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        return _Trace(self._tracer, TraceContextTextMapPropagator().extract(carrier), request_id)

    def close(self) -> None:
        """Sends what there is."""
        self._provider.shutdown()


class _Trace:
    """See Trace."""

    def __init__(self, tracer: Any, parent: Any, request_id: str) -> None:
        from opentelemetry import trace

        self._api, self._tracer = trace, tracer
        # From perf_counter's seconds to nanoseconds since 1970.
        self._epoch = time.time_ns() - int(time.perf_counter() * 1e9)
        self._span = tracer.start_span(
            "request",
            context=parent,
            kind=trace.SpanKind.SERVER,
            attributes={"gen_ai.request.id": request_id},
        )
        self._own = trace.set_span_in_context(self._span)

    def answer(self, sent_at: float, metrics: AnswerMetrics, model: str, adapter: str) -> None:
        """See Trace."""
        end = sent_at + metrics.seconds
        first_step = sent_at + (metrics.queue_seconds or 0.0)
        first_token = sent_at + (metrics.time_to_first_token or 0.0)
        begun = sent_at + (metrics.guide_seconds or 0.0)
        if metrics.guide_seconds is not None:
            self._child("guide", sent_at, begun, {})
        if metrics.queue_seconds is None:
            self._child("queue", begun, end, {})  # it never ran
        else:
            prompt = {
                "gen_ai.usage.input_tokens": metrics.num_prompt_tokens,
                "regatta.cached_tokens": metrics.num_cached_tokens,
            }
            decode = {
                "gen_ai.usage.output_tokens": metrics.num_output_tokens,
                "gen_ai.response.finish_reasons": list(metrics.finish_reasons),
                "regatta.num_preemptions": metrics.num_preemptions,
            }
            self._child("queue", begun, first_step, {})
            got_one = metrics.time_to_first_token is not None
            self._child("prompt", first_step, first_token if got_one else end, prompt)
            if got_one:
                self._child("decode", first_token, end, decode)
            # The sum over all steps, at the end of what it is part of.
            self._child("detokenize", max(end - metrics.text_seconds, first_step), end, {})
        self._span.set_attributes(
            {
                "gen_ai.request.model": model,
                "regatta.adapter": adapter,
                "gen_ai.usage.input_tokens": metrics.num_prompt_tokens,
                "gen_ai.usage.output_tokens": metrics.num_output_tokens,
                "gen_ai.latency.time_in_queue": metrics.queue_seconds or 0.0,
                "gen_ai.latency.time_to_first_token": metrics.time_to_first_token or 0.0,
                "gen_ai.latency.e2e": metrics.seconds,
            }
        )

    def _child(self, name: str, start: float, end: float, attributes: Mapping[str, Any]) -> None:
        span = self._tracer.start_span(
            name, context=self._own, start_time=self._at(start), attributes=dict(attributes)
        )
        span.end(end_time=self._at(max(start, end)))

    def _at(self, seconds: float) -> int:
        return self._epoch + int(seconds * 1e9)

    def end(self, route: str, status: int, error: str | None) -> None:
        """See Trace."""
        self._span.update_name(route)
        self._span.set_attributes({"http.route": route, "http.response.status_code": status})
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(self._api.Status(self._api.StatusCode.ERROR))
        self._span.end()
