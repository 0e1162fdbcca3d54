"""Errors that clients see: OpenAI's error body, with the field that is at fault."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from predict.errors import UserError

MAX_MESSAGE = 2000  # characters


class _Kind(NamedTuple):
    type: str
    code: str | None


# Paths whose errors have the body of the Messages API.
MESSAGES_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
# Status -> the Messages API's name of it, where it is not OpenAI's.
_MESSAGES_KINDS: Mapping[int, str] = {
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Status -> OpenAI's names of it.
_KINDS: Mapping[int, _Kind] = {
    400: _Kind("invalid_request_error", None),
    401: _Kind("authentication_error", "invalid_api_key"),
    403: _Kind("permission_error", None),
    404: _Kind("invalid_request_error", "not_found"),
    405: _Kind("invalid_request_error", "method_not_allowed"),
    408: _Kind("invalid_request_error", "request_timeout"),
    409: _Kind("invalid_request_error", "conflict"),
    413: _Kind("invalid_request_error", "request_too_large"),
    415: _Kind("invalid_request_error", "unsupported_media_type"),
    429: _Kind("rate_limit_error", "rate_limit_exceeded"),
    431: _Kind("invalid_request_error", "headers_too_large"),
    500: _Kind("server_error", "internal_error"),
    503: _Kind("server_error", "service_unavailable"),
    504: _Kind("server_error", "timeout"),
}
_WORD = re.compile(r"[A-Za-z_]\w*")


class ApiError(Exception):
    """Ends a request with a status and a body: what was got, what is allowed, what to change."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """param: the field at fault, as "messages[2].role". code: for programs."""
        super().__init__(message)
        self.status = status
        self.message = " ".join(message.split())[:MAX_MESSAGE]
        self.param = param
        self.code = code or _kind(status).code
        self.headers = dict(headers or {})
        self.extra: dict[str, Any] = {}  # further fields of the body, for PaddleNLP's clients

    @property
    def content(self) -> dict[str, Any]:
        """The body: {"error": {"message", "type", "param", "code"}}, and `extra`."""
        kind = _kind(self.status).type
        return {
            **self.extra,
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            },
        }

    @property
    def body(self) -> bytes:
        """The body as JSON."""
        return msgspec.json.encode(self.content)

    def messages_content(self, request_id: str) -> dict[str, Any]:
        """The body of the Messages API, with the field and the code beside its own.

        The message names the field: clients of this API show nothing else.
        """
        kind = _MESSAGES_KINDS.get(self.status, _kind(self.status).type)
        said = self.message
        if self.param is not None and self.param not in said:
            said = f"{self.param}: {said}"
        error = {**self.content["error"], "type": kind, "message": said}
        return {"type": "error", "error": error, "request_id": request_id}


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """The error for a field that has a wrong value."""
    return ApiError(400, message, param=param, code=code)


def refused(error: UserError, names: Mapping[str, str], default: str | None = None) -> ApiError:
    """A UserError of the package as a client's error.

    names: field of the package -> field of the request; messages begin with the name of the field
    at fault. default: the field where a message begins with another word.
    """
    message = str(error)
    word = _WORD.match(message)
    name = None if word is None else word[0]
    param = default
    if name is not None and name in names:
        param = names[name]
        message = f"{param}{message[len(name) :]}"
    return invalid(param, message)


def _kind(status: int) -> _Kind:
    return _KINDS.get(status, _Kind("server_error" if status >= 500 else _KINDS[400].type, None))
