"""The tools of a chat: checks of a request's tools and tool_choice."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep_serve.bodies import BadRequest
from lockstep_serve.log import log_once
from lockstep_serve.tool_formats import FORMATS
from lockstep_serve.tool_formats.base import ToolFormat

_MAX_TOOLS = 128  # as OpenAI's API has it
_MAX_DEPTH = 32  # of a schema
_MAX_CHARACTERS = 1 << 17  # of a schema
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_CHOICES = ("none", "auto", "required")
_NULLABLE = ("properties", "required", "items")  # fields of a schema that some clients send as null


@dataclass(frozen=True)
class Tools:
    """The tools of a request.

    declared: as the client sent them, for the template, without nulls in schemas. schemas: of arguments, by name.
    strict: names of functions whose calls must follow their schema. choice: "none", "auto", "required", or a function's
    name with `named`.
    """

    declared: Sequence[Mapping[str, Any]]
    schemas: Mapping[str, Mapping[str, Any]]
    strict: frozenset[str]
    choice: str
    named: bool = False
    single: bool = False

    @property
    def must_call(self) -> bool:
        return self.named or self.choice == "required"


def tools_of(tools: Any, choice: Any, parallel: bool | None) -> Tools | None:
    """Return the tools of a body with these fields, None without any. Raises BadRequest."""
    if not tools:
        if choice not in (None, "none"):
            raise BadRequest("tool_choice: expected none without tools, found another value", "tool_choice")
        return None
    if not isinstance(tools, list):
        raise BadRequest(f"tools: expected up to {_MAX_TOOLS} tools, found no list", "tools")
    if len(tools) > _MAX_TOOLS:
        raise BadRequest(f"tools: expected up to {_MAX_TOOLS} tools, found {len(tools)} of them", "tools")
    schemas: dict[str, Mapping[str, Any]] = {}
    strict = set()
    tools = [_without_nulls(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    for index, tool in enumerate(tools):
        name, schema, is_strict = _function(tool, f"tools[{index}]")
        if name in schemas:
            raise BadRequest(f"tools[{index}].function.name: expected each name once, found {name!r} twice", "tools")
        schemas[name] = schema
        if is_strict:
            strict.add(name)
    name, named = _chosen(choice, schemas)
    return Tools(tools, schemas, frozenset(strict), name, named, parallel is False)


def _function(tool: Any, where: str) -> tuple[str, Mapping[str, Any], bool]:
    if not isinstance(tool, dict):
        raise BadRequest(f"{where}: expected an object of type function, found {ascii(tool)[:60]}", "tools")
    function = tool.get("function")
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        shown = ascii(tool.get("type"))[:60]
        raise BadRequest(f"{where}: expected an object of type function, found {shown}", "tools")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        expected = "1 to 128 letters, digits, _, . or -"
        raise BadRequest(f"{where}.function.name: expected {expected}, found {ascii(name)[:80]}", "tools")
    schema = function.get("parameters")
    if schema is None:
        schema = {"type": "object", "properties": {}}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise BadRequest(f"{where}.function.parameters: expected the JSON schema of an object, found another", "tools")
    for key, kind, expected in (("properties", dict, "an object"), ("required", list, "a list")):
        if not isinstance(schema.get(key, kind()), kind):
            fault = f"expected {expected}, found {ascii(schema[key])[:60]}"
            raise BadRequest(f"{where}.function.parameters.{key}: {fault}", "tools")
    size = len(json.dumps(schema))
    if size > _MAX_CHARACTERS:
        fault = f"expected up to {_MAX_CHARACTERS} characters, found {size}"
        raise BadRequest(f"{where}.function.parameters: {fault}", "tools")
    is_strict = function.get("strict") or False
    if not isinstance(is_strict, bool):
        raise BadRequest(f"{where}.function.strict: expected true or false, found another value", "tools")
    return name, schema, is_strict


def _without_nulls(tool: Any, where: str) -> Any:
    """Return a tool whose schema has no null as properties, required or items. Raises BadRequest for a deep schema."""
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        return tool
    function = tool["function"]
    schema = function.get("parameters")
    # Check before any code recurses over it.
    depth = _depth(schema)
    if depth > _MAX_DEPTH:
        raise BadRequest(f"{where}.function.parameters: expected up to {_MAX_DEPTH} levels, found {depth}", "tools")
    cleaned = _schema_without_nulls(schema)
    if cleaned == schema:
        return tool
    log_once("null as properties, required or items of a tool's schema is taken as absent")
    return {**tool, "function": {**function, "parameters": cleaned}}


def _schema_without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_schema_without_nulls(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    entries = {name: entry for name, entry in value.items() if entry is not None or name not in _NULLABLE}
    return {name: _schema_without_nulls(entry) for name, entry in entries.items()}


def _depth(value: Any) -> int:
    """Return the levels of objects and lists, without recursion: there may be too many for Python's stack."""
    deepest = 0
    waiting = [(value, 0)]
    while waiting:
        node, depth = waiting.pop()
        deepest = max(deepest, depth)
        if isinstance(node, dict):
            node = list(node.values())
        if isinstance(node, list):
            waiting += [(child, depth + 1) for child in node]
    return deepest


def _chosen(choice: Any, schemas: Mapping[str, Any]) -> tuple[str, bool]:
    if choice == "any":  # Mistral's name, and Anthropic's
        log_once('tool_choice "any" is taken as "required"')
        choice = "required"
    if choice is None or (isinstance(choice, str) and choice in _CHOICES):
        return choice or "auto", False
    name = None
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict):
        name = choice["function"].get("name")
    if not isinstance(name, str):
        expected = 'none, auto, required or {"type": "function", "function": {"name": ...}}'
        raise BadRequest(f"tool_choice: expected {expected}; found {ascii(choice)[:80]}", "tool_choice")
    if name not in schemas:
        raise BadRequest(f"tool_choice: expected the name of one of tools, found {name[:64]!r}", "tool_choice")
    return name, True


def calling_format(format: ToolFormat, tools: Tools) -> ToolFormat:
    """Return the format that answers are read in: forced calls need one that has a grammar."""
    if tools.must_call and not format.call:
        return FORMATS["json"]
    return format
