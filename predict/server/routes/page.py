"""GET /: the page to chat on. Its files are read once, and no other file is served."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from predict.server.context import Context
from predict.server.errors import ApiError
from predict.server.openapi import errors

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

    return routes
