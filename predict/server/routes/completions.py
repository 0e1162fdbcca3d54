"""POST /v1/completions: continues texts."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from predict.server.answers import CompletionEvents, Echo, Identity, as_events, completion
from predict.server.asked import Asked, asked_of, form_of, given_params
from predict.server.context import Context
from predict.server.errors import invalid
from predict.server.openapi import errors, takes
from predict.server.paddle_bodies import NativeBody, is_native, native_answered
from predict.server.protocol import CompletionBody, parsed
from predict.server.routes._common import (
    body_of,
    json_response,
    log_answer,
    logprob_texts,
    usage_of,
)
from predict.server.runs import Job, Run, Stream
from predict.server.served_models import ServedModel
from predict.system.bounds import is_integer
from predict.system.files import json_type

DEFAULT_TOKENS = 16  # of an answer, as in OpenAI's API


def router(context: Context) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post(
        "/v1/completions", openapi_extra=takes(CompletionBody, NativeBody), responses=errors()
    )
    async def complete(request: Request) -> Response:
        """Continues one text, or several."""
        async with body_of(context, request) as value:
            if is_native(value):
                return await native_answered(context, request, value)
            body = parsed(CompletionBody, value)
            return await completed(context, request, body)

    return routes


async def completed(context: Context, request: Request, body: CompletionBody) -> Response:
    """The answer to a body. Raises ApiError."""
    model = context.models.find(body.model)
    is_empty = _is_empty(body)
    asked = _asked(context, body, model)
    params = asked.params
    prompts = await _prompts(context, body)
    job = Job(prompts, params, asked.refused)
    identity = Identity("cmpl", "text_completion", model.name)
    logprobs = logprob_texts(context, params.logprobs)
    echoed = await _echoed(context, body, prompts, logprobs is not None) if body.echo else None
    with_usage, usage_so_far = usage_of(body.stream_options, job)
    # What is measured of prompts, and an answer of no tokens, is known at once.
    is_whole = params.prompt_logprobs is not None or is_empty
    if body.stream and not is_whole:
        before = None if echoed is None else [echo.text for echo in echoed]
        events = CompletionEvents(
            *(identity, params.n, with_usage, logprobs, before, prompts, usage_so_far)
        )
        return Stream(Run(context, request, job, streamed=True), job, events)
    async with Run(context, request, job, streamed=False) as run:
        outputs = await run.outputs()
    log_answer(context, request, outputs[0].text)
    whole = completion(identity, outputs, job.usage, logprobs, echoed, is_empty)
    if body.stream:
        return Response(as_events(whole, with_usage), media_type=CompletionEvents.media_type)
    return json_response(whole)


async def _echoed(
    context: Context, body: CompletionBody, prompts: list[list[int]], measured: bool
) -> list[Echo]:
    """The prompts in front of their answers. measured: with logprobs of their tokens."""
    found: list[Echo] = []
    for given, token_ids in zip(_listed(body.prompt), prompts, strict=True):
        text = given if isinstance(given, str) else await context.front.decode(given, "prompt")
        texts: list[str] = []
        if measured and context.front.token_texts is not None:
            texts = await context.front.prompt_texts(token_ids, text)
        found.append(Echo(text, texts))
    return found


def _asked(context: Context, body: CompletionBody, model: ServedModel) -> Asked:
    extra: dict[str, Any] = {"adapter": model.adapter}
    if body.logprobs is not None:
        extra["logprobs"] = body.logprobs
        if body.echo:
            extra["prompt_logprobs"] = body.logprobs
    given, _ = given_params(body)
    if _is_empty(body):
        body = body.model_copy(update={"max_tokens": 1})
    elif not {"max_new_tokens", "max_length"} & {*given, *context.config.sampling_defaults}:
        extra["max_new_tokens"] = DEFAULT_TOKENS
    return asked_of(body, context.config, extra, form_of(body, context.config))


def _is_empty(body: CompletionBody) -> bool:
    """Whether no token is asked for: one is made, and nothing of it shown or counted."""
    return is_integer(body.max_tokens) and body.max_tokens == 0


def _listed(prompt: Any) -> list[Any]:
    """The prompts of a body, as a list of texts and of lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise invalid(
            "prompt",
            f"prompt is {json_type(prompt)} (allowed: a text, token ids, or a list of these)",
        )
    return [prompt] if prompt and is_integer(prompt[0]) else prompt


async def _prompts(context: Context, body: CompletionBody) -> list[list[int]]:
    """The token ids of each prompt. Raises ApiError 400."""
    listed = _listed(body.prompt)
    most = context.config.max_prompts
    if not 0 < len(listed) <= most:
        raise invalid("prompt", f"prompt has {len(listed)} prompts (allowed: 1 to {most})")
    vocab_size = context.info().vocab_size
    found: list[list[int]] = []
    for index, prompt in enumerate(listed):
        where = "prompt" if len(listed) == 1 else f"prompt[{index}]"
        if isinstance(prompt, str):
            special = body.add_special_tokens is not False
            found.append(await context.front.encode(prompt, where, special))
        elif isinstance(prompt, list):
            found.append(context.front.token_ids(prompt, where, vocab_size))
        else:
            raise invalid(where, f"{where} is {json_type(prompt)} (allowed: a text, token ids)")
    return found
