"""The endpoints of the server, and their OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import lockstep
from lockstep_serve.bodies import error_response

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


@dataclass(frozen=True)
class Endpoint:
    """A path of the server. body: the type that reads a request's body. error_response: words what a handler raises."""

    path: str
    handler: Callable[[Request], Awaitable[Any]]
    methods: str = "GET"
    body: type | None = None
    error_response: Callable[[Any], Response] = error_response


def openapi(endpoints: Sequence[Endpoint], has_keys: bool) -> dict[str, Any]:
    """Return the document; has_keys: requests need an API key."""
    # Endpoints share bodies; a dict removes duplicates and keeps the order of the document.
    bodies = {endpoint.body: None for endpoint in endpoints if endpoint.body is not None}
    _, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        # OpenAPI has no converters: Starlette's {name:path} becomes {name}.
        path = re.sub(r"{(\w+):\w+}", r"{\1}", endpoint.path)
        for method in endpoint.methods.split():
            paths.setdefault(path, {})[method.lower()] = _operation(method, path, endpoint.body)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Lockstep", "version": lockstep.__version__},
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": _ERROR}},
    }
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


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
