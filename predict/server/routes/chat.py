"""POST /v1/chat/completions: the next turn of a conversation."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from predict.server.answers import ChatEvents, Identity, chat_completion
from predict.server.asked import (
    asked_of,
    form_of,
    template_values,
)
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
from predict.server.runs import Job, Run, Stream
from predict.server.turns import turn_of
from predict.text.deltas import Reader


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
    model = context.models.find(body.model)
    texts = context.model_text
    use = texts.use_of(body.tools, body.tool_choice, body.parallel_tool_calls)
    values = template_values(body.chat_template_kwargs, body.reasoning_effort)
    given = form_of(body, context.config)
    # What is wrong is told before anything is rendered.
    asked = asked_of(body, context.config, {"adapter": model.adapter, **_logprobs(body)}, given)
    turn = await turn_of(context, body.messages, values, body.tools, use)
    form = texts.form(given, use, turn.prompt)
    asked = asked.behind(form, texts.answer_form(use, turn.prompt))
    job = Job([turn.token_ids], asked.params, asked.refused)
    identity = Identity(
        "chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion", model.name
    )
    logprobs = logprob_texts(context, asked.params.logprobs)

    def make_reader() -> Reader | None:
        return texts.reader(use, turn.prompt, turn.token_ids, asked.params)

    if body.stream:
        if asked.params.prompt_logprobs is not None:
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


def _logprobs(body: ChatBody) -> dict[str, Any]:
    """The field of SamplingParams that a chat's two fields stand for. Raises ApiError 400."""
    if body.logprobs:
        return {"logprobs": 0 if body.top_logprobs is None else body.top_logprobs}
    if body.top_logprobs is not None and body.top_logprobs != 0:
        raise invalid("top_logprobs", "top_logprobs needs logprobs; set logprobs to true")
    return {}
