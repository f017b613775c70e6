"""Typed documents: JSON in and out, by the annotations of a dataclass.

In: the JSON of a file, or of another process. Out: a frozen dataclass whose every entry has its type and is within its
bounds, or `ValidationError`, a line with the entry, the expected and the actual value. Standard library only: documents
are also read where nothing but an engine's runtime is installed.

Types of fields: str, int, float (finite), bool, None, Any, Literal, dataclasses, `tuple[X, ...]`, `Sequence[X]`,
`tuple[X, Y]`, `Mapping[str, X]`, and unions of those that JSON tells apart by type. `Annotated[X, Bound]` limits the
JSON values of X (other than null), such as a list's length; `Mapping[Annotated[str, Bound], X]` limits a mapping's
keys. A field that equals its default is not written, and may be absent; `Annotated[X, Mark]` changes that, and
`Annotated[X, Key(name)]` its name in the file. Unknown entries are ignored: a newer writer may add some.

How: `reader(type)` builds, once for each type, a function from JSON to a value. It recurses over the type, not over the
data, so reading a document does no reflection.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from lockstep.artifacts.files import manifest_bytes, read_json, write_bytes
from lockstep.errors import InputError, truncate

_WORDS = {str: "a text", int: "an integer", float: "a finite number", bool: "true or false", type(None): "null"}
_UNIONS = (Union, types.UnionType)
_LARGEST_FLOAT = 2**1023  # of an integer that is read as a float: a larger one overflows when it is computed with
_DEEPEST = 50  # nested lists and objects; locks and statements have 6
Read = Callable[[Any], Any]  # a value of JSON -> the value of a field
AnyNote = TypeVar("AnyNote")
AnyObject = TypeVar("AnyObject", bound="JsonObject")
AnyDocument = TypeVar("AnyDocument", bound="Document")


class ValidationError(InputError):
    """An invalid entry. where: `layers[2].block`; "" for the whole. expected: in words."""

    def __init__(self, where: str, expected: str, actual: Any) -> None:
        self.where = where.removeprefix(".")
        self.expected = expected
        self.actual = actual
        line = f"expected {truncate(expected)}, found {truncate(_shown(actual))}"
        if where:
            line = f"{truncate(self.where)}: {line}"
        super().__init__(line)

    def inside(self, place: str) -> ValidationError:
        """Return the same error of the enclosing object or list. place: such as `layers` or `[2]`."""
        if self.where and self.where[0] not in "[:":
            place = f"{place}."
        return ValidationError(f"{place}{self.where}", self.expected, self.actual)


def _shown(value: Any) -> str:
    # The line goes to terminals and logs, so control characters of an untrusted file are escaped.
    try:
        return ascii(value)
    except RecursionError:
        return "lists or objects nested too deeply"


@dataclass(frozen=True)
class Bound:
    """A limit of an annotated type's JSON values. words: the expected value. holds: whether a value is within it."""

    words: str
    holds: Callable[[Any], Any]


def integers(low: int, high: int) -> Bound:
    return Bound(f"an integer from {low} to {high}", lambda value: low <= value <= high)


def matching(pattern: str, words: str) -> Bound:
    """Return the bound of a text that matches all of `pattern`."""
    return Bound(words, re.compile(pattern).fullmatch)


def one_of(*choices: str | int) -> Bound:
    return Bound(f"one of {', '.join(map(str, choices))}", frozenset(choices).__contains__)


def length(maximum: int, minimum: int = 0) -> Bound:
    return Bound(f"a list of {minimum} to {maximum}", lambda value: minimum <= len(value) <= maximum)


def like(kind: type) -> Bound:
    """Return the bound of JSON that the dataclass `kind` could be read from; it raises that reader's errors."""
    return Bound("an object", lambda value: reader(kind)(value) is not None)


@dataclass(frozen=True)
class Key:
    """The name of a field in the file, where that is another than in Python."""

    name: str


class Mark(enum.Enum):
    """How a field is written to the file.

    ALWAYS: whatever its value, and it must be there. INLINED: a dataclass's fields, among those of its owner. OTHERS:
    {key: JSON}, all entries that no field names.
    """

    ALWAYS = enum.auto()
    INLINED = enum.auto()
    OTHERS = enum.auto()


class JsonObject:
    """An object of a document, a dataclass. COMPUTED: written besides, {key in the file: attribute}."""

    COMPUTED: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def from_json(cls: type[AnyObject], value: Any) -> AnyObject:
        """Return the field's value for the JSON `value`. Raises ValidationError for another value."""
        return cast(AnyObject, reader(cast(Any, cls))(value))

    def to_json(self) -> dict[str, Any]:
        return _object_json(self)

    def validate(self, stored: Mapping[str, Any]) -> None:
        """Raise ValidationError where entries contradict each other. stored: the JSON that this is of."""


