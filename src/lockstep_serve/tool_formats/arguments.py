"""Convert arguments that a model writes as text to JSON values, by the schema of their function."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

_MAX_DEPTH = 16  # of $ref, anyOf and allOf
_MAX_SCHEMAS = 1024  # for one value: schemas that refer to themselves multiply
_TYPE_NAMES = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object",
}  # fmt: skip
_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}

Schema = Mapping[str, Any]


def properties(function: Schema) -> Mapping[str, Any] | None:
    """Return {argument: schema} of a function; None if it declares none."""
    schemas = branches(function, function)[0].get("properties")
    return schemas if isinstance(schemas, Mapping) else None


def branches(schema: Any, root: Schema) -> list[Schema]:
    """Return the alternatives of a schema, without $ref, anyOf and oneOf. root: the document of each $ref."""
    return _Resolver(root).branches(schema)


def choices(branch: Schema) -> list[Any] | None:
    """Return the values that a branch enumerates; None without an enumeration."""
    values = branch.get("enum")
    if isinstance(values, list) and values:
        return values
    return [branch["const"]] if "const" in branch else None


def kinds(schema: Any, root: Schema) -> frozenset[str] | None:
    """Return the types that a value may have, as JSON schema names them; None for any."""
    return _Resolver(root).kinds(schema)


class _Resolver:
    """Resolves the schemas of one document. After `_MAX_SCHEMAS` of them, every schema allows any value."""

    def __init__(self, root: Schema):
        self._root = root
        self._remaining = _MAX_SCHEMAS

    def branches(self, schema: Any, depth: int = 0) -> list[Schema]:
        self._remaining -= 1
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or self._remaining < 0:
            return [{}]
        for keyword in ("anyOf", "oneOf"):
            alternatives = schema.get(keyword)
            # Keywords next to it apply to every alternative.
            if isinstance(alternatives, list) and alternatives:
                branches: list[Schema] = []
                for alternative in alternatives:
                    branches += self.branches(_without(schema, keyword) | _as_dict(alternative), depth + 1)
                return branches
        # pydantic 1 writes a reference with a description as an allOf of one.
        parts = schema.get("allOf")
        if isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], Mapping):
            return self.branches({**parts[0], **_without(schema, "allOf")}, depth + 1)
        pointer = schema.get("$ref")
        if isinstance(pointer, str):
            return self.branches(_as_dict(self._target(pointer)) | _without(schema, "$ref"), depth + 1)
        return [schema]

    def _target(self, pointer: str) -> Any:
        """Return the value at a JSON pointer; None in another document, and where there is none."""
        if not pointer.startswith("#"):
            return None
        target: Any = self._root
        for name in pointer[1:].split("/")[1:]:
            target = _as_dict(target).get(name.replace("~1", "/").replace("~0", "~"))
        return target

    def kinds(self, schema: Any, depth: int = 0) -> frozenset[str] | None:
        kinds: frozenset[str] = frozenset()
        for branch in self.branches(schema, depth):
            branch_kinds = self._branch_kinds(branch, depth)
            if branch_kinds is None:
                return None
            kinds |= branch_kinds
        return kinds

    def _branch_kinds(self, branch: Schema, depth: int) -> frozenset[str] | None:
        types = branch.get("type")
        values = choices(branch)
        kinds: frozenset[str] | None = None
        if isinstance(types, str):
            kinds = frozenset([types])
        elif isinstance(types, list):
            kinds = frozenset(name for name in types if isinstance(name, str))
        elif values is not None:
            kinds = frozenset(_TYPE_NAMES.get(type(value), "") for value in values)
        parts = branch.get("allOf")
        if isinstance(parts, list) and depth <= _MAX_DEPTH:
            for part in parts:
                part_kinds = self.kinds(part, depth + 1)
                if part_kinds is not None:
                    kinds = part_kinds if kinds is None else kinds & part_kinds
        if kinds is not None and branch.get("nullable") is True:
            kinds |= {"null"}
        return kinds


def _as_dict(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _without(schema: Schema, keyword: str) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != keyword}


def coerced(text: str, function: Schema, name: str) -> Any:
    """Return the value of an argument's text: its first reading that the schema allows, else the text itself.

    Where a string is allowed, a text that has none of the other allowed types is returned unchanged.
    """
    schema = (properties(function) or {}).get(name, function.get("additionalProperties"))
    allowed = kinds(schema, function)
    for branch in branches(schema, function):
        for value in choices(branch) or ():
            if text.strip() == written(value):
                return value
    if allowed == {"string"}:
        return text
    for value in _readings(text.strip()):
        if allowed is None:
            return value
        if _has_kind(value, allowed):
            # The model wrote 3.0 where an integer is expected.
            if isinstance(value, float) and "number" not in allowed:
                return int(value)
            return value
    return text


def written(value: Any) -> str:
    """Return how a model writes a value: a string without quotes, another one as JSON."""
    return value if isinstance(value, str) else dumped(value)


def dumped(value: Any) -> str:
    """Return a value as JSON; lone surrogates, which UTF-8 cannot encode, become escapes."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        return json.dumps(value)
    return text


def _readings(text: str) -> Iterator[Any]:
    """Yield the possible values of a text, as JSON and as Python's constants, lists and dictionaries."""
    try:
        value = json.loads(text)
        dumped(value)  # not NaN, Infinity and numbers that become it
        yield value
    except (ValueError, RecursionError):
        pass
    if text in _PYTHON_CONSTANTS:
        yield _PYTHON_CONSTANTS[text]
    if text.startswith(("[", "{")):
        try:
            yield json.loads(dumped(ast.literal_eval(text)))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            pass


def _has_kind(value: Any, allowed: frozenset[str]) -> bool:
    """Return whether a value has an allowed type. False for a string where strings are allowed: it keeps its quotes."""
    kind = _TYPE_NAMES[type(value)]
    if kind == "string" and "string" in allowed:
        return False
    if kind == "integer" and "number" in allowed:
        return True
    is_whole = isinstance(value, float) and value.is_integer()
    return kind in allowed or (is_whole and "integer" in allowed)
