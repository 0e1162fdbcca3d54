"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters come and go, as vLLM has it."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from predict.server.context import Context, EngineDied
from predict.server.limits import read_json
from predict.server.openapi import errors, takes
from predict.server.protocol import Body, LoadAdapterBody, UnloadAdapterBody, parsed
from predict.server.routes._common import json_response

BodyT = TypeVar("BodyT", bound=Body)


def router(context: Context) -> APIRouter:
    """The routes."""
    made = APIRouter()

    async def body_of(request: Request, kind: type[BodyT]) -> BodyT:
        context.info()
        with context.admission.body() as held:
            return parsed(kind, await read_json(request, context.config, held))

    @made.post("/v1/load_lora_adapter", openapi_extra=takes(LoadAdapterBody), responses=errors())
    async def load(request: Request) -> Response:
        """Loads an adapter of a folder; requests may name it as their model from then on."""
        body = await body_of(request, LoadAdapterBody)
        try:
            card = await context.models.load(context.engine, body.lora_name, body.lora_path)
        except EngineDied:
            raise context.unavailable() from None
        return json_response(card)

    @made.post(
        "/v1/unload_lora_adapter", openapi_extra=takes(UnloadAdapterBody), responses=errors()
    )
    async def unload(request: Request) -> Response:
        """Takes an adapter away; requests that run go on to their ends."""
        body = await body_of(request, UnloadAdapterBody)
        try:
            await context.models.unload(context.engine, body.lora_name)
        except EngineDied:
            raise context.unavailable() from None
        gone: dict[str, Any] = {"id": body.lora_name, "object": "model", "deleted": True}
        return json_response(gone)

    return made