class Document(JsonObject):
    """A file of JSON, with its digest. FORMAT is in the file; REMEDY: what to do with a damaged one."""

    FORMAT: ClassVar[str]
    REMEDY: ClassVar[str] = "the file is damaged or of another version: delete it and run again"

    @classmethod
    def load(cls: type[AnyDocument], path: str | os.PathLike) -> AnyDocument:
        """Read the file. Raises InputError for one that is absent, damaged or of another format."""
        value = read_json(path, cls.FORMAT)
        try:
            return cls.from_json(value)
        except ValidationError as error:
            raise InputError(f"{path}: {error}; {cls.REMEDY}") from None

    def save(self, path: str | os.PathLike) -> None:
        """Write the file, whole or not at all."""
        write_bytes(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the content of the file, with its digest."""
        return manifest_bytes(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file, without its digest."""
        return {"format": self.FORMAT, **super().to_json()}


def check_depth(value: Any) -> None:
    """Raise ValidationError for JSON that is nested too deeply for Python's recursive comparison."""
    # Level by level and not recursively, which would itself overflow the stack.
    level = [value]
    for _ in range(_DEEPEST):
        mappings = [item.values() for item in level if isinstance(item, dict)]
        lists = [item for item in level if isinstance(item, list)]
        level = list(itertools.chain(*mappings, *lists))
    if any(isinstance(item, (dict, list)) for item in level):
        raise ValidationError("", f"at most {_DEEPEST} nested lists and objects", value)


@functools.cache
def reader(kind: Any) -> Read:
    """Return the function that takes JSON and returns a value of type `kind`, or raises ValidationError."""
    bound = _note(kind, Bound)
    kind = _plain(kind)
    read = _reader(kind, bound)
    if bound is None or _checks_bound(kind):
        return read
    return _bounded(read, bound)


def _checks_bound(kind: Any) -> bool:
    """Return whether `_reader` of a type checks its bound itself, and says the bound's words for a wrong type too."""
    origin = get_origin(kind)
    arguments = get_args(kind)
    return (kind in _WORDS and kind is not float) or origin is Sequence or (origin is tuple and Ellipsis in arguments)


def _bounded(read: Read, bound: Bound) -> Read:
    """Return a reader that also checks a bound; null, which a union may allow, is within any."""

    def read_bounded(value: Any) -> Any:
        item = read(value)
        if value is not None and not bound.holds(value):
            raise ValidationError("", bound.words, value)
        return item

    return read_bounded


def _plain(kind: Any) -> Any:
    """Return the X of `Annotated[X, ...]`, and any other type as it is."""
    if get_origin(kind) is Annotated:
        return kind.__origin__
    return kind


def _note(kind: Any, note_type: type[AnyNote]) -> AnyNote | None:
    """Return the Bound, Key or Mark of a type; None where it has none."""
    notes = getattr(kind, "__metadata__", ())
    return next((note for note in notes if isinstance(note, note_type)), None)


def _reader(kind: Any, bound: Bound | None) -> Read:
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin in _UNIONS:
        return _union_reader(arguments)
    if kind is Any:
        return lambda value: value
    if kind is float:
        return _read_float
    if dataclasses.is_dataclass(kind):
        return _object_reader(cast(type, kind))
    if origin is Literal:
        return _scalar_reader(tuple(map(type, arguments)), one_of(*arguments))
    if origin is tuple and arguments[-1] is not Ellipsis:
        row = Bound(f"a list of {len(arguments)}", lambda value: len(value) == len(arguments))
        return _list_reader(tuple(map(reader, arguments)), row)
    if origin in (tuple, Sequence):
        return _list_reader(itertools.repeat(reader(arguments[0])), bound or Bound("a list", lambda value: True))
    if origin is not None:
        return _mapping_reader(arguments[0], arguments[1])
    return _scalar_reader((kind,), bound or Bound(_WORDS[kind], lambda value: True))


def _read_float(value: Any) -> Any:
    # An integer stays one, so that a document is written as it was read, with the same digest.
    if type(value) is float and math.isfinite(value) or type(value) is int and abs(value) <= _LARGEST_FLOAT:
        return value
    raise ValidationError("", _WORDS[float], value)


def _scalar_reader(kinds: tuple[type, ...], bound: Bound) -> Read:
    words = bound.words
    holds = bound.holds

    def read(value: Any) -> Any:
        # `type` and not `isinstance`: a bool is an int in Python, but no number in JSON.
        if type(value) not in kinds or not holds(value):
            raise ValidationError("", words, value)
        return value

    return read


def _union_reader(kinds: tuple[Any, ...]) -> Read:
    """Return the reader of a union, which chooses by the value's type in JSON."""
    readers: dict[type, Read] = {}
    # Reversed, so that the first of two that read the same JSON type is chosen: `float` and `int` read an integer.
    for kind in reversed(kinds):
        readers |= dict.fromkeys(_types_in_json(kind), reader(kind))
    words = " or ".join(_words(kind) for kind in kinds if kind is not type(None))

    def read(value: Any) -> Any:
        read_kind = readers.get(type(value))
        if read_kind is None:
            raise ValidationError("", words, value)
        return read_kind(value)

    return read


def _types_in_json(kind: Any) -> tuple[type, ...]:
    kind = _plain(kind)
    if get_origin(kind) is Literal:
        return tuple(map(type, get_args(kind)))
    if kind is float:
        return (float, int)
    if get_origin(kind) in (tuple, Sequence):
        return (list,)
    if kind in _WORDS:
        return (kind,)
    return (dict,)


def _words(kind: Any) -> str:
    bound = _note(kind, Bound)
    if bound is not None:
        return bound.words
    if get_origin(kind) is Literal:
        return one_of(*get_args(kind)).words
    if get_origin(kind) in (tuple, Sequence):
        return "a list"
    return _WORDS.get(kind, "an object")


def _list_reader(readers: Iterable[Read], bound: Bound) -> Read:
    """Return the reader of a list. readers: of its items, one for each, or one repeated without end."""

    def read(value: Any) -> Any:
        if type(value) is not list or not bound.holds(value):
            raise ValidationError("", bound.words, value)
        items: list[Any] = []
        try:
            for read_item, item in zip(readers, value):
                items.append(read_item(item))
        except ValidationError as error:
            raise error.inside(f"[{len(items)}]") from None
        return tuple(items)

    return read


def _mapping_reader(key_kind: Any, item_kind: Any) -> Read:
    read_key = reader(key_kind)
    read_item = reader(item_kind)

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise ValidationError("", "an object", value)
        items = {}
        place = ""  # of an error: the name of an entry, or its item
        try:
            for key, item in value.items():
                place = ": name"
                read_key(key)
                place = key
                items[key] = read_item(item)
        except ValidationError as error:
            raise error.inside(place) from None
        return items

    return read


@dataclass(frozen=True)
class _Entry:
    """A field of the file. default: a value that is not written; MISSING: every value is."""

    name: str
    key: str
    kind: Any
    default: Any
    mark: Mark | None


@functools.cache
def _entries(kind: Any) -> tuple[_Entry, ...]:
    hints = get_type_hints(kind, include_extras=True)
    entries = []
    for field in dataclasses.fields(kind):
        kind_of_field = hints[field.name]
        key = _note(kind_of_field, Key) or Key(field.name)
        mark = _note(kind_of_field, Mark)
        default = field.default
        if mark is Mark.ALWAYS:
            default = MISSING
        elif field.default_factory is not MISSING:
            default = field.default_factory()
        entries.append(_Entry(field.name, key.name, kind_of_field, default, mark))
    return tuple(entries)


def _object_reader(kind: type) -> Read:
    entries = _entries(kind)
    named_entries = [entry for entry in entries if entry.mark not in (Mark.INLINED, Mark.OTHERS)]
    required = {entry.key for entry in named_entries if entry.default is MISSING}
    plain = [(entry.name, entry.key, reader(entry.kind)) for entry in named_entries]
    inner = [(entry.name, reader(entry.kind)) for entry in entries if entry.mark is Mark.INLINED]
    other_names = [entry.name for entry in entries if entry.mark is Mark.OTHERS]
    keys = _keys(kind)
    # A plain dataclass has no such method, and the base's does nothing.
    validate = getattr(kind, "validate", JsonObject.validate)

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise ValidationError("", "an object", value)
        if not required <= value.keys():
            raise ValidationError("", f"an object with {', '.join(sorted(required - value.keys()))}", sorted(value))
        values = {}
        key = ""
        try:
            for name, key, read_item in plain:
                if key in value:
                    values[name] = read_item(value[key])
        except ValidationError as error:
            raise error.inside(key) from None
        # An inlined dataclass reads its fields from the same object.
        for name, read_item in inner:
            values[name] = read_item(value)
        for name in other_names:
            values[name] = {key: item for key, item in value.items() if key not in keys}
        instance = kind(**values)
        validate(instance, value)
        return instance

    return read


def _keys(kind: Any) -> set[str]:
    keys = set(getattr(kind, "COMPUTED", ()))
    if issubclass(kind, Document):
        keys.add("format")
    for entry in _entries(kind):
        if entry.mark is Mark.INLINED:
            keys |= _keys(_plain(entry.kind))
        elif entry.mark is not Mark.OTHERS:
            keys.add(entry.key)
    return keys


@functools.cache
def _is_json(kind: Any) -> bool:
    """Return whether a field holds any JSON, which may be nested deeper than Python's stack is."""
    kind = _plain(kind)
    return kind is Any or (get_origin(kind) is Mapping and get_args(kind)[-1] is Any)


def _json(value: Any) -> Any:
    # Check scalars first: a str is also a sequence.
    if isinstance(value, (str, int, float)):
        return value
    if dataclasses.is_dataclass(value):
        return _object_json(value)
    if isinstance(value, Mapping):
        return {key: _json(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_json(item) for item in value]
    return value


def _object_json(value: Any) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for entry in _entries(cast(Any, type(value))):
        item = getattr(value, entry.name)
        if entry.mark is Mark.OTHERS:
            document.update(item)
        elif entry.mark is Mark.INLINED:
            document.update(_object_json(item))
        elif entry.default is MISSING or item != entry.default:
            document[entry.key] = item if _is_json(entry.kind) else _json(item)
    for key, name in getattr(value, "COMPUTED", {}).items():
        document[key] = getattr(value, name)
    return document
