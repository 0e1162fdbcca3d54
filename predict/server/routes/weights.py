"""POST /sleep, /wake_up and GET /is_sleeping as in vLLM, and POST /update_weights."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from predict.config.rest import Rest
from predict.errors import UserError, quoted
from predict.server.adapter_root import below_root
from predict.server.context import Context, record_of
from predict.server.engine_client import ChangeFailed
from predict.server.errors import ApiError, invalid, refused
from predict.server.limits import read_json
from predict.server.openapi import errors, takes
from predict.server.protocol import UpdateWeightsBody, parsed
from predict.server.routes._common import json_response

_NAMES = {name: name for name in ("level", "mode", "path", "digests")}


def router(context: Context) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/sleep", responses=errors())
    async def sleep(request: Request) -> Response:
        """Gives memory back, once what runs has ended; ?level=1 or 2, ?mode=wait or abort."""
        _check_sleeps(context, request)
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise invalid("level", f"level is {quoted(level)} (allowed: 1, 2)")
        mode = request.query_params.get("mode", "wait")
        try:
            rest = Rest("sleep", int(level), mode=mode)  # type: ignore[arg-type]
        except UserError as error:
            raise refused(error, _NAMES) from None
        return await done(context, rest)

    @routes.post("/wake_up", responses=errors())
    async def wake_up(request: Request) -> Response:
        """Puts weights and caches into their places."""
        _check_sleeps(context, request)
        return await done(context, Rest("wake_up"))

    @routes.get("/is_sleeping", responses=errors())
    async def is_sleeping(request: Request) -> Response:
        """Whether the model sleeps."""
        return json_response({"is_sleeping": context.engine.is_sleeping})

    @routes.post("/update_weights", openapi_extra=takes(UpdateWeightsBody), responses=errors())
    async def update_weights(request: Request) -> Response:
        """Replaces the weights by those of a folder below --weights_root."""
        _check_admin(request)
        root = context.config.weights_root
        if root is None:
            raise ApiError(403, "weights are fixed; start the server with --weights_root")
        with context.admission.body() as held:
            body = parsed(UpdateWeightsBody, await read_json(request, context.config, held))
        found = await asyncio.to_thread(
            below_root, root, body.path, "path", False, "--weights_root", "weights"
        )
        try:
            rest = Rest("update_weights", path=found, digests=body.digests, mode=body.mode)
        except UserError as error:
            raise refused(error, _NAMES) from None
        return await done(context, rest, (found, body.path))

    return routes


async def done(context: Context, rest: Rest, shown: tuple[str, str] = ("", "")) -> Response:
    """The answer to a rest that has been done. shown: a path, and what clients see in its place."""
    if not context.engine.is_ready:
        raise context.unavailable()

    def said(error: Exception) -> str:
        return str(error).replace(*shown) if shown[0] else str(error)

    try:
        await context.engine.rest(rest)
    except UserError as error:
        raise ApiError(409 if rest.path is None else 400, said(error)) from None
    except ChangeFailed as error:
        raise ApiError(500, f"{rest.act} failed: {said(error)}") from None
    return json_response({"is_sleeping": context.engine.is_sleeping})


def _check_sleeps(context: Context, request: Request) -> None:
    _check_admin(request)
    if not context.config.enable_sleep_mode:
        raise ApiError(403, "this server's model stays awake; start it with --enable_sleep_mode")


def _check_admin(request: Request) -> None:
    if not record_of(request).key.admin:
        raise ApiError(403, "this API key changes no weights; use one of an administrator")
