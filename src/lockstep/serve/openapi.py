"""The routes of the application, and the types that read their bodies, to an OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route

import lockstep

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
            "required": ["message", "type"],
        }
    },
    "required": ["error"],
}


def openapi(routes: Sequence[BaseRoute], bodies: Mapping[str, type], has_keys: bool) -> dict[str, Any]:
    """Return the document; bodies: of requests, by path. has_keys: requests must bring a key."""
    _, schemas = msgspec.json.schema_components(bodies.values(), ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for route in routes:
        assert isinstance(route, Route)
        path = re.sub(r"{(\w+):\w+}", r"{\1}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation = _operation(method, path, bodies.get(route.path))
            paths.setdefault(path, {})[method.lower()] = operation
    security = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if has_keys else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Lockstep", "version": lockstep.__version__},
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": _ERROR}, **security},
        **({"security": [{"key": []}]} if has_keys else {}),
    }


def _operation(method: str, path: str, body: type | None) -> dict[str, Any]:
    words = "_".join(re.findall(r"\w+", path)) or "page"
    operation: dict[str, Any] = {"operationId": f"{method.lower()}_{words}"}
    if names := re.findall(r"{(\w+)}", path):
        schema = {"type": "string"}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]
    if body is not None:
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
        operation["requestBody"] = {"required": True, "content": content}
    answer: dict[str, Any] = {"description": "The answer."}
    if body is not None:
        answer["content"] = {"application/json": {"schema": {}}}
        if "stream" in body.__struct_fields__:  # type: ignore[attr-defined]
            answer["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    refusal = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    operation["responses"] = {"200": answer, "default": {"description": "Why there is none.", "content": refusal}}
    return operation
