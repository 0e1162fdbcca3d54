"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM, and the same for prefixes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from predict.server.context import Context
from predict.server.limits import read_json
from predict.server.openapi import errors, takes
from predict.server.protocol import (
    Body,
    LoadAdapterBody,
    LoadPrefixBody,
    UnloadAdapterBody,
    UnloadPrefixBody,
    parsed,
)
from predict.server.routes._common import json_response
from predict.server.served_models import LORA, PREFIX, Kind


def router(context: Context) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    def add(kind: Kind, load_body: type[Body], unload_body: type[Body]) -> None:
        async def fields(request: Request, model: type[Body]) -> Any:
            context.info()
            with context.admission.body() as held:
                return parsed(model, await read_json(request, context.config, held))

        @routes.post(kind.load_route, openapi_extra=takes(load_body), responses=errors())
        async def load(request: Request) -> Response:
            """Loads an adapter or a tuned prefix; later requests may name it as their model."""
            body = await fields(request, load_body)
            name, path = getattr(body, kind.name_field), getattr(body, kind.path_field)
            return json_response(await context.models.load(context.engine, kind, name, path))

        @routes.post(kind.unload_route, openapi_extra=takes(unload_body), responses=errors())
        async def unload(request: Request) -> Response:
            """Unloads an adapter or a tuned prefix; running requests are finished."""
            name = getattr(await fields(request, unload_body), kind.name_field)
            await context.models.unload(context.engine, kind, name)
            return json_response({"id": name, "object": "model", "deleted": True})

    add(LORA, LoadAdapterBody, UnloadAdapterBody)
    add(PREFIX, LoadPrefixBody, UnloadPrefixBody)
    return routes
