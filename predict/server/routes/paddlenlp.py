"""PaddleNLP's routes: /api/chat, and the paths that llm/server has for OpenAI's."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from predict.server.context import Context
from predict.server.openapi import errors, takes
from predict.server.paddle_bodies import FlaskBody, old_flask_answered
from predict.server.protocol import ChatBody, CompletionBody, parsed
from predict.server.routes._common import body_of
from predict.server.routes.chat import answered
from predict.server.routes.completions import completed


def router(context: Context) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/api/chat", openapi_extra=takes(FlaskBody), responses=errors())
    async def old_chat(request: Request) -> Response:
        """Answers a question of flask_server.py's older clients, a line of JSON per piece."""
        async with body_of(context, request) as value:
            return await old_flask_answered(context, request, value)

    # A base_url of .../v1/chat/completions, as llm/server's page has it.
    base = "/v1/chat/completions"

    @routes.post(f"{base}/chat/completions", openapi_extra=takes(ChatBody), responses=errors())
    async def chat(request: Request) -> Response:
        """As /v1/chat/completions."""
        async with body_of(context, request) as value:
            return await answered(context, request, parsed(ChatBody, value))

    @routes.post(f"{base}/completions", openapi_extra=takes(CompletionBody), responses=errors())
    async def complete(request: Request) -> Response:
        """As /v1/completions."""
        async with body_of(context, request) as value:
            return await completed(context, request, parsed(CompletionBody, value))

    return routes
