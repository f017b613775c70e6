"""Documents by the types of their dataclass: checked JSON in, JSON out.

For documents that this package writes for itself: reports and references. What a bundle from elsewhere may hold has a
schema with ranges besides.

Types of fields: str, int, float, bool, None, Any, unions of them, dataclasses, `tuple[X, ...]` and `Mapping[str, X]`.
A field with a default is left out of the file while it has that default, and need not be there. `keyed` gives a field
another name in the file.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import types
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from lockstep.artifacts.files import read_json, write_json
from lockstep.artifacts.schema import Wrong
from lockstep.errors import InputError

_REMEDY = "the file is damaged or of another version: delete it and run again"
_WORDS = {str: "a text", int: "an integer", float: "a finite number", bool: "true or false", type(None): "null"}
AnyDocument = TypeVar("AnyDocument", bound="Document")


def keyed(key: str, default: Any = dataclasses.MISSING) -> Any:
    """Return a dataclass field that is called `key` in the file."""
    return dataclasses.field(default=default, metadata={"key": key})


class Document:
    """A file of JSON. A subclass is a dataclass; FORMAT stands in the file."""

    FORMAT: ClassVar[str]

    @classmethod
    def load(cls: type[AnyDocument], path: str | os.PathLike) -> AnyDocument:
        """Read the file.

        Raises InputError for a file of another format, with the first place that is of another type.
        """
        value = read_json(path, cls.FORMAT)
        try:
            return cast(AnyDocument, decode(cls, value, ""))
        except Wrong as wrong:
            raise InputError(f"{path}: {wrong}; {_REMEDY}") from None

    def save(self, path: str | os.PathLike) -> None:
        write_json(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file, without its seal."""
        return {"format": self.FORMAT, **encode(self)}


def decode(kind: Any, value: Any, where: str) -> Any:
    """Return the value of type `kind` that `value` stands for.

    where: the place, which `Wrong` names.
    """
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _decode_fields(cast(type, kind), value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _decode_one_of(arguments, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise Wrong(where, "a list", value)
        return tuple(decode(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is not None:
        if not isinstance(value, dict):
            raise Wrong(where, "an object", value)
        return {key: decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    # `type` and not `isinstance`: JSON's true is an int in Python.
    if type(value) is not kind and not (kind is float and type(value) is int) or value in (math.inf, -math.inf):
        raise Wrong(where, _WORDS[kind], value)
    return value


def _decode_one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if len(kinds) == 2 and type(None) in kinds:
        (kind,) = set(kinds) - {type(None)}
        return None if value is None else decode(kind, value, where)
    for kind in kinds:
        try:
            return decode(kind, value, where)
        except Wrong:
            pass
    raise Wrong(where, " or ".join(_WORDS[kind] for kind in kinds), value)


def _decode_fields(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise Wrong(where, "an object", value)
    found = {}
    for name, (key, field, required) in _fields(kind).items():
        if key in value:
            found[name] = decode(field, value[key], f"{where}.{key}")
        elif required:
            raise Wrong(where, f"an object with {key}", sorted(value))
    return kind(**found)


@functools.cache
def _fields(kind: type) -> Mapping[str, tuple[str, Any, bool]]:
    """Return (key in the file, type, whether required) of a dataclass's fields."""
    hints = get_type_hints(kind)
    return {
        field.name: (_key(field), hints[field.name], not _has_default(field))
        for field in dataclasses.fields(cast(Any, kind))
    }


def _key(field: dataclasses.Field) -> str:
    return field.metadata.get("key", field.name)


def _has_default(field: dataclasses.Field) -> bool:
    return field.default is not dataclasses.MISSING


def encode(value: Any) -> Any:
    """Return the JSON of a value that `decode` gives."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        entries = {field: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {
            _key(field): encode(item)
            for field, item in entries.items()
            if not (_has_default(field) and item == field.default)
        }
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    return [encode(item) for item in value] if isinstance(value, (list, tuple)) else value
