"""Arguments that a model writes as text, by the schema of their function: a text in, a value of JSON out."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

_DEEPEST = 16  # levels of $ref, anyOf and allOf
_MOST = 1024  # schemas that are looked at for one value: those that refer to themselves multiply
_KINDS: Mapping[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
_WORDS: Mapping[str, bool | None] = {"True": True, "False": False, "None": None}

Schema = Mapping[str, Any]


def properties(function: Schema) -> Mapping[str, Any] | None:
    """Return the schemas of a function's arguments, by name; None where nothing is known of them."""
    schema = next(iter(branches(function, function)))
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else None


def argument(function: Schema, name: str) -> Any:
    """Return the schema of an argument."""
    found = properties(function) or {}
    return found[name] if name in found else function.get("additionalProperties")


def branches(schema: Any, root: Schema, depth: int = 0, left: list[int] | None = None) -> list[Schema]:
    """Return the schemas of which a value follows one: $ref, anyOf and oneOf are resolved.

    root: what $ref is in. left: how many schemas may still be looked at; what is beyond allows any value.
    """
    left = [_MOST] if left is None else left
    left[0] -= 1
    if not isinstance(schema, Mapping) or depth > _DEEPEST or left[0] < 0:
        return [{}]
    for word in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(word), list) and choices:
            rest = {name: value for name, value in schema.items() if name != word}
            inner = [{**rest, **choice} if isinstance(choice, Mapping) else rest for choice in choices]
            return [branch for choice in inner for branch in branches(choice, root, depth + 1, left)]
    parts = schema.get("allOf")
    if isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], Mapping):
        rest = {name: value for name, value in schema.items() if name != "allOf"}
        return branches({**parts[0], **rest}, root, depth + 1, left)
    if isinstance(place := schema.get("$ref"), str):
        rest = {name: value for name, value in schema.items() if name != "$ref"}
        target = _target(root, place)
        return branches({**target, **rest} if isinstance(target, Mapping) else rest, root, depth + 1, left)
    return [schema]


def _target(root: Any, place: str) -> Any:
    """Return what a JSON pointer of a $ref names; None for another document, and where nothing is."""
    if not place.startswith("#"):
        return None
    for name in place[1:].split("/")[1:]:
        root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def choices(branch: Schema) -> list[Any] | None:
    """Return the values that a branch lists; None where it lists none."""
    values = branch.get("enum")
    if isinstance(values, list) and values:
        return values
    return [branch["const"]] if "const" in branch else None


def kinds(schema: Any, root: Schema, depth: int = 0, left: list[int] | None = None) -> frozenset[str] | None:
    """Return the types that a value may have, as JSON schema names them; None for any. left: as of `branches`."""
    left = [_MOST] if left is None else left
    found: frozenset[str] = frozenset()
    for branch in branches(schema, root, depth, left):
        of_branch = _kinds(branch, root, depth, left)
        if of_branch is None:
            return None
        found |= of_branch
    return found


def _kinds(branch: Schema, root: Schema, depth: int, left: list[int]) -> frozenset[str] | None:
    named = branch.get("type")
    values = choices(branch)
    found: frozenset[str] | None = None
    if isinstance(named, str):
        found = frozenset([named])
    elif isinstance(named, list):
        found = frozenset(name for name in named if isinstance(name, str))
    elif values is not None:
        found = frozenset(_KINDS.get(type(value), "") for value in values)
    all_of = branch.get("allOf")
    for part in all_of if isinstance(all_of, list) and depth <= _DEEPEST else ():
        other = kinds(part, root, depth + 1, left)
        found = other if found is None or other is None else found & other
    return found | {"null"} if found is not None and branch.get("nullable") is True else found


def coerced(text: str, function: Schema, name: str) -> Any:
    """Return the argument that a text stands for: the first of its readings that the schema takes, else the text.

    Where a text is taken, what is none of the other types is that text, to the character.
    """
    schema = argument(function, name)
    taken = kinds(schema, function)
    for branch in branches(schema, function):
        for value in choices(branch) or ():
            if text.strip() == written(value):
                return value
    if taken == {"string"}:
        return text
    for value in _readings(text.strip()):
        if taken is None or _is_one_of(value, taken):
            return int(value) if isinstance(value, float) and taken is not None and "number" not in taken else value
    return text


def written(value: Any) -> str:
    """Return how a model writes a value: a text as it is, another one as JSON."""
    return value if isinstance(value, str) else dumped(value)


def dumped(value: Any) -> str:
    """Return a value as JSON, with escapes where there are halves of surrogate pairs, which UTF-8 cannot have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return (
        text
        if text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
        else json.dumps(value)
    )


def _readings(text: str) -> Iterator[Any]:
    """Return what a text may stand for: JSON, or Python's constants, lists and dictionaries."""
    try:
        value = json.loads(text)
        dumped(value)  # not NaN, Infinity and numbers that become it
        yield value
    except (ValueError, RecursionError):
        pass
    if text in _WORDS:
        yield _WORDS[text]
    if text[:1] in ("[", "{"):
        try:
            yield json.loads(dumped(ast.literal_eval(text)))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            pass


def _is_one_of(value: Any, taken: frozenset[str]) -> bool:
    """Return whether a value has one of some types; a text that is quoted like JSON is one with its quotes."""
    kind = _KINDS[type(value)]
    if kind == "string" and "string" in taken:
        return False
    is_whole = isinstance(value, float) and value.is_integer()
    return kind in taken or (kind == "integer" and "number" in taken) or (is_whole and "integer" in taken)
