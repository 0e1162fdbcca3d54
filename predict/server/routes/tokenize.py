"""POST /tokenize and /detokenize: a text as token ids, and back."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from predict.errors import UserError
from predict.server.asked import template_values
from predict.server.context import Context
from predict.server.errors import invalid
from predict.server.openapi import errors, takes
from predict.server.protocol import DetokenizeBody, TokenizeBody, parsed
from predict.server.routes._common import body_of, json_response
from predict.server.turns import turn_of
from predict.system.bounds import items


def router(context: Context) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/tokenize", openapi_extra=takes(TokenizeBody), responses=errors())
    async def tokenize(request: Request) -> Response:
        """The token ids of a text, or of a conversation as the model reads it."""
        async with body_of(context, request) as value:
            body = parsed(TokenizeBody, value)
            context.models.find(body.model)
            ids = await _token_ids(context, body)
        length = context.config.engine.max_length
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": length, "tokens": ids}
        if body.return_token_strs:
            texts = context.front.token_texts
            answer["token_strs"] = [texts[i].text for i in ids] if texts is not None else None
        return json_response(answer)

    @routes.post("/detokenize", openapi_extra=takes(DetokenizeBody), responses=errors())
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special tokens written out."""
        async with body_of(context, request) as value:
            body = parsed(DetokenizeBody, value)
            context.models.find(body.model)
            most = context.config.engine.max_length
            try:
                ids = items("tokens", body.tokens, most, "a list of token ids")
            except UserError as error:
                raise invalid("tokens", str(error)) from None
            if not ids:
                return json_response({"prompt": ""})
            ids = context.front.token_ids(ids, "tokens", context.info().vocab_size)
            return json_response({"prompt": await context.front.decode(ids, "tokens")})

    return routes


async def _token_ids(context: Context, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "the body needs prompt or messages, one of the two")
    if body.prompt is not None:
        if not body.prompt:
            return []
        special = body.add_special_tokens is not False
        return await context.front.encode(body.prompt, "prompt", special)
    assert body.messages is not None
    use = context.model_text.use_of(body.tools, None, None)
    values = template_values(body.chat_template_kwargs, None)
    turn = await turn_of(context, body.messages, values, body.tools, use)
    return turn.token_ids
