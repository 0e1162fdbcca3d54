"""An OpenAI-compatible server whose answers are scripts, byte by byte, on a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

web = pytest.importorskip("aiohttp.web", reason="needs aiohttp: pip install -e '.[bench]'")

# What a page may load and run: nothing but what this server has.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class Answer:
    """What a request gets: a stream of events, or a body with a status."""

    chunks: Iterable[bytes] = ()  # each is sent by itself
    status: int = 200
    breaks: bool = False  # the connection ends in the middle of the body
    pause_s: float = 0.0  # behind each chunk
    headers: Mapping[str, str] = field(default_factory=dict)


def events(*values: Mapping[str, Any], done: bool = True) -> list[bytes]:
    """Server-sent events, one chunk each."""
    chunks = [b"data: " + json.dumps(value).encode() + b"\n\n" for value in values]
    return [*chunks, b"data: [DONE]\n\n"] if done else chunks


def chat_events(
    deltas: Sequence[str | Mapping[str, Any]], usage: tuple[int, int] | None = None
) -> list[bytes]:
    """The events of an answer in pieces: texts, or whole deltas. usage: tokens asked and given."""
    named = [{"content": delta} if isinstance(delta, str) else delta for delta in deltas]
    values: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
    values += [{"choices": [{"index": 0, "delta": delta}]} for delta in named]
    values.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    if usage is not None:
        counts = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
        values.append({"choices": [], "usage": counts})
    return events(*values)


class FakeServer:
    """Runs for the length of a `with` block; its answers may be changed meanwhile."""

    def __init__(
        self,
        answer: Callable[[dict[str, Any]], Answer],
        api_key: str | None = None,
        static: Path | None = None,
    ) -> None:
        """answer: of a request's body. static: a folder that is served at /, as the page's."""
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []  # of requests, in their order
        self.headers: list[Mapping[str, str]] = []
        self.num_cut = 0  # answers whose client went away
        self.cut = threading.Event()  # set with the first of them
        self.paths: list[str] = []  # of every request
        self._api_key = api_key
        self._static = static
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)
        return self

    def __exit__(self, *raised: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._watch])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/completions", self._complete)
        if self._static is not None:
            app.router.add_get("/", self._page)
            app.router.add_static("/static", self._static)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]

    @web.middleware
    async def _watch(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        self.paths.append(request.path)
        guarded = request.path.startswith("/v1/") and self._api_key is not None
        if guarded and request.headers.get("Authorization") != f"Bearer {self._api_key}":
            error = {"message": "wrong API key", "type": "invalid_request_error", "code": None}
            response = web.json_response({"error": error}, status=401)
        else:
            response = await handler(request)
        if not response.prepared:
            response.headers["Content-Security-Policy"] = POLICY
        return response

    async def _models(self, request: Any) -> Any:
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def _page(self, request: Any) -> Any:
        assert self._static is not None
        return web.FileResponse(self._static / "index.html")

    async def _complete(self, request: Any) -> Any:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        answer = self.answer(body)
        kind = "text/event-stream" if body.get("stream") else "application/json"
        response = web.StreamResponse(
            status=answer.status, headers={"Content-Type": kind, **answer.headers}
        )
        await response.prepare(request)
        try:
            for chunk in answer.chunks:
                await response.write(chunk)
                await asyncio.sleep(answer.pause_s)
        except (ConnectionError, asyncio.CancelledError):
            self.num_cut += 1
            self.cut.set()
            raise
        if answer.breaks:
            request.transport.close()
        else:
            await response.write_eof()
        return response
