"""GET /v1/models: the one model that is here, by its names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from predict.server.asked import check_model
from predict.server.context import Context
from predict.server.openapi import errors
from predict.server.routes._common import json_response


def router(context: Context) -> APIRouter:
    """The routes."""
    made = APIRouter()

    def model(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": context.started,
            "owned_by": "regatta",
            "max_model_len": context.config.engine.scheduling.max_length,
        }

    @made.get("/v1/models")
    async def models(request: Request) -> Response:
        """All names."""
        return json_response(
            {"object": "list", "data": [model(name) for name in context.config.model_names]}
        )

    @made.get("/v1/models/{name:path}", responses=errors())
    async def one(name: str) -> Response:
        """The model of that name."""
        return json_response(model(check_model(name, context.config)))

    return made
