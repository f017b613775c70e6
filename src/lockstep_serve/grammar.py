"""The grammar of an answer, from the fields of OpenAI's and vLLM's APIs."""

from __future__ import annotations

import json
from typing import Any

from lockstep.runtime.grammar import Grammar, Kind
from lockstep_serve.bodies import BadRequest

_MAX_CHARACTERS = 1 << 18  # the engine does not step while it reads a frame
_KINDS: dict[str, Kind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "lark",
    "choice": "lark",
}
_IGNORED = ("disable_fallback",)  # there is no other backend to fall back to


def grammar_of(body: Any) -> Grammar | None:
    """Return the grammar of an answer, None without one. Raises BadRequest for an invalid one, and for two."""
    form = _response_format(body.response_format)
    constraint = _structured_outputs(body.structured_outputs)
    if form is not None and constraint is not None:
        name = constraint.name
        raise BadRequest(f"{name}: expected one constraint on the answer, found {form.name} and {name}", name)
    return constraint or form


def _response_format(value: Any) -> Grammar | None:
    if value is None:
        return None
    name = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        if value.get("json_schema") is not None:
            raise BadRequest(f"{name}: expected type json_schema with json_schema, found json_object", name)
        if value.get("schema") is None:
            return Grammar("json_object", name=name)
        return _grammar("json", value["schema"], name)
    if kind == "json_schema":
        schema_field = value.get("json_schema")
        if not isinstance(schema_field, dict) or "schema" not in schema_field:
            raise BadRequest(f"{name}: expected a schema in json_schema.schema, found none", name)
        return _grammar("json", schema_field["schema"], name)
    shown = "none"
    if kind is not None:
        shown = repr(str(kind)[:60])
    raise BadRequest(f"{name}: expected type text, json_object or json_schema, found {shown}", name)


def _structured_outputs(value: Any) -> Grammar | None:
    if value is None:
        return None
    name = "structured_outputs"
    if not isinstance(value, dict):
        raise BadRequest(f"{name}: expected an object, found another value", name)
    # Clients send unused fields as null or false.
    set_keys = {key for key, setting in value.items() if setting is not None and setting is not False}
    keys = [key for key in _KINDS if key in set_keys]
    if len(keys) > 1 or set_keys - {*_KINDS, *_IGNORED}:
        raise BadRequest(f"{name}: expected one of {', '.join(_KINDS)}, found {', '.join(sorted(set_keys))[:80]}", name)
    if not keys:
        return None
    return _grammar(keys[0], value[keys[0]], name)


def _grammar(key: str, value: Any, name: str) -> Grammar:
    """Return the grammar of the field `name`; key: vLLM's name of its kind."""
    if key == "json_object":
        return Grammar("json_object", name=name)
    if key == "json":
        text = _schema(value, name)
    elif key == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
            raise BadRequest(f"{name}: expected a list of texts, found another value", name)
        # Lark's strings have the syntax of JSON's.
        text = "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in value)
    elif isinstance(value, str) and value:
        text = value
    else:
        raise BadRequest(f"{name}: expected text, found none", name)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"{name}: expected text in UTF-8, found a lone surrogate", name) from None
    if len(text) > _MAX_CHARACTERS:
        raise BadRequest(f"{name}: expected at most {_MAX_CHARACTERS} characters, found {len(text)}", name)
    return Grammar(_KINDS[key], text, name)


def _schema(value: Any, name: str) -> str:
    try:
        if isinstance(value, str):
            value = json.loads(value)
        if isinstance(value, dict | bool):
            return json.dumps(value)
        fault = "another value"
    except (ValueError, RecursionError) as error:
        fault = str(error)
    raise BadRequest(f"{name}: expected a JSON schema, found {fault}", name)
