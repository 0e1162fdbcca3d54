"""POST /v1/messages and /v1/messages/count_tokens: the next message of a conversation."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from predict.server.answer_blocks import whole
from predict.server.context import Context, record_of
from predict.server.errors import MESSAGES_PATHS, invalid
from predict.server.messages import CountBody, MessagesBody, asked
from predict.server.messages_events import MessageEvents
from predict.server.openapi import errors, takes
from predict.server.protocol import parsed
from predict.server.routes._common import body_of, json_response, log_answer
from predict.server.runs import Run, Stream
from predict.server.turns import num_prompt_tokens, ready_turn

VERSIONS = ("2026-10-21", "2023-06-01")  # what they differ in is taken with both


def router(context: Context) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    create_path, count_path = MESSAGES_PATHS

    @routes.post(create_path, openapi_extra=takes(MessagesBody), responses=errors())
    async def create(request: Request) -> Response:
        """Answers a conversation with a message."""
        _check_version(request)
        async with body_of(context, request) as value:
            return await _answered(context, request, parsed(MessagesBody, value))

    @routes.post(count_path, openapi_extra=takes(CountBody), responses=errors())
    async def count(request: Request) -> Response:
        """The tokens of a conversation as the model reads it."""
        _check_version(request)
        async with body_of(context, request) as value:
            chat, name_of = asked(parsed(CountBody, value))
            return json_response({"input_tokens": await num_prompt_tokens(context, chat, name_of)})

    return routes


async def _answered(context: Context, request: Request, body: MessagesBody) -> Response:
    """The answer to a body. Raises ApiError."""
    chat, name_of = asked(body)
    ready = await ready_turn(context, chat, name_of, tells_stops=True)
    job = ready.job
    events = MessageEvents(context, ready, body, record_of(request).request_id, body.max_tokens)
    if body.stream:
        return Stream(Run(context, request, job, streamed=True), job, events)
    async with Run(context, request, job, streamed=False) as run:
        (output,) = await run.outputs()
    log_answer(context, request, output.text)
    await whole(events, output)
    return json_response(events.message)


def _check_version(request: Request) -> None:
    """Raises ApiError 400 for a version of the API that is not known; none is as the first."""
    version = request.headers.get("anthropic-version", VERSIONS[0])
    if version not in VERSIONS:
        raise invalid(
            "anthropic-version",
            f"anthropic-version is {version[:80]!r} (allowed: {', '.join(VERSIONS)})",
        )
