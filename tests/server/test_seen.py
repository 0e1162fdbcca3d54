"""Seen from outside: spans in a collector, counts by model and adapter, lines of JSON."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from predict.errors import UserError
from predict.server.metrics import MAX_ADAPTER_LABELS, Metrics
from predict.server.tracing import Tracer
from predict.server.wire import AnswerMetrics
from predict.system.json_lines import JsonLines
from tests.support.http_server import SECONDS, ModelServer, config_of

SECRET = "platypus"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """An address that takes spans, and what it got."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
    finally:
        server.shutdown()
        thread.join(SECONDS)
        server.server_close()


def test_the_spans_of_a_request_are_one_tree_without_its_text(model: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    body = {
        "messages": [{"role": "user", "content": SECRET}],
        "max_tokens": 12,
        "temperature": 0,
        "guided_choice": [f"{SECRET} yes", f"{SECRET} no"],
    }
    with collector() as (address, bodies):
        config = config_of(model, otlp_traces_endpoint=address, api_keys=(f"{SECRET}-key",))
        with ModelServer(config) as server, httpx.Client(base_url=server.url) as client:
            client.headers["Authorization"] = f"Bearer {SECRET}-key"
            client.headers["traceparent"] = f"00-{TRACE}-{PARENT}-01"
            for stream in (False, True):
                sent = {**body, "stream": stream}
                response = client.post("/v1/chat/completions", json=sent, timeout=SECONDS)
                assert response.status_code == 200
                assert stream or SECRET in response.text
            assert client.get("/health").status_code == 200
            assert client.post("/v1/chat/completions", json={}).status_code == 400
    assert bodies
    assert not any(SECRET.encode() in each for each in bodies)
    spans = [
        span
        for each in bodies
        for resource in ExportTraceServiceRequest.FromString(each).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    roots = [span for span in spans if span.parent_span_id.hex() == PARENT]
    assert [root.name for root in roots] == ["/v1/chat/completions"] * 3, "health is not traced"
    for root in roots[:2]:
        children = {each.name: each for each in spans if each.parent_span_id == root.span_id}
        assert set(children) == {"guide", "queue", "prompt", "decode", "detokenize"}
        for child in children.values():
            assert root.start_time_unix_nano <= child.start_time_unix_nano
            assert child.start_time_unix_nano <= child.end_time_unix_nano
            assert child.end_time_unix_nano <= root.end_time_unix_nano
        order = [children[name] for name in ("guide", "queue", "prompt", "decode")]
        for before, behind in pairwise(order):
            assert before.end_time_unix_nano <= behind.start_time_unix_nano + 1000
    assert roots[2].status.code == 2  # an error
    assert len(spans) == 2 * 6 + 1


def test_tracing_without_its_packages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UserError, match=r"pip install .regatta\[otel\]"):
        Tracer("http://127.0.0.1:1/v1/traces")


def test_answers_are_counted_by_model_and_adapter() -> None:
    metrics = Metrics()
    said = AnswerMetrics(10, 6, 0, 0, 0.01, 0.1, 0.02, 0.3, ("stop",))
    metrics.answer_of("base", "", said)
    for number in range(MAX_ADAPTER_LABELS + 3):
        metrics.answer_of("base", f"lora-{number}", said)
    text = metrics.render().decode()
    count = 'regatta_by_model_time_to_first_token_seconds_count{adapter="%s",model_name="base"} %s'
    assert count % ("", "1.0") in text
    assert count % ("lora-0", "1.0") in text
    assert count % ("other", "3.0") in text
    assert "regatta_time_to_first_token_seconds_count 0.0" in text, "as it was"


def test_lines_become_json_and_those_of_requests_stay() -> None:
    stream = io.StringIO()
    lines = JsonLines(stream, "front")
    lines.write("ready: a model\nerror: no")
    lines.write(' "room"\nregatta: note: of the log\n{"request_id":"r"}\n\n')
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [each.get("level") for each in found] == ["info", "error", "info", None]
    assert [each.get("message") for each in found] == [
        "ready: a model",
        'no "room"',
        "of the log",
        None,
    ]
    assert found[3] == {"request_id": "r"}
    assert all(each["process"] == "front" and each["time"] > 0 for each in found[:3])
