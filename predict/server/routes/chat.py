"""POST /v1/chat/completions: the next turn of a conversation."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from predict.server.answers import ChatEvents, Identity, chat_completion
from predict.server.context import Context
from predict.server.errors import invalid
from predict.server.openapi import errors, takes
from predict.server.paddle_bodies import (
    FlaskBody,
    NativeBody,
    flask_answered,
    is_flask,
    is_native,
    native_answered,
)
from predict.server.protocol import ChatBody, parsed
from predict.server.routes._common import (
    body_of,
    json_response,
    log_answer,
    logprob_texts,
    usage_of,
)
from predict.server.runs import Run, Stream
from predict.server.turns import ready_turn


def router(context: Context) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post(
        "/v1/chat/completions",
        openapi_extra=takes(ChatBody, FlaskBody, NativeBody),
        responses=errors(),
    )
    async def chat(request: Request) -> Response:
        """Answers a conversation; bodies of PaddleNLP's forms in its own ones."""
        async with body_of(context, request) as value:
            if is_native(value):
                return await native_answered(context, request, value)
            if is_flask(value):
                return await flask_answered(context, request, value)
            return await answered(context, request, parsed(ChatBody, value))

    return routes


async def answered(context: Context, request: Request, body: ChatBody) -> Response:
    """The answer to a body. Raises ApiError."""
    model, job, make_reader = await ready_turn(context, body)
    identity = Identity(
        "chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion", model
    )
    logprobs = logprob_texts(context, job.params.logprobs)
    if body.stream:
        if job.params.prompt_logprobs is not None:
            raise invalid(
                "prompt_logprobs", "prompt_logprobs cannot be streamed; leave out one of the two"
            )
        with_usage, usage_so_far = usage_of(body.stream_options, job)
        events = ChatEvents(identity, with_usage, make_reader, logprobs, usage_so_far)
        return Stream(Run(context, request, job, streamed=True), job, events)
    async with Run(context, request, job, streamed=False) as run:
        (output,) = await run.outputs()
    log_answer(context, request, output.text)
    return json_response(chat_completion(identity, output, job.usage, make_reader, logprobs))
