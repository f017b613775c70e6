"""Check what a JSON document must look like, by small checks put together.

In: a value and the place it stands at. Out: nothing, or InputError. Hand-made, since documents are also read where only
an engine's runtime is installed. Keys that a schema does not name are allowed: a newer writer may add some.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from lockstep.errors import InputError

# Called with a value and where it stands; raises `Wrong`.
Check = Callable[[Any, str], None]


class Wrong(Exception):
    """A value that is not of its schema.

    The message says where, what was expected and what was found.
    """

    def __init__(self, where: str, expected: str, found: Any) -> None:
        self.where, self.expected, self.found = where, expected, found
        place = f"{_short(where.removeprefix('.'))}: " if where else ""
        super().__init__(f"{place}expected {_short(expected)}, found {_short(ascii(found))}")


def check(value: Any, schema: Check, path: object, remedy: str) -> None:
    """Check `value` against `schema`.

    Raises InputError, one line that opens with `path` and ends with `remedy`, where `value` is not of `schema`.
    """
    try:
        schema(value, "")
    except Wrong as wrong:
        raise InputError(f"{path}: {wrong}; {remedy}") from None


def integer(low: int, high: int) -> Check:
    def check_integer(value: Any, where: str) -> None:
        if type(value) is not int or not low <= value <= high:
            raise Wrong(where, f"an integer from {low} to {high}", value)

    return check_integer


def number(value: Any, where: str) -> None:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise Wrong(where, "a finite number", value)


def text(pattern: str, words: str) -> Check:
    """Return the check of a string that matches all of `pattern`.

    words: what the string is.
    """
    compiled = re.compile(pattern)

    def check_text(value: Any, where: str) -> None:
        if not isinstance(value, str) or not compiled.fullmatch(value):
            raise Wrong(where, words, value)

    return check_text


def one_of(*choices: str) -> Check:
    def check_choice(value: Any, where: str) -> None:
        if not isinstance(value, str) or value not in choices:
            raise Wrong(where, f"one of {', '.join(choices)}", value)

    return check_choice


def optional(schema: Check) -> Check:
    """Return the check of null or a value of `schema`."""

    def check_optional(value: Any, where: str) -> None:
        if value is not None:
            schema(value, where)

    return check_optional


def either(*schemas: Check, words: str) -> Check:
    def check_either(value: Any, where: str) -> None:
        for schema in schemas:
            try:
                return schema(value, where)
            except Wrong:
                pass
        raise Wrong(where, words, value)

    return check_either


def items(schema: Check, most: int, least: int = 0) -> Check:
    """Return the check of a list of `least` to `most` values of `schema`."""

    def check_items(value: Any, where: str) -> None:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise Wrong(where, f"a list of {least} to {most}", value)
        for index, item in enumerate(value):
            schema(item, f"{where}[{index}]")

    return check_items


def mapping(schema: Check, keys: Check) -> Check:
    """Return the check of an object with keys of `keys` and values of `schema`."""

    def check_mapping(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise Wrong(where, "an object", value)
        for key, item in value.items():
            keys(key, f"{where}: name")
            schema(item, f"{where}.{key}")

    return check_mapping


def record(required: Mapping[str, Check], others: Mapping[str, Check] | None = None) -> Check:
    """Return the check of an object with the keys of `required`.

    Those of `others` may be there.
    """

    def check_record(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise Wrong(where, f"an object with {_listed(required)}", value)
        for key, schema in required.items():
            if key not in value:
                raise Wrong(where, f"an object with {_listed(required)}", sorted(value))
            schema(value[key], f"{where}.{key}")
        for key, schema in (others or {}).items():
            if key in value:
                schema(value[key], f"{where}.{key}")

    return check_record


def _short(words: str) -> str:
    """Cut a line that quotes what is in the document, which may be long."""
    return words if len(words) <= 120 else f"{words[:117]}..."


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names))
