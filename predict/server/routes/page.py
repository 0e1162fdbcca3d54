"""GET /: the page to chat on. Its files are read once, and no other file is served.

POST /page/formula makes MathML of a formula for it, where latex2mathml is installed.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from predict.errors import UserError
from predict.server.context import Context
from predict.server.errors import ApiError, invalid
from predict.server.limits import read_json
from predict.server.openapi import errors
from predict.server.routes._common import json_response
from predict.text.formulas import Formulas

MAX_FORMULAS = 64  # that wait, of all clients
FOLDER = Path(__file__).resolve().parents[1] / "page"
# The page loads and runs files of this server only, and no text becomes HTML. Pictures that its
# reader attaches are shown from data URLs.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
}


def router(context: Context) -> APIRouter:
    """The routes; none with --chat_page false."""
    routes = APIRouter()
    if not context.config.chat_page:
        return routes
    files = {
        path.relative_to(FOLDER).as_posix(): (path.read_bytes(), TYPES[path.suffix])
        for path in sorted(FOLDER.rglob("*"))
        if path.is_file() and path.suffix in TYPES
    }

    def file(name: str) -> Response:
        if name not in files:
            raise ApiError(404, f"the page has no file {name[:80]!r}")
        data, kind = files[name]
        return Response(data, headers={**HEADERS, "Content-Type": kind})

    @routes.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        """The page."""
        return file("index.html")

    @routes.get("/static/{name:path}", responses=errors(), include_in_schema=False)
    async def static(name: str) -> Response:
        """A file of the page."""
        return file(name)

    if Formulas.is_there():
        _add_formulas(routes, context)
    return routes


def _add_formulas(routes: APIRouter, context: Context) -> None:
    """One formula at a time, beside all else."""
    formulas, thread = Formulas(), ThreadPoolExecutor(1, "regatta-formulas")
    num_waiting = 0

    @routes.post("/page/formula", include_in_schema=False)
    async def formula(request: Request) -> Response:
        """A formula as a tree of MathML: [name, attributes, text or trees...]."""
        nonlocal num_waiting
        with context.admission.body() as held:
            value = await read_json(request, context.config, held)
        latex, display = value.get("latex"), value.get("display", False)
        if not isinstance(latex, str) or not isinstance(display, bool):
            raise invalid("latex", "latex is no text, or display neither true nor false")
        if num_waiting >= MAX_FORMULAS:
            raise ApiError(429, "too many formulas wait", headers={"Retry-After": "1"})
        num_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            made = await loop.run_in_executor(thread, formulas.made, latex, display)
        except UserError as error:
            raise invalid("latex", str(error)) from None
        finally:
            num_waiting -= 1
        return json_response({"tree": made})
