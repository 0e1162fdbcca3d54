"""GET /v1/models: the one model that is here, by its names, and its adapters."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from predict.server.context import Context
from predict.server.openapi import errors
from predict.server.routes._common import json_response


def router(context: Context) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models(request: Request) -> Response:
        """All names."""
        return json_response({"object": "list", "data": context.models.cards()})

    @routes.get("/v1/models/{name:path}", responses=errors())
    async def one(name: str) -> Response:
        """The model of that name."""
        return json_response(context.models.card(name))

    return routes
