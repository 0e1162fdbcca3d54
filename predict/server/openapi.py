"""The OpenAPI document: routes of FastAPI, bodies of all classes of protocol.Body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from predict.server.protocol import Body

_REF = "#/components/schemas/"
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def takes(*models: type[Body]) -> dict[str, Any]:
    """FastAPI's `openapi_extra` of a route whose body is one of these models."""
    schemas = [{"$ref": _REF + model.__name__} for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def asks(params: Mapping[str, str]) -> dict[str, Any]:
    """FastAPI's `openapi_extra` of a route with these parameters behind its path, by type."""
    return {
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": {"type": kind}}
            for name, kind in params.items()
        ]
    }


def errors() -> dict[int | str, dict[str, Any]]:
    """FastAPI's `responses` of a route that may fail."""
    content = {"application/json": {"schema": {"$ref": _REF + "Error"}}}
    return {
        "4XX": {"description": "The request is wrong, or too much.", "content": content},
        "5XX": {"description": "The server cannot answer.", "content": content},
    }


def document(app: FastAPI, root_path: str) -> dict[str, Any]:
    """The document of an app behind a proxy's path."""
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, schemas = models_json_schema(
        [(model, "validation") for model in _subclasses(Body)], ref_template=_REF + "{model}"
    )
    components = found.setdefault("components", {}).setdefault("schemas", {})
    components.update(schemas["$defs"])
    components["Error"] = _ERROR
    for unused in ("HTTPValidationError", "ValidationError", "GenerationBody"):
        components.pop(unused, None)
    found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    found["servers"] = [{"url": root_path or "/"}]
    found["security"] = [{"key": []}, {}]
    return found


def _subclasses(model: type[Body]) -> list[type[Body]]:
    return [each for sub in model.__subclasses__() for each in (sub, *_subclasses(sub))]
