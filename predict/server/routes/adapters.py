"""POST /v1/load_lora_adapter, /v1/unload_lora_adapter: adapters come and go, as vLLM has it.

And likewise tuned prefixes: POST /v1/load_prefix, /v1/unload_prefix.
"""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from predict.server.context import Context, EngineDied
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

BodyT = TypeVar("BodyT", bound=Body)


def router(context: Context) -> APIRouter:
    """The routes."""
    made = APIRouter()

    async def body_of(request: Request, kind: type[BodyT]) -> BodyT:
        context.info()
        with context.admission.body() as held:
            return parsed(kind, await read_json(request, context.config, held))

    async def loaded(kind: Kind, name: str, path: str) -> Response:
        try:
            return json_response(await context.models.load(context.engine, kind, name, path))
        except EngineDied:
            raise context.unavailable() from None

    async def unloaded(kind: Kind, name: str) -> Response:
        try:
            await context.models.unload(context.engine, kind, name)
        except EngineDied:
            raise context.unavailable() from None
        gone: dict[str, Any] = {"id": name, "object": "model", "deleted": True}
        return json_response(gone)

    @made.post("/v1/load_lora_adapter", openapi_extra=takes(LoadAdapterBody), responses=errors())
    async def load(request: Request) -> Response:
        """Loads an adapter of a folder; requests may name it as their model from then on."""
        body = await body_of(request, LoadAdapterBody)
        return await loaded(LORA, body.lora_name, body.lora_path)

    @made.post(
        "/v1/unload_lora_adapter", openapi_extra=takes(UnloadAdapterBody), responses=errors()
    )
    async def unload(request: Request) -> Response:
        """Takes an adapter away; requests that run go on to their ends."""
        body = await body_of(request, UnloadAdapterBody)
        return await unloaded(LORA, body.lora_name)

    @made.post("/v1/load_prefix", openapi_extra=takes(LoadPrefixBody), responses=errors())
    async def load_prefix(request: Request) -> Response:
        """Loads a tuned prefix; requests may name it as their model from then on."""
        body = await body_of(request, LoadPrefixBody)
        return await loaded(PREFIX, body.prefix_name, body.prefix_path)

    @made.post("/v1/unload_prefix", openapi_extra=takes(UnloadPrefixBody), responses=errors())
    async def unload_prefix(request: Request) -> Response:
        """Takes a tuned prefix away; requests that run go on to their ends."""
        body = await body_of(request, UnloadPrefixBody)
        return await unloaded(PREFIX, body.prefix_name)

    return made
