"""Triton's model configuration as text: config.pbtxt, read and written.

In protobuf's text format. A message is a dict from field names to lists of values: a repeated field has several. A
value is a message, a str, an int, a float, a bool, or an Enum. Of the format, what such files use: no extensions, no
hexadecimal numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from lockstep.errors import InputError

Message = dict[str, list[Any]]
_TOKEN = re.compile(
    r"""\s+|\#[^\n]*|(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?P<word>[\w.+-]+)|(?P<sign>.)"""
)
_DEEPEST = 20
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


class Enum(str):
    """The name of an enum's value: written without quotes."""


def parse(text: str, where: str) -> Message:
    """Return the message of a file.

    Raises InputError, with `where` and the line.
    """
    tokens = [(found.lastgroup, found[0], found.start()) for found in _TOKEN.finditer(text) if found.lastgroup]
    reader = _Reader(tokens, text, where)
    message = reader.message(None)
    return message


class _Reader:
    def __init__(self, tokens: Sequence[tuple[str | None, str, int]], text: str, where: str):
        self._tokens, self._text, self._where, self._at, self._depth = tokens, text, where, 0, 0

    def message(self, end: str | None) -> Message:
        self._depth += 1
        if self._depth > _DEEPEST:
            self._fail(f"at most {_DEEPEST} messages in one another")
        found: Message = {}
        while (token := self._next(end is None)) != end:
            if token is None or not re.fullmatch(r"[A-Za-z_]\w*", token):
                self._fail("the name of a field", token)
            colon = self._skip(":")
            values = found.setdefault(token or "", [])
            if self._skip("["):
                while not self._skip("]"):
                    values.append(self._value(True))
                    self._skip(",")
            else:
                values.append(self._value(colon))
            self._skip(",") or self._skip(";")
        self._depth -= 1
        return found

    def _value(self, scalar: bool) -> Any:
        if self._skip("{"):
            return self.message("}")
        if not scalar:
            self._fail("':' or '{'", self._next())
        token = self._next() or ""
        if self._tokens[self._at - 1][0] == "text":
            parts = [_unquoted(token)]
            while self._at < len(self._tokens) and self._tokens[self._at][0] == "text":
                parts.append(_unquoted(self._next() or ""))
            return "".join(parts)
        if token in ("true", "false"):
            return token == "true"
        if re.fullmatch(r"[+-]?\d+", token):
            return int(token)
        if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", token):
            return float(token)
        if re.fullmatch(r"[A-Za-z_]\w*", token):
            return Enum(token)
        return self._fail("a value", token)

    def _next(self, may_end: bool = False) -> str | None:
        if self._at == len(self._tokens):
            return None if may_end else self._fail("more", "the end of the file")
        self._at += 1
        return self._tokens[self._at - 1][1]

    def _skip(self, sign: str) -> bool:
        if self._at < len(self._tokens) and self._tokens[self._at][1] == sign:
            self._at += 1
            return True
        return False

    def _fail(self, expected: str, found: str | None = "more") -> Any:
        place = self._tokens[max(0, self._at - 1)][2] if self._tokens else 0
        line = self._text.count("\n", 0, place) + 1
        raise InputError(f"{self._where}, line {line}: expected {expected}, found {str(found)[:40]}; correct it")


def _unquoted(token: str) -> str:
    return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), token[1:-1])


def dump(message: Message, indent: str = "") -> str:
    """Return the text of a message.

    Numbers of one field stand in brackets, each other value on a line of its own.
    """
    lines = []
    for name, values in message.items():
        if values and all(type(value) is int for value in values) and name == "dims":
            lines.append(f"{indent}{name}: [ {', '.join(map(str, values))} ]\n")
            continue
        for value in values:
            if isinstance(value, dict):
                lines.append(f"{indent}{name} {{\n{dump(value, indent + '  ')}{indent}}}\n")
            else:
                lines.append(f"{indent}{name}: {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not isinstance(value, Enum):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
