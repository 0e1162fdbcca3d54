"""Limits, keys and ends over HTTP: what is too much is refused, what nobody waits for is ended."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from predict.request import SamplingParams
from predict.server.errors import ApiError
from predict.server.limits import _parsed
from tests.support.http_server import SECONDS, ScriptedServer, config_of
from tests.support.tiny import TOKENIZER

ASK = {"prompt": "count", "max_tokens": 8}


def script(prompt: str, params: SamplingParams) -> tuple[str, ...]:
    return ("one", " two", " three")


@contextlib.contextmanager
def serving(**changes: Any) -> Iterator[tuple[ScriptedServer, httpx.Client]]:
    """A server whose config has these changes, and a client of it."""
    config = config_of(TOKENIZER, **changes)
    with ScriptedServer(config, script) as server, httpx.Client(base_url=server.url) as client:
        client.timeout = SECONDS
        yield server, client


def complete(client: httpx.Client, **changes: Any) -> httpx.Response:
    return client.post("/v1/completions", json={**ASK, **changes})


def message(response: httpx.Response) -> str:
    found: str = response.json()["error"]["message"]
    return found


def test_a_key_guards_all_but_health_and_the_page() -> None:
    with serving(api_keys=("first", "second")) as (_, client):
        for path in ("/health", "/ready", "/", "/static/style.css", "/v2/health/live"):
            assert client.get(path).status_code == 200, path
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nothing"):
            response = client.get(path)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
            for key in ("first", "second"):
                headers = {"Authorization": f"Bearer {key}"}
                assert client.get(path, headers=headers).status_code != 401
        for header in ("Bearer wrong", "Bearer", "first", "Basic first", "Bearer firs", "Bearer é"):
            response = client.get("/v1/models", headers={b"Authorization": header.encode()})
            assert response.status_code == 401, header
            assert "first" not in response.text
        assert complete(client).status_code == 401


def test_pages_of_allowed_origins_may_ask() -> None:
    page = "https://page.example"
    with serving(allowed_origins=(page,), api_keys=("key",)) as (_, client):
        asked = {
            "Origin": page,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        response = client.options("/v1/chat/completions", headers=asked)
        assert response.status_code == 204
        assert response.headers["access-control-allow-origin"] == page
        assert "authorization" in response.headers["access-control-allow-headers"]
        other = client.options(
            "/v1/chat/completions", headers={**asked, "Origin": "https://evil.example"}
        )
        assert "access-control-allow-origin" not in other.headers


def test_a_full_queue_is_429_with_a_time_to_wait() -> None:
    with serving(max_queue=0, retry_after=7.0) as (server, client):
        server.engine.is_held = True
        body = {**ASK, "n": 8, "temperature": 1.0, "stream": True}
        with contextlib.ExitStack() as stack:
            stack.enter_context(_begun(server, body))
            response = complete(client)
            assert response.status_code == 429
            assert response.headers["retry-after"] == "7"
            assert response.json()["error"]["type"] == "rate_limit_error"
        server.wait_until(lambda: server.engine.num_in_flight == 0)
        server.call(server.engine.release)
        assert complete(client).status_code == 200, "those who left made room"


def test_a_request_that_fails_on_its_way_to_the_engine_makes_room_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(max_queue=0) as (server, client):
        engine, add = server.engine, server.engine.add

        def add_one(*args: Any, **options: Any) -> Any:
            if engine.num_added:
                raise OSError("the socket is full")
            return add(*args, **options)

        monkeypatch.setattr(engine, "add", add_one)
        assert complete(client, prompt=["a"] * 8).status_code == 500
        assert engine.answers[0].is_aborted
        monkeypatch.undo()
        assert complete(client, prompt=["a"] * 8).status_code == 200


@contextlib.contextmanager
def _begun(server: ScriptedServer, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request that the engine has, on a connection that is closed at the end of the block."""
    before = server.engine.num_added
    with server.connect() as sock:
        sock.sendall(_request(body))
        server.wait_until(lambda: server.engine.num_added > before)
        yield sock


