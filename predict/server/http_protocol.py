"""uvicorn's HTTP protocol with limits on headers, their time, and connections.

uvicorn itself reads headers of any size, and waits for them without end.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from predict.server.config import ServerConfig
from predict.server.errors import ApiError

MAX_HEADERS = 128
MAX_HEADER_BYTES = 32 << 10  # of the request line and all headers
_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


def limited_protocol(config: ServerConfig) -> type[HttpToolsProtocol]:
    """The class for `uvicorn.Config(http=...)` with the limits of a server's config."""

    class LimitedProtocol(_LimitedProtocol):
        max_connections = config.max_connections
        head_seconds = config.body_timeout

    return LimitedProtocol


class _LimitedProtocol(HttpToolsProtocol):
    max_connections: int
    head_seconds: float
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _in_head = True  # or between two requests
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(
                ApiError(503, f"{self.max_connections} connections are open already; try later")
            )
        else:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._in_head:
            # Before the parser keeps them; the body's first bytes may be among them.
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._arm()
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEADER_BYTES:
            self._refuse_head(f"more than {MAX_HEADER_BYTES} bytes")

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse_head(f"more than {MAX_HEADERS} fields")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._disarm()
        if not self._is_refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_refused:
            super().on_message_complete()
            self._in_head = True

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are no HTTP with an error of our form."""
        if not self._is_refused:
            self._refuse(ApiError(400, f"this is no HTTP request that can be read: {msg}"))

    def _arm(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._refuse(ApiError(408, f"the headers did not come within {self.head_seconds:g} s"))

    def _refuse_head(self, got: str) -> None:
        self._refuse(
            ApiError(
                431,
                f"the headers have {got} (allowed: {MAX_HEADERS} fields, {MAX_HEADER_BYTES} bytes)",
            )
        )

    def _refuse(self, error: ApiError) -> None:
        """Closes the connection, behind an error response where no response is being sent."""
        if self._is_refused:
            return
        self._is_refused = True
        self._disarm()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            body = error.body
            self.transport.write(
                b"HTTP/1.1 %d %s\r\n" % (error.status, _REASONS[error.status])
                + b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
                + b"connection: close\r\n\r\n"
                + body
            )
        self.transport.close()


def uvicorn_settings(config: ServerConfig) -> dict[str, Any]:
    """Settings of uvicorn.Config that go with the app: its logs, headers and limits are ours."""
    return {
        "http": limited_protocol(config),
        "ws": "none",
        "lifespan": "off",
        "access_log": False,
        "log_level": "error",
        "proxy_headers": False,
        "server_header": False,
        "timeout_keep_alive": max(1, round(config.keep_alive_timeout)),
    }
