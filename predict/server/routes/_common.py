"""The steps that routes share: reading a body, making a response, logging."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from predict.server.access_log import shortened
from predict.server.answers import to_json
from predict.server.context import Context, record_of
from predict.server.limits import read_json
from predict.server.logprobs import LogprobTexts
from predict.server.protocol import StreamOptions
from predict.server.runs import Job, Usage


@contextlib.asynccontextmanager
async def body_of(context: Context, request: Request) -> AsyncIterator[dict[str, Any]]:
    """The body of a request for an answer; its bytes count until the end of the block, or a Run.

    Raises ApiError where no answer can come, before the body is read.
    """
    context.info()
    context.admission.check_room(record_of(request).key)
    with context.admission.body() as held:
        record_of(request).body = held
        value = await read_json(request, context.config, held)
        if context.config.log_requests:
            given = value.get("messages", value.get("input", value.get("prompt")))
            record_of(request).log["prompt"] = shortened(given)
        yield value


def json_response(value: Any) -> Response:
    """A whole answer."""
    return Response(to_json(value), media_type="application/json")


def logprob_texts(context: Context, num_top: int | None) -> LogprobTexts | None:
    """Makes logprobs with so many likeliest tokens; None where num_top is None."""
    return None if num_top is None else LogprobTexts(context.front.token_texts, num_top)


def usage_of(options: StreamOptions | None, job: Job) -> tuple[bool, Usage | None]:
    """Whether a stream ends with counts of tokens, and the counts that each event shows, if any."""
    with_usage = bool(options and options.include_usage)
    continuous = with_usage and bool(options and options.continuous_usage_stats)
    return with_usage, job.usage if continuous else None


def log_answer(context: Context, request: Request, text: str) -> None:
    """Notes an answer for the log, with --log_requests."""
    if context.config.log_requests:
        record_of(request).log["answer"] = shortened(text)