def _request(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    ).encode() + data


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_its_answer(stream: bool) -> None:
    with serving() as (server, _):
        server.engine.is_held = True
        with _begun(server, {**ASK, "stream": stream}):
            assert not server.engine.answers[-1].is_aborted
        server.wait_until(lambda: server.engine.answers[-1].is_aborted)
        server.wait_until(lambda: server.lifecycle.num_requests == 0)


def test_time_that_is_over_ends_an_answer() -> None:
    with serving(request_timeout=0.2) as (server, client):
        server.engine.is_held = True
        for stream in (False, True):
            response = complete(client, stream=stream)
            assert response.status_code == 504
            assert "0.2 s" in message(response)
            assert server.engine.answers[-1].is_aborted


def test_an_engine_that_ends_is_told_to_all() -> None:
    with serving() as (server, client):
        server.engine.is_held = True
        with _begun(server, ASK) as sock:
            server.call(lambda: server.engine.die("the engine's process was ended by signal 9"))
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 503")
        for path in ("/health", "/ready"):
            response = client.get(path)
            assert response.status_code == 503
            assert "signal 9" in message(response)
        assert complete(client).status_code == 503
        assert "regatta_engine_up 0" in client.get("/metrics").text


def test_a_stream_that_breaks_says_so_in_its_last_event() -> None:
    with serving() as (server, client):

        def breaks(prompt: str, params: SamplingParams) -> Iterator[str]:
            yield "one"
            server.engine.die("the device is gone")
            yield "two"

        server.engine.script = breaks  # type: ignore[assignment]
        response = complete(client, stream=True)
        assert response.status_code == 200
        *_, error, done = [line for line in response.text.split("\n\n") if line]
        assert done == "data: [DONE]"
        assert "the device is gone" in json.loads(error.removeprefix("data: "))["error"]["message"]


def test_what_comes_while_the_server_ends_is_refused() -> None:
    with serving() as (server, client):
        server.engine.is_held = True
        with _begun(server, {**ASK, "stream": True}) as sock:
            server.call(server.lifecycle.drain)
            assert client.get("/health").status_code == 200
            assert client.get("/ready").status_code == 503
            refused = complete(client)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            server.call(server.engine.release)
            answer = b""
            while b"[DONE]" not in answer:
                answer += sock.recv(1 << 16)
            assert b" three" in answer, "what ran is finished"


