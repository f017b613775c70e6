"""What a format of tool calls is, and how it reads: generators that wait where more of the answer must come.

A reader is given the text from a call's first character on. It yields None where it needs more text, and `Event`s; it
raises `Malformed` at the first character that no call has, so that the text can still be given out as content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

_DEEPEST = 64  # levels of JSON
_OUTSIDE = re.compile(r"[\s:,\w.+-]*")  # of strings and brackets, in JSON
_INSIDE = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)  # of a string
_SCALAR = re.compile(r"[\w.+-]*")
_Value = TypeVar("_Value")
# of `ToolFormat.call`
NAME = "\0name"
ARGUMENTS = "\0arguments"
NUMBER = "\0number"
# of `ToolFormat.argument`
KEY = "\0key"
VALUE = "\0value"


class Malformed(Exception):
    """The error of text that began like a call and is none; end: where what is known to be none ends."""

    def __init__(self, end: int | None = None) -> None:
        super().__init__()
        self.end = end


@dataclass(frozen=True)
class Event:
    """A call's name, which begins it, or the next piece of its arguments, a JSON text; or text beside calls."""

    kind: Literal["name", "arguments", "reasoning", "content"]
    text: str


Reading = Generator[Event | None, None, _Value]


@dataclass
class Source:
    """An answer as far as it has come; at: where it is read; tools: schemas of functions by name."""

    tools: Mapping[str, Mapping[str, Any]]
    text: str = ""
    at: int = 0
    ended: bool = False

    def more(self) -> Reading[None]:
        """Wait for more text. Raises Malformed where none comes."""
        if self.ended:
            raise Malformed
        yield None

    def space(self) -> Reading[None]:
        """Read white space, up to another character or the answer's end."""
        while True:
            while self.at < len(self.text) and self.text[self.at].isspace():
                self.at += 1
            if self.at < len(self.text) or self.ended:
                return
            yield None

    def follows(self, expected: str) -> Reading[bool]:
        """Read a text if it comes next; return whether it did."""
        while True:
            found = self.text[self.at : self.at + len(expected)]
            if found == expected:
                self.at += len(expected)
                return True
            if self.ended or not expected.startswith(found):
                return False
            yield None

    def expect(self, expected: str) -> Reading[None]:
        """Read a text, after white space. Raises Malformed where another stands."""
        yield from self.space()
        if not (yield from self.follows(expected)):
            raise Malformed

    def close(self, mark: str) -> Reading[None]:
        """Read a closing mark, which a model may leave out at the end of its answer."""
        yield from self.space()
        if self.at < len(self.text) or not self.ended:
            yield from self.expect(mark)

    def until(self, *marks: str) -> Reading[str]:
        """Read up to the first of some marks, which is not read."""
        start = self.at
        looked = self.at
        longest = max(map(len, marks))
        while True:
            places = [place for mark in marks if (place := self.text.find(mark, looked)) >= 0]
            if places:
                self.at = min(places)
                return self.text[start : self.at]
            looked = max(start, len(self.text) - longest + 1)
            yield from self.more()

    def passage(self, kind: Literal["reasoning", "content"] | None, *marks: str) -> Reading[None]:
        """Read text up to the first of some marks or the answer's end; kind: of the events for it, None for none."""
        longest = max(map(len, marks))
        while True:
            places = [place for mark in marks if (place := self.text.find(mark, self.at)) >= 0]
            at = len(self.text) if self.ended else max(self.at, len(self.text) - longest + 1)
            start = self.at
            self.at = min(places, default=at)
            if kind is not None and self.at > start:
                yield Event(kind, self.text[start : self.at])
            if places or self.ended:
                return
            yield None

    def finish(self) -> Reading[None]:
        """Read the answer's end. Raises Malformed where more than white space stands before it."""
        yield from self.space()
        if self.at < len(self.text):
            raise Malformed

    def known(self, name: str) -> str:
        """Return a function's name. Raises Malformed for one that is not among the tools."""
        if name not in self.tools:
            raise Malformed
        return name

    def json(self, opening: str, sends: bool = False) -> Reading[str]:
        """Read JSON that begins with `opening`: {, [ or ". sends: its pieces are arguments of the call."""
        yield from self.space()
        start = sent = self.at
        depth = 0
        inside = False
        if not (yield from self.follows(opening)):
            raise Malformed
        self.at = start
        while True:
            found = (_INSIDE if inside else _OUTSIDE).match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            character = self.text[self.at : self.at + 1]
            if not character or (character == "\\" and self.at + 1 == len(self.text)):
                if sends and self.at > sent:
                    yield Event("arguments", self.text[sent : self.at])
                    sent = self.at
                yield from self.more()
                continue
            self.at += 1
            if character == '"':
                inside = not inside
            elif character in "{[" and depth < _DEEPEST:
                depth += 1
            elif character in "}]":
                depth -= 1
            else:
                raise Malformed
            if depth <= 0 and not inside:
                break
        decoded(self.text[start : self.at])
        if sends:
            yield Event("arguments", self.text[sent : self.at])
        return self.text[start : self.at]

    def json_value(self) -> Reading[Any]:
        """Read any value of JSON."""
        yield from self.space()
        while self.at == len(self.text):
            yield from self.more()
        if (opening := self.text[self.at]) in '{["':
            return decoded((yield from self.json(opening)))
        start = self.at
        while True:
            found = _SCALAR.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            if self.at < len(self.text):
                return decoded(self.text[start : self.at])
            yield from self.more()

    def call_object(self) -> Reading[None]:
        """Read {"name": ..., "arguments": {...}}, in either order; `parameters` is another name of the latter."""
        yield from self.expect("{")
        name: str | None = None
        waiting: str | None = None  # arguments that came before the name
        has_arguments = False
        while True:
            key = decoded((yield from self.json('"')))
            yield from self.expect(":")
            if key == "name" and name is None:
                name = self.known(str(decoded((yield from self.json('"')))))
                yield Event("name", name)
                if waiting is not None:
                    yield Event("arguments", waiting)
            elif key in ("arguments", "parameters") and not has_arguments:
                has_arguments = True
                waiting = yield from self._arguments(name is not None)
            else:
                yield from self.json_value()
            yield from self.space()
            if not (yield from self.follows(",")):
                break
        yield from self.expect("}")
        if name is None:
            raise Malformed
        if not has_arguments:
            yield Event("arguments", "{}")

    def _arguments(self, sends: bool) -> Reading[str]:
        yield from self.space()
        while self.at == len(self.text):
            yield from self.more()
        if self.text[self.at] != '"':
            return (yield from self.json("{", sends))
        text = decoded((yield from self.json('"')))  # some models write the JSON as a string
        if not isinstance(decoded(text), dict):
            raise Malformed
        if sends:
            yield Event("arguments", text)
        return text

    def call_or_list(self) -> Reading[None]:
        """Read one `call_object`, or a list of them."""
        yield from self.space()
        while self.at == len(self.text):
            yield from self.more()
        yield from self.call_list() if self.text[self.at] == "[" else self.call_object()

    def call_list(self) -> Reading[None]:
        """Read a list of `call_object`."""
        yield from self.expect("[")
        while True:
            yield from self.space()
            yield from self.call_object()
            yield from self.space()
            if not (yield from self.follows(",")):
                break
        yield from self.expect("]")

    def section(
        self, marks: tuple[str, str], each: tuple[str, str], call: Callable[[Source], Reading[None]]
    ) -> Reading[None]:
        """Read calls one after another, each between marks, in a section between marks."""
        yield from self.expect(marks[0])
        yield from self.expect(each[0])
        while True:
            yield from call(self)
            yield from self.close(each[1])
            yield from self.space()
            if not (yield from self.follows(each[0])):
                break
        yield from self.close(marks[1])


