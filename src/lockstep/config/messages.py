"""Pydantic's errors as one line: the key, the expected and the actual value.

`models.demo-llama.precisions[1]: expected one of fp32, fp16, bf16; found 'fp8'`
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Location = tuple[Any, ...]

_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "an integer",
    "int_parsing_size": "an integer of a sensible size",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "string_unicode": "valid Unicode text",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "too_short": "at least one item",
    "string_too_short": "text that is not empty",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "a name of letters, digits, '.', '_' and '-' that opens with a letter or digit",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "invalid_key": "text as the key",
}


@dataclass(frozen=True)
class Problem:
    """A mistake: keys and list indices from the top, and a text of the form `expected ...; found ...`."""

    location: Location
    text: str


def repeated(place: Location, items: Sequence[object]) -> list[Problem]:
    """Return the mistakes of a list that has an item twice."""
    problems = []
    for index, item in enumerate(items):
        if item in items[:index]:
            problems.append(Problem((*place, index), f"expected each item once; found {item!r} again"))
    return problems


class Problems(ValueError):
    """Mistakes across fields, raised inside a validator.

    Pydantic knows only the place of the whole model there: their locations are relative to it.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problem.text for problem in self.problems))


def one_line(root: type[BaseModel], error: ValidationError) -> str:
    """Return the first mistake as a line, and how many more there are; unknown keys first, as they explain others."""
    details = [detail for detail in error.errors(include_url=False) if not _follows(detail)]
    details.sort(key=lambda detail: detail["type"] != "extra_forbidden")
    problems: list[Problem] = []
    for detail in details:
        problems += _problems(root, detail)
    return join(root, problems)


def join(root: type[BaseModel], problems: list[Problem]) -> str:
    """Return `key: text`, and `(and N more)` when there are several problems."""
    line = problems[0].text
    where = key_path(root, problems[0].location)
    if where:
        line = f"{where}: {line}"
    if len(problems) > 1:
        line += f" (and {len(problems) - 1} more)"
    return line


def key_path(root: type[BaseModel], location: Location) -> str:
    """Return a location as a path of keys. `("models", "m", "layers", 0)` gives `models.m.layers[0]`."""
    text = ""
    for part, container in zip(location, _containers(root, location)):
        if get_origin(container) is tuple:
            text += f"[{part}]"
        else:
            text += f".{describe_key(part)}"
    return text.removeprefix(".")


def describe_key(key: Any) -> str:
    """Return a key as a user reads it. Bare where it is plain, quoted where it holds spaces or control characters."""
    text = key
    if not isinstance(key, str):
        text = describe(key)
    if not text or not text.isprintable() or " " in text:
        text = repr(text)
    return _shortened(text)


def describe(value: Any) -> str:
    """Return a found value in a few words. Lists and mappings are only named, for they can be of any size."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, set):
        return "a set"
    if isinstance(value, dict):
        return "a mapping"
    # Python refuses to print integers of more than 4,300 digits.
    if isinstance(value, int) and value.bit_length() > 128:
        return "a very large integer"
    if isinstance(value, (str, int, float)):
        return _shortened(repr(value))
    return _shortened(f"{type(value).__name__} {value}")


def _shortened(text: str) -> str:
    if len(text) <= 60:
        return text
    return text[:57] + "..."


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Return `, did you mean X?` for an allowed name close to `word`, else nothing."""
    close = difflib.get_close_matches(word, list(allowed), n=1)
    if not close:
        return ""
    return f", did you mean {close[0]}?"


def _follows(detail: ErrorDetails) -> bool:
    """Return whether an error follows from others, as "too short" of a list whose items are all wrong."""
    return detail["type"] == "too_short" and len(detail["input"]) > 0


def _problems(root: type[BaseModel], detail: ErrorDetails) -> Iterator[Problem]:
    """Yield one pydantic error as problems; our own `Problems`, raised in a validator, as they are."""
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, Problems):
        for problem in cause.problems:
            yield Problem((*detail["loc"], *problem.location), problem.text)
        return
    location = _without_key_mark(root, detail)
    yield Problem(location, _text(root, {**detail, "loc": location}))


def _without_key_mark(root: type[BaseModel], detail: ErrorDetails) -> Location:
    """Return an error's location without the mark "[key]", which pydantic puts after a wrong key of a `dict[...]`."""
    location = detail["loc"]
    containers = list(_containers(root, location))
    marked = len(location) > 1 and location[-1] == "[key]" and get_origin(containers[-2]) is dict
    if marked and detail["type"] not in ("extra_forbidden", "missing"):
        return location[:-1]
    return location


def _text(root: type[BaseModel], detail: ErrorDetails) -> str:
    kind = detail["type"]
    location = detail["loc"]
    value = detail["input"]
    container = [root, *_containers(root, location)][-1]  # what holds the wrong value: the root for no location
    if kind == "extra_forbidden":
        allowed = list(container.model_fields)
        return f"unknown key{nearest(str(location[-1]), allowed) or ','} allowed: {', '.join(allowed)}"
    if kind == "whole":
        return detail["msg"]
    if kind == "missing":
        return "expected this key; found nothing"
    if kind in ("model_type", "model_attributes_type"):
        section = root
        if location:
            section = unwrap(_inside(container, location[-1]))
        return f"expected a mapping of {', '.join(section.model_fields)}; found {describe(value)}"
    if kind == "literal_error":
        choices = get_args(unwrap(_inside(container, location[-1])))
        return f"expected one of {', '.join(map(str, choices))}; found {describe(value)}"
    if kind in _EXPECTED:
        expected = _EXPECTED[kind].format(**detail.get("ctx", {}))
    else:
        expected = detail["msg"].removeprefix("Value error, ")
    if kind == "too_short":
        kind_of_value = "mapping" if isinstance(value, dict) else "list"
        return f"expected {expected}; found an empty {kind_of_value}"
    return f"expected {expected}; found {describe(value)}{_hint(kind, value)}"


def _hint(kind: str, value: Any) -> str:
    """Return what to do about the usual traps of YAML."""
    if kind == "tuple_type" and type(value) in (str, int, float):
        return f"; write [{_shortened(str(value))}]"
    if kind == "string_type" and isinstance(value, bool):
        return " (YAML reads yes, no, on and off so: put the word in quotes)"
    if kind in ("string_type", "invalid_key") and value is not None and not isinstance(value, (list, tuple, set, dict)):
        return " (put it in quotes)"
    if kind in ("int_type", "float_type") and isinstance(value, str) and value.strip().isdigit():
        return " (remove the quotes)"
    return ""


def unwrap(annotation: Any) -> Any:
    """Return the type inside `Annotated[...]` and `... | None`."""
    if get_origin(annotation) is Annotated:
        return unwrap(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        inner = [item for item in get_args(annotation) if item is not type(None)]
        if len(inner) == 1:
            return unwrap(inner[0])
    return annotation


def _containers(root: type[BaseModel], location: Location) -> Iterator[Any]:
    """Yield the type that holds each part of `location`: a model, `dict[...]`, `tuple[...]`, or None beyond."""
    container: Any = root
    for part in location:
        yield container
        container = unwrap(_inside(container, part))


def _inside(container: Any, part: Any) -> Any:
    """Return the type of an entry of a container; None where it is of no type that is described here."""
    if isinstance(container, type) and issubclass(container, BaseModel):
        return getattr(container.model_fields.get(part), "annotation", None)
    if get_origin(container) is tuple:
        return get_args(container)[0]
    if get_origin(container) is dict:
        return get_args(container)[1]
    return None