LIMITS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "max_answers": ({"max_answers": 2}, {"n": 3, "temperature": 1.0}, "n"),
    "max_prompts": ({"max_prompts": 2}, {"prompt": ["a", "b", "c"]}, "prompt"),
    "max_stop": ({"max_stop": 1}, {"stop": ["a", "b"]}, "stop"),
    "max_schema_bytes": ({"max_schema_bytes": 8}, {"guided_regex": "a" * 9}, "guided_regex"),
    "max_prompt_tokens": ({"max_prompt_tokens": 4}, {"prompt": [5] * 5}, "prompt"),
    "all prompts together": ({"max_queue": 0}, {"prompt": ["a"] * 9}, "n"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_each_limit_is_a_400_that_names_the_field(name: str) -> None:
    changes, body, param = LIMITS[name]
    with serving(**changes) as (server, client):
        response = complete(client, **body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert server.engine.num_added == 0


def test_a_large_body_is_refused_before_it_is_read() -> None:
    with serving(max_body_bytes=4096) as (server, client):
        response = complete(client, prompt="x" * 8192)
        assert response.status_code == 413
        assert "4096" in message(response)
        with server.connect() as sock:
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 1000000000000\r\n\r\n{"
            )
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 413")
        with server.connect() as sock:  # one that does not say how long it is
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for _ in range(64):
                    sock.sendall(b"100\r\n" + b" " * 256 + b"\r\n")
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 413")


def test_bodies_count_until_they_are_token_ids() -> None:
    with serving(max_body_bytes=1024) as (server, _), contextlib.ExitStack() as stack:
        server.engine.is_held = True
        # More bytes than all bodies may have at once.
        for _ in range(20):
            stack.enter_context(_begun(server, {**ASK, "user": "x" * 900}))
        server.call(server.engine.release)


def test_bodies_and_headers_that_do_not_come_are_given_up() -> None:
    with serving(body_timeout=0.5) as (server, client):
        for sent in (
            b"",
            b"POST /v1/comp",
            b"GET /health HTTP/1.1\r\nX-Slow: a",
            _request(ASK)[:-5],
        ):
            with server.connect() as sock:
                sock.sendall(sent)
                assert sock.recv(1 << 16).startswith(b"HTTP/1.1 408"), sent
        assert complete(client).status_code == 200


def test_floods_of_headers_are_refused() -> None:
    with serving() as (server, client):
        for flood in (
            b"X-A: b\r\n" * 200,
            b"X-A: " + b"b" * 65536 + b"\r\n",
            b"X-A" + b"a" * 65536,
        ):
            with server.connect() as sock:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + flood)
                assert sock.recv(1 << 16).startswith(b"HTTP/1.1 431")
        with server.connect() as sock:
            sock.sendall(b"GET /" + b"x" * 100_000)
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 431")
        with server.connect() as sock:
            sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00")
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 400")
        assert complete(client).status_code == 200


def test_connections_beyond_the_most_are_turned_away() -> None:
    with serving(max_connections=2) as (server, _), contextlib.ExitStack() as stack:
        for _ in range(2):
            sock = stack.enter_context(server.connect())
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
        third = stack.enter_context(server.connect())
        assert third.recv(1 << 16).startswith(b"HTTP/1.1 503")


def test_two_requests_on_one_connection_are_answered_in_order() -> None:
    with serving() as (server, _), server.connect() as sock:
        sock.sendall(_request({**ASK, "prompt": "a"}) + _request({"prompt": 5}))
        answers = b""
        while answers.count(b"HTTP/1.1") < 2 or not answers.endswith(b"}"):
            answers += sock.recv(1 << 16)
        assert answers.index(b"HTTP/1.1 200") < answers.index(b"HTTP/1.1 400")


def test_prompts_are_logged_when_asked_for_and_never_whole() -> None:
    with serving(log_requests=True) as (server, client):
        complete(client, prompt="secret " * 20 + "\n")
        complete(client, prompt=[5] * 250, stream=True)
        server.wait_until(lambda: len(server.lines) == 2)
        lines = [json.loads(line) for line in server.lines]
        assert lines[0]["prompt"].startswith("secret secret")
        assert [line["answer"] for line in lines] == ["one two three"] * 2
        assert all(len(line["prompt"]) <= 1000 for line in lines)


def test_a_client_that_does_not_read_is_given_up() -> None:
    with serving(request_timeout=1.5) as (server, client):
        server.engine.script = lambda prompt, params: ["x" * 100_000] * 400
        with _begun(server, {**ASK, "stream": True}):
            server.wait_until(lambda: server.engine.answers[-1].is_aborted)
            server.wait_until(lambda: server.lifecycle.num_requests == 0)
        server.engine.script = script
        assert complete(client).status_code == 200


def test_many_prompts_of_token_ids_are_read_and_many_lists_are_not() -> None:
    ids = json.dumps({"prompt": [list(range(1000, 2500))] * 64}).encode()
    assert len(_parsed(ids, max_length=2048, max_prompts=128)["prompt"]) == 64
    with pytest.raises(ApiError, match="JSON values"):
        _parsed(json.dumps({"prompt": [[]] * 96_000}).encode(), max_length=2048, max_prompts=128)
