"""What follows the OpenAPI document, and what does not, is answered: nothing fails or hangs."""

from __future__ import annotations

import contextlib
from typing import Any

import httpx
import pytest

from tests.support.http_server import SECONDS, ScriptedServer

schemathesis = pytest.importorskip(
    "schemathesis", reason="needs schemathesis: pip install -e '.[test]'"
)

NUM_EXAMPLES = 2  # of each route; --slow: many more
NUM_SLOW_EXAMPLES = 50


def check(server: ScriptedServer, num_examples: int) -> None:
    """Sends what the document allows, and what it does not, to every route."""
    import hypothesis

    document = httpx.get(f"{server.url}/openapi.json", timeout=SECONDS).json()
    schema = schemathesis.openapi.from_dict(document)
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    num_sent = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        for mode in modes:

            @hypothesis.settings(
                max_examples=num_examples,
                database=None,
                deadline=None,
                derandomize=True,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def send(case: Any) -> None:
                nonlocal num_sent
                num_sent += 1
                response = case.call(base_url=server.url, timeout=SECONDS)
                assert response.status_code < 500, response.text
                assert response.headers["x-request-id"]
                if response.status_code >= 400 and case.method != "HEAD":
                    assert response.json()["error"]["message"]

            # A route that takes nothing cannot be given anything wrong.
            with contextlib.suppress(hypothesis.errors.Unsatisfiable):
                send()
    assert num_sent > 10


def test_nothing_that_follows_the_document_or_not_fails_the_server(server: ScriptedServer) -> None:
    check(server, NUM_EXAMPLES)


@pytest.mark.slow
def test_much_more_of_it_does_not_either(server: ScriptedServer) -> None:
    check(server, NUM_SLOW_EXAMPLES)


def test_the_document_describes_every_body(server: ScriptedServer) -> None:
    document = httpx.get(f"{server.url}/openapi.json", timeout=SECONDS).json()
    schemas = document["components"]["schemas"]
    posts = {path: item["post"] for path, item in document["paths"].items() if "post" in item}
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/api/chat"} <= set(posts)
    assert {"/v1/responses", "/v1/messages", "/v1/messages/count_tokens"} <= set(posts)
    without = ("/v1/responses/{response_id}/cancel", "/sleep", "/wake_up")
    assert all("requestBody" not in posts.pop(path) for path in without)
    for path, operation in posts.items():
        body = operation["requestBody"]["content"]["application/json"]["schema"]
        for each in body.get("anyOf", [body]):
            assert each["$ref"].rsplit("/", 1)[1] in schemas, path
    assert "prompt" in schemas["CompletionBody"]["required"]
    assert schemas["ChatBody"]["additionalProperties"] is False
