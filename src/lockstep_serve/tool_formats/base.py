"""Formats of tool calls: readers are generators, which wait for more of the answer.

A reader gets the text from a call's first character on. It yields `Event`s, and None where it needs more text. It
raises `Malformed` at the first character that is not part of a call, so that the text becomes content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

_MAX_DEPTH = 64  # of JSON
_OUTSIDE = re.compile(r"[\s:,\w.+-]*")  # JSON outside of strings and brackets
_INSIDE = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)  # of a string
_SCALAR = re.compile(r"[\w.+-]*")
_Value = TypeVar("_Value")
# Placeholders of `ToolFormat.call`.
NAME = "\0name"
ARGUMENTS = "\0arguments"
NUMBER = "\0number"
# Placeholders of `ToolFormat.argument`.
KEY = "\0key"
VALUE = "\0value"


class Malformed(Exception):
    """Text that only began like a call; end: it is content up to this index."""

    def __init__(self, end: int | None = None) -> None:
        super().__init__()
        self.end = end


@dataclass(frozen=True)
class Event:
    """A call's name, which begins it; the next piece of its arguments, a JSON text; or text outside of calls."""

    kind: Literal["name", "arguments", "reasoning", "content"]
    text: str


Reading = Generator[Event | None, None, _Value]


@dataclass
class Source:
    """The text of an answer so far. at: index of the reader. tools: schemas of named functions."""

    tools: Mapping[str, Mapping[str, Any]]
    text: str = ""
    at: int = 0
    ended: bool = False

    def wait(self) -> Reading[None]:
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
            text = self.text[self.at : self.at + len(expected)]
            if text == expected:
                self.at += len(expected)
                return True
            if self.ended or not expected.startswith(text):
                return False
            yield None

    def expect(self, expected: str) -> Reading[None]:
        """Read a text, after white space. Raises Malformed for another text."""
        yield from self.space()
        if not (yield from self.follows(expected)):
            raise Malformed

    def close(self, mark: str) -> Reading[None]:
        """Read a closing mark, which a model may omit at the end of its answer."""
        yield from self.space()
        if self.at < len(self.text) or not self.ended:
            yield from self.expect(mark)

    def until(self, *marks: str) -> Reading[str]:
        """Read up to the first of some marks, but not the mark."""
        start = self.at
        pattern = re.compile("|".join(map(re.escape, marks)))
        longest = max(map(len, marks))
        searched = start
        while True:
            match = pattern.search(self.text, searched)
            if match:
                self.at = match.start()
                return self.text[start : self.at]
            searched = max(start, len(self.text) - longest + 1)
            yield from self.wait()

    def passage(self, kind: Literal["reasoning", "content"] | None, *marks: str) -> Reading[None]:
        """Read text up to the first of some marks or the answer's end; kind: of its events, None for no events."""
        pattern = re.compile("|".join(map(re.escape, marks)))
        longest = max(map(len, marks))
        while True:
            match = pattern.search(self.text, self.at)
            start = self.at
            if match:
                self.at = match.start()
            elif self.ended:
                self.at = len(self.text)
            else:  # the last characters may be the beginning of a mark
                self.at = max(self.at, len(self.text) - longest + 1)
            if kind is not None and self.at > start:
                yield Event(kind, self.text[start : self.at])
            if match or self.ended:
                return
            yield None

    def finish(self) -> Reading[None]:
        """Read the answer's end. Raises Malformed for more than white space before it."""
        yield from self.space()
        if self.at < len(self.text):
            raise Malformed

    def call_name(self, name: str) -> Event:
        """Return the event of a call's name. Raises Malformed for one that is not among the tools."""
        if name not in self.tools:
            raise Malformed
        return Event("name", name)

    def json(self, opening: str, sends: bool = False) -> Reading[str]:
        """Read JSON that begins with `opening`: {, [ or ". sends: its pieces are arguments of the call."""
        yield from self.space()
        start = self.at
        sent = self.at
        depth = 0
        inside = False
        if not (yield from self.follows(opening)):
            raise Malformed
        self.at = start
        while True:
            # Up to the next character that matters: a quote or an escape within a string, brackets and quotes outside.
            pattern = _OUTSIDE
            if inside:
                pattern = _INSIDE
            match = pattern.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            character = self.text[self.at : self.at + 1]
            if not character or (character == "\\" and self.at + 1 == len(self.text)):
                # The end of the text so far: stream it, and wait for more. Half an escape waits, too.
                if sends and self.at > sent:
                    yield Event("arguments", self.text[sent : self.at])
                    sent = self.at
                yield from self.wait()
                continue
            self.at += 1
            if character == '"':
                inside = not inside
            elif character in "{[" and depth < _MAX_DEPTH:
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
            yield from self.wait()
        if (opening := self.text[self.at]) in '{["':
            return decoded((yield from self.json(opening)))
        start = self.at
        while True:
            match = _SCALAR.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            if self.at < len(self.text):
                return decoded(self.text[start : self.at])
            yield from self.wait()

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
                name = str(decoded((yield from self.json('"'))))
                yield self.call_name(name)
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
            yield from self.wait()
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
            yield from self.wait()
        if self.text[self.at] == "[":
            yield from self.call_list()
        else:
            yield from self.call_object()

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
        self, marks: tuple[str, str], call_marks: tuple[str, str], call: Callable[[Source], Reading[None]]
    ) -> Reading[None]:
        """Read calls one after another, each between marks, in a section between marks."""
        yield from self.expect(marks[0])
        yield from self.expect(call_marks[0])
        while True:
            yield from call(self)
            yield from self.close(call_marks[1])
            yield from self.space()
            if not (yield from self.follows(call_marks[0])):
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

    Attributes:
        name: Of --tool-call-parser.
        template: Texts that are all in the chat template of such a model; none: the format must be named.
        starts: What begins calls, anywhere in an answer.
        read: Reads calls from the start of the first.
        opening: Characters that begin calls only at the answer's start.
        ends_reasoning: Calls that begin with this also end reasoning whose end mark is missing.
        marks: Texts of `call` that a tokenizer may have as one token.
        call: The parts of a call as the model is trained to write it, with NAME and ARGUMENTS, for grammars; none:
            forced calls are plain JSON.
        around: What is before, between and after several calls.
        argument: The parts of an argument, with KEY and VALUE, where arguments are no JSON object; the text after VALUE
            ends it.
        id_length: Characters of a call's id.
        id: Its template, with {name} and {number}, which counts the chat's calls.
        instructs: The chat template has no tools, so a system message describes them.
        answer: What begins the text of an answer, in a format that marks answers too; a call then ends the answer.
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
