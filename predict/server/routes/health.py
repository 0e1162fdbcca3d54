"""GET /health, /ready, /version, /metrics, and /health and /ready under /v2."""

from __future__ import annotations

import anyio
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from predict.engine.stats import EngineStats
from predict.server.context import Context
from predict.server.engine_client import EngineDied
from predict.server.errors import ApiError
from predict.server.metrics import CONTENT_TYPE
from predict.server.openapi import errors
from predict.server.routes._common import json_response

STATS_SECONDS = 5.0  # for the engine to send its counts: a step may be long


def router(context: Context) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/health", responses=errors())
    @routes.get("/v2/health/live", responses=errors())
    async def health(request: Request) -> Response:
        """200 while the server lives, 503 when its engine has ended: start it anew then."""
        for each in (context, *context.beside):
            if not each.engine.is_alive:
                raise each.unavailable()
        return json_response({"status": "ok"})

    @routes.get("/ready", responses=errors())
    @routes.get("/v2/health/ready", responses=errors())
    async def ready(request: Request) -> Response:
        """200 when requests are answered, 503 while the model loads and once the end is near."""
        if context.lifecycle.draining:
            raise ApiError(
                503, "the server is ending", headers={"Retry-After": context.retry_after}
            )
        if not context.beside or not any(each.engine.is_ready for each in context.beside):
            context.info()
        return json_response({"status": "ready"})

    @routes.get("/version")
    async def version(request: Request) -> Response:
        """The version, and the model."""
        return json_response({"version": context.version, "model": context.config.model_names[0]})

    @routes.get("/metrics", responses=errors())
    async def metrics(request: Request) -> Response:
        """Counts and times, for Prometheus."""
        for each in (context, *context.beside):
            await _ask(each, each.config.model_names[0] if context.beside else "")
        return Response(context.metrics.render(), media_type=CONTENT_TYPE)

    return routes


async def _ask(context: Context, model: str) -> None:
    """Takes in an engine's counts. model: see Metrics.engine_said."""
    stats: EngineStats | None = None
    if context.engine.is_ready:
        try:
            with anyio.move_on_after(STATS_SECONDS):
                stats = await context.engine.stats()
        except EngineDied:
            stats = None
    info = context.engine.info if context.engine.is_ready else None
    context.metrics.engine_said(stats, info, context.config.model_names, model)
