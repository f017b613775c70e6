"""The grammar of an answer, from the fields that OpenAI's and vLLM's APIs have."""

from __future__ import annotations

import json
from typing import Any

from lockstep.runtime.grammar import Grammar, Kind
from lockstep.serve.bodies import BadRequest

FIELDS = ("response_format", "guided_json", "guided_regex", "guided_grammar", "guided_choice", "structured_outputs")
_LONGEST = 1 << 18  # characters: all other requests wait while an engine reads a frame
_STRUCTURED = ("json", "json_object", "regex", "grammar", "choice")
_HARMLESS = ("disable_fallback",)  # there is no other backend to fall back to


def grammar_of(body: Any) -> Grammar | None:
    """Return the grammar in a body's fields `FIELDS`; None without any. Raises BadRequest for a bad one, or two."""
    found: list[Grammar] = []
    for name in FIELDS:
        value = getattr(body, name, None)
        if value is None:
            continue
        if name == "response_format":
            grammar = _response_format(value)
        elif name == "structured_outputs":
            grammar = _structured_outputs(value)
        else:
            grammar = _made(name.removeprefix("guided_"), value, name)
        if grammar is not None:
            found.append(grammar)
    if len(found) > 1:
        names = " and ".join(grammar.name for grammar in found)
        raise BadRequest(f"{found[1].name}: expected one form of the answer, found {names}", found[1].name)
    return found[0] if found else None


def _response_format(value: Any) -> Grammar | None:
    name = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        if value.get("json_schema") is not None:
            raise BadRequest(f"{name}: expected type json_schema beside json_schema, found json_object", name)
        schema = value.get("schema")
        return Grammar("json_object", name=name) if schema is None else _made("json", schema, name)
    if kind == "json_schema":
        given = value.get("json_schema")
        if not isinstance(given, dict) or "schema" not in given:
            raise BadRequest(f"{name}: expected a schema in json_schema.schema, found none", name)
        return _made("json", given["schema"], name)
    found = "none" if kind is None else repr(str(kind)[:60])
    raise BadRequest(f"{name}: expected type text, json_object or json_schema, found {found}", name)


def _structured_outputs(value: Any) -> Grammar | None:
    name = "structured_outputs"
    if not isinstance(value, dict):
        raise BadRequest(f"{name}: expected an object, found another value", name)
    given = {key: each for key, each in value.items() if each is not None and each is not False}
    known = [key for key in _STRUCTURED if key in given]
    if len(known) > 1 or given.keys() - {*_STRUCTURED, *_HARMLESS}:
        raise BadRequest(
            f"{name}: expected one of {', '.join(_STRUCTURED)}, found {', '.join(sorted(given))[:80]}", name
        )
    return _made(known[0], given[known[0]], name) if known else None


def _made(key: str, value: Any, name: str) -> Grammar:
    """Return the grammar of the field `name`; key: as vLLM calls what `value` is."""
    if key == "json_object":
        return Grammar("json_object", name=name)
    kinds: dict[str, Kind] = {"json": "json_schema", "regex": "regex", "grammar": "lark", "choice": "lark"}
    if key == "json":
        text = _schema(value, name)
    elif key == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
            raise BadRequest(f"{name}: expected a list of texts, found another value", name)
        text = "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in value)
    elif isinstance(value, str) and value:
        text = value
    else:
        raise BadRequest(f"{name}: expected text, found none", name)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"{name}: expected text in UTF-8, found half a surrogate pair", name) from None
    if len(text) > _LONGEST:
        raise BadRequest(f"{name}: expected at most {_LONGEST} characters, found {len(text)}", name)
    return Grammar(kinds[key], text, name)


def _schema(value: Any, name: str) -> str:
    try:
        value = json.loads(value) if isinstance(value, str) else value
        if isinstance(value, dict | bool):
            return json.dumps(value)
        found = "another value"
    except (ValueError, RecursionError) as error:
        found = str(error)
    raise BadRequest(f"{name}: expected a JSON schema, found {found}", name)
