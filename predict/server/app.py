"""The ASGI application: all routes behind one gate for keys, request ids, the log and draining."""

from __future__ import annotations

import asyncio
import atexit
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from predict.server.access_log import MAX_PATH, AccessLog, request_id
from predict.server.answers import to_json
from predict.server.asked import asked_priority
from predict.server.auth import OPEN_PATHS, OPEN_PREFIXES, Keys
from predict.server.config import ServerConfig
from predict.server.context import RECORD, REFUSED, Context, Record
from predict.server.engine_client import EngineDied, EngineHandle
from predict.server.errors import MESSAGES_PATHS, ApiError
from predict.server.front_model import FrontModel
from predict.server.lifecycle import Lifecycle
from predict.server.limits import Admission
from predict.server.metrics import Metrics
from predict.server.model_text import ModelText
from predict.server.openapi import document
from predict.server.routes import routers
from predict.server.routes._common import json_response
from predict.server.served_models import ServedModels
from predict.server.store import Store
from predict.server.tracing import Tracer
from predict.system.notes import LOG

CLIENT_GONE = 499  # for the log: the client did not wait for a status
_HEADERS = b"authorization, content-type, x-request-id, x-priority, x-api-key, anthropic-version"
_UNTRACED = frozenset({*OPEN_PATHS, "/metrics"})  # health checks, and what asks every minute
# What needs no model that is awake, beside paths that are none.
_WITHOUT_MODEL = frozenset(
    {
        *("other", "/page/formula", "/v1/responses/{response_id}/cancel"),
        *("/sleep", "/wake_up", "/update_weights"),
    }
)
SWITCH_SECONDS = 0.0005  # after which a thread that tokenizes yields to the event loop


def package_version() -> str:
    """The version of this package; "unknown" where it is not installed."""
    try:
        return version("regatta")
    except PackageNotFoundError:
        return "unknown"


