"""The tools of a chat: what a client may ask for, checked, and how answers are read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.serve.bodies import BadRequest
from lockstep.serve.say import say_once
from lockstep.serve.tool_formats import FORMATS
from lockstep.serve.tool_formats.base import ToolFormat

_MOST_TOOLS = 128  # of a request
# levels and characters of a schema
_DEEPEST = 32
_LONGEST = 1 << 17
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_CHOICES = ("none", "auto", "required")
_NULLABLE = ("properties", "required", "items")  # of a schema, for clients that write null for nothing


@dataclass(frozen=True)
class Tools:
    """The tools of a request.

    given: as the client sent them, for the template; without nulls that are no schema. schemas: of arguments, by
    name. strict: names of functions whose calls must follow their schema. choice: "none", "auto", "required", or a
    function's name with `named`.
    """

    given: Sequence[Mapping[str, Any]]
    schemas: Mapping[str, Mapping[str, Any]]
    strict: frozenset[str]
    choice: str
    named: bool = False
    single: bool = False

    @property
    def must_call(self) -> bool:
        return self.named or self.choice == "required"


def tools_of(given: Any, choice: Any, parallel: bool | None) -> Tools | None:
    """Return the tools of a body's fields of these names; None for none. Raises BadRequest."""
    if not given:
        if choice not in (None, "none"):
            raise BadRequest("tool_choice: expected none without tools, found another value", "tool_choice")
        return None
    if not isinstance(given, list) or len(given) > _MOST_TOOLS:
        found = f"{len(given)} of them" if isinstance(given, list) else "no list"
        raise BadRequest(f"tools: expected up to {_MOST_TOOLS} tools, found {found}", "tools")
    schemas: dict[str, Mapping[str, Any]] = {}
    strict = set()
    given = [_without_nulls(tool, f"tools[{index}]") for index, tool in enumerate(given)]
    for index, tool in enumerate(given):
        name, schema, is_strict = _function(tool, f"tools[{index}]")
        if name in schemas:
            raise BadRequest(f"tools[{index}].function.name: expected each name once, found {name!r} twice", "tools")
        schemas[name] = schema
        if is_strict:
            strict.add(name)
    name, named = _chosen(choice, schemas)
    return Tools(given, schemas, frozenset(strict), name, named, parallel is False)


def _function(tool: Any, where: str) -> tuple[str, Mapping[str, Any], bool]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        found = tool.get("type") if isinstance(tool, dict) else "no object"
        raise BadRequest(f"{where}: expected an object of type function, found {ascii(found)[:60]}", "tools")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        expected = "1 to 128 letters, digits, _, . or -"
        raise BadRequest(f"{where}.function.name: expected {expected}, found {ascii(name)[:80]}", "tools")
    schema = function.get("parameters")
    schema = {"type": "object", "properties": {}} if schema is None else schema
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise BadRequest(f"{where}.function.parameters: expected the JSON schema of an object, found another", "tools")
    for key, kind, expected in (("properties", dict, "an object"), ("required", list, "a list")):
        if not isinstance(schema.get(key, kind()), kind):
            said = f"expected {expected}, found {ascii(schema[key])[:60]}"
            raise BadRequest(f"{where}.function.parameters.{key}: {said}", "tools")
    if (size := len(json.dumps(schema))) > _LONGEST:
        raise BadRequest(f"{where}.function.parameters: expected up to {_LONGEST} characters, found {size}", "tools")
    if not isinstance(is_strict := function.get("strict") or False, bool):
        raise BadRequest(f"{where}.function.strict: expected true or false, found another value", "tools")
    return name, schema, is_strict


def _without_nulls(tool: Any, where: str) -> Any:
    """Return a tool whose schema has no null as properties, required or items. Raises BadRequest for a deep schema."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    schema = function.get("parameters")
    if (depth := _depth(schema)) > _DEEPEST:
        raise BadRequest(f"{where}.function.parameters: expected up to {_DEEPEST} levels, found {depth}", "tools")
    kept = _kept(schema)
    if kept == schema:
        return tool
    say_once("null as properties, required or items of a tool's schema is taken as absent")
    return {**tool, "function": {**function, "parameters": kept}}


def _kept(value: Any) -> Any:
    if isinstance(value, list):
        return [_kept(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    return {name: _kept(entry) for name, entry in value.items() if entry is not None or name not in _NULLABLE}


def _depth(value: Any) -> int:
    """Return the levels of objects and lists; Python's own stack is not used, for they may be many."""
    deepest = 0
    waiting = [(value, 0)]
    while waiting:
        each, depth = waiting.pop()
        deepest = max(deepest, depth)
        if isinstance(each, dict | list):
            inner: Iterable[Any] = each.values() if isinstance(each, dict) else each
            waiting += [(other, depth + 1) for other in inner]
    return deepest


def _chosen(choice: Any, schemas: Mapping[str, Any]) -> tuple[str, bool]:
    if choice == "any":  # Mistral's name, and Anthropic's
        say_once('tool_choice "any" is taken as "required"')
        choice = "required"
    if choice is None or (isinstance(choice, str) and choice in _CHOICES):
        return choice or "auto", False
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        expected = 'none, auto, required or {"type": "function", "function": {"name": ...}}'
        raise BadRequest(f"tool_choice: expected {expected}; found {ascii(choice)[:80]}", "tool_choice")
    if name not in schemas:
        raise BadRequest(f"tool_choice: expected the name of one of tools, found {name[:64]!r}", "tool_choice")
    return name, True


def calling_format(format: ToolFormat, tools: Tools) -> ToolFormat:
    """Return the format that answers are read in: where calls are held, one that a grammar can be made of."""
    return format if format.call or not tools.must_call else FORMATS["json"]
