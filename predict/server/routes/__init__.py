"""The server's routes: each module in this folder has `router(context)`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from fastapi import APIRouter

from predict.server.context import Context


def routers(context: Context) -> Iterator[APIRouter]:
    """The routes of every module, in the order of their names."""
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        if not name.startswith("_"):
            made: APIRouter = importlib.import_module(f"{__name__}.{name}").router(context)
            yield made
