"""The OpenAPI document: routes of FastAPI, bodies of predict.server.protocol."""

from __future__ import annotations

from collections.abc import Sequence
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
    """What a route says of its body, one of these models, for FastAPI's `openapi_extra`."""
    schemas = [{"$ref": _REF + model.__name__} for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def errors() -> dict[int | str, dict[str, Any]]:
    """What a route says of its failures, for FastAPI's `responses`."""
    content = {"application/json": {"schema": {"$ref": _REF + "Error"}}}
    return {
        "4XX": {"description": "The request is wrong, or too much.", "content": content},
        "5XX": {"description": "The server cannot answer.", "content": content},
    }


def document(app: FastAPI, models: Sequence[type[Body]], root_path: str) -> dict[str, Any]:
    """The document of an app whose routes take these models, behind a proxy's path."""
    made = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template=_REF + "{model}"
    )
    components = made.setdefault("components", {}).setdefault("schemas", {})
    components.update(schemas["$defs"])
    components["Error"] = _ERROR
    for unused in ("HTTPValidationError", "ValidationError"):
        components.pop(unused, None)
    made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    made["servers"] = [{"url": root_path or "/"}]
    made["security"] = [{"key": []}, {}]
    return made