def create_app(
    engine: EngineHandle,
    front: FrontModel,
    config: ServerConfig,
    *,
    lifecycle: Lifecycle | None = None,
    metrics: Metrics | None = None,
    log: AccessLog | None = None,
    tracer: Tracer | None = None,
    take_turn: Callable[[float], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """The application in front of an engine. lifecycle, metrics, log: None makes new ones.

    tracer: None: nothing is traced. take_turn: of one of several models, see Rota.
    `app.state.context` is its context.
    """
    if config.access_log and log is None:
        log = AccessLog()
        atexit.register(log.close)
    context = Context(
        engine,
        front,
        config,
        lifecycle or Lifecycle(),
        metrics or Metrics(),
        Admission(config),
        ModelText(front, config),
        ServedModels(config),
        Store(config.max_stored_responses, config.max_stored_bytes),
        log if config.access_log else None,
        package_version(),
        tracer,
        take_turn,
    )
    app = FastAPI(
        title="Regatta",
        version=context.version,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    paths = ["/openapi.json"]
    for router in routers(context):
        app.include_router(router)
        paths += [route.path for route in router.routes if isinstance(route, Route)]

    async def openapi(request: Request) -> Response:
        if app.openapi_schema is None:
            app.openapi_schema = document(app, config.root_path)
        return json_response(app.openapi_schema)

    app.add_route(paths[0], openapi, include_in_schema=False)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(_Gate, context=context, paths=paths)
    sys.setswitchinterval(SWITCH_SECONDS)
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """The answer to an unknown path or a wrong method, which the framework refuses."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:MAX_PATH]
    said = {
        404: f"there is no {path!r} here; /openapi.json lists what there is",
        405: f"{request.method} does not go with {path!r}",
    }.get(error.status_code, str(error.detail))
    refused = ApiError(error.status_code, said, headers=dict(error.headers or {}))
    return _error_response(refused, request.scope)


def _error_response(error: ApiError, scope: Scope) -> Response:
    body = error.body
    if scope["path"] in MESSAGES_PATHS:
        body = to_json(error.messages_content(scope[RECORD].request_id))
    return Response(
        body,
        status_code=error.status,
        media_type="application/json",
        headers=error.headers,
    )


class _Gate:
    """ASGI middleware around all routes: checks, counts and logs each request."""

    def __init__(self, app: ASGIApp, context: Context, paths: Sequence[str]) -> None:
        """paths: of all routes."""
        self._app = app
        self._paths = frozenset(path for path in paths if "{" not in path)
        # Of what is in front of a path's parameter, and behind it: the pattern; the longest first.
        named = (
            (path.partition("{")[0], path.rpartition("}")[2], path) for path in paths if "{" in path
        )
        ends = sorted(named, key=lambda each: -len(each[1]))
        self._patterns = [(*each[:2], each[2].replace(":path", "")) for each in ends]
        self._context = context
        self._keys = Keys(context.config.api_keys, context.config.api_key_file)
        self._origins = frozenset(context.config.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no web sockets
        context, config = self._context, self._context.config
        headers = Headers(scope=scope)
        sent_id = headers.get("x-request-id")
        now = asyncio.get_running_loop().time()
        record = Record(
            request_id(None if sent_id is None else sent_id.encode("latin-1")),
            now + config.request_timeout,
        )
        scope[RECORD] = record
        route = self._pattern_of(scope["path"])
        answer = _Answer(send, record, self._cors(headers))
        if context.tracer is not None and route not in _UNTRACED:
            record.trace = context.tracer.begin(headers, record.request_id)
        context.metrics.request_began(route)
        context.lifecycle.enter()
        try:
            await self._answer(scope, receive, answer, headers)
        finally:
            context.lifecycle.leave()
            seconds = time.perf_counter() - record.started
            context.metrics.request_ended(route, answer.status, seconds, record.error)
            if record.trace is not None:
                record.trace.end(route, answer.status, record.error)
            if context.log is not None:
                context.log.add(_line(scope, record, answer, seconds))

    async def _answer(
        self, scope: Scope, receive: Receive, answer: _Answer, headers: Headers
    ) -> None:
        """Answers a request; errors that come before the response has begun become a response."""
        try:
            if self._is_preflight(scope, headers):
                await Response(status_code=204)(scope, receive, answer)
                return
            sent = (headers.get(name) for name in ("authorization", "x-api-key"))
            keys = (None if key is None else key.encode("latin-1") for key in sent)
            record = answer.record
            record.key = self._keys.check(scope["path"], *keys)
            if record.key.name:
                record.log["key"] = record.key.name
            record.priority = asked_priority(headers.get("x-priority"))
            if self._context.lifecycle.draining and not _is_open(scope["path"]):
                raise ApiError(
                    503,
                    "the server is ending; ask another one",
                    headers={"Retry-After": self._context.retry_after, "Connection": "close"},
                )
            if (refused := scope.get(REFUSED)) is not None:
                raise refused
            async with AsyncExitStack() as turn:
                if self._takes_turn(scope):
                    assert self._context.take_turn is not None
                    await turn.enter_async_context(self._context.take_turn(record.deadline))
                    record.turn = turn
                await self._app(scope, receive, answer)
        except (ApiError, EngineDied) as raised:
            error = self._context.unavailable() if isinstance(raised, EngineDied) else raised
            answer.record.error = error.code
            if not answer.has_begun:
                await _error_response(error, scope)(scope, receive, answer)
        except ClientDisconnect:
            answer.record.log["aborted"] = True
        except Exception as error:
            # What it was is for whoever runs the server, not for its clients.
            LOG.error(f"request {answer.record.request_id} failed:", exc_info=error)
            answer.record.error = "internal_error"
            if not answer.has_begun:
                said = f"the server failed; its log has more on {answer.record.request_id}"
                await _error_response(ApiError(500, said), scope)(scope, receive, answer)
            else:
                raise

    def _cors(self, headers: Headers) -> Mapping[str, str]:
        """The headers that let a page of another origin read the answer."""
        origin = headers.get("origin")
        if origin is None or not self._origins:
            return {}
        if "*" in self._origins:
            return {"Access-Control-Allow-Origin": "*"}
        found = {"Vary": "Origin"}
        if origin in self._origins:
            found["Access-Control-Allow-Origin"] = origin
            found["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
        return found

    def _takes_turn(self, scope: Scope) -> bool:
        """Whether one of several models has to be awake for a request."""
        if self._context.take_turn is None or scope["method"] != "POST":
            return False
        return self._pattern_of(scope["path"]) not in _WITHOUT_MODEL

    def _is_preflight(self, scope: Scope, headers: Headers) -> bool:
        return (
            bool(self._origins)
            and scope["method"] == "OPTIONS"
            and "access-control-request-method" in headers
        )

    def _pattern_of(self, path: str) -> str:
        """The pattern of a path, for counters: none that a client made up."""
        if path in self._paths:
            return path
        fitting = (
            name
            for begin, end, name in self._patterns
            if path.startswith(begin) and path.endswith(end)
        )
        return next(fitting, "other")


class _Answer:
    """The `send` of a request: adds the headers of every answer, notes status, bytes and time."""

    def __init__(self, send: Send, record: Record, headers: Mapping[str, str]) -> None:
        self._send = send
        self.record = record
        self.status = CLIENT_GONE
        self.has_begun = False
        self.num_bytes = 0
        self.first_byte: float | None = None
        own_id = record.request_id.encode("ascii")
        self._headers = [(b"x-request-id", own_id), (b"request-id", own_id)]
        self._headers += [(k.lower().encode(), v.encode("latin-1")) for k, v in headers.items()]
        if "Access-Control-Allow-Origin" in headers:
            self._headers.append((b"access-control-allow-methods", b"GET, POST, DELETE"))
            self._headers.append((b"access-control-allow-headers", _HEADERS))

    async def __call__(self, message: Message) -> None:
        if self.has_begun:
            self.num_bytes += len(message.get("body", b""))
        else:
            self.has_begun = True
            self.status = message["status"]
            self.first_byte = time.perf_counter()
            message = {**message, "headers": [*message["headers"], *self._headers]}
        await self._send(message)


def _is_open(path: str) -> bool:
    """Whether a path is answered while the server drains."""
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIXES) or path == "/metrics"


def _line(scope: Scope, record: Record, answer: _Answer, seconds: float) -> dict[str, Any]:
    """A request's record for the access log."""
    client = scope.get("client")
    line: dict[str, Any] = {
        "request_id": record.request_id,
        "client": None if client is None else client[0],
        "method": scope["method"],
        "path": scope["path"][:MAX_PATH],
        "status": answer.status,
        "seconds": round(seconds, 4),
        "bytes": answer.num_bytes,
    }
    if answer.first_byte is not None:
        line["first_byte_seconds"] = round(answer.first_byte - record.started, 4)
    if record.error is not None:
        line["error"] = record.error
    return {**line, **record.log}