def decoded(text: str) -> Any:
    """Return the value of a JSON text. Raises Malformed."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise Malformed from None


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and Infinity, which clients' JSON does not have


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls.

    name: of --tool-call-parser. template: texts of a chat template, all of which tell that its model writes so;
    none: the format is only used where it is named. starts: what begins calls, anywhere in an answer. opening:
    characters that begin them at the answer's own beginning; "" for none. read: reads the calls that begin
    together. ends_reasoning: what begins calls inside of reasoning too, which the model did not end. marks: of
    `call`, those that a tokenizer may have as one token. call: the parts of one call as the model is trained to
    write it, with NAME and ARGUMENTS, for grammars; none: a grammar holds the model to the plain JSON convention.
    around: what begins and ends several calls, and what parts them. argument: the parts of one argument, with KEY
    and VALUE, where arguments are no JSON object; what follows VALUE ends a text. id_length: characters of a call's
    id. id: its form, with {name} and {number}, of those in the chat. instructs: the chat template knows no tools,
    so that a system message describes them. answer: what begins an answer's text where all of it is in this format,
    with tools or without, and ends with a call.
    """

    name: str
    template: tuple[str, ...]
    starts: tuple[str, ...]
    read: Callable[[Source], Reading[None]]
    opening: str = ""
    ends_reasoning: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    call: tuple[str, ...] = ()
    around: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] = ((), (), ())
    argument: tuple[str, ...] = ()
    id_length: int = 24
    id: str = ""
    instructs: bool = False
    answer: tuple[str, ...] = ()
