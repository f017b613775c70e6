"""Llama 3.2 and 4: `[name(argument="value"), other()]`, Python that is read and never run.

JSON's `true`, `false` and `null` are taken in it, and line ends in strings.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from lockstep_serve.tool_formats.arguments import dumped
from lockstep_serve.tool_formats.base import Event, Malformed, Reading, Source, ToolFormat

_BEGIN = "<|python_start|>"
_END = "<|python_end|>"
_HEAD = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")
_HALF_HEAD = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*)?")
# Text up to a quote or a bracket, and within a string up to its quote.
_TEXT = {quote: re.compile(rf"(?:[^{quote}\\]|\\.)*", re.DOTALL) for quote in "\"'"}
_TEXT[""] = re.compile(r"""[^"'()\[\]{}]*""")
_DEEPEST = 64
_WORDS = {"true": True, "false": False, "null": None}


def _read(source: Source) -> Reading[None]:
    marked = yield from source.follows(_BEGIN)
    yield from source.space()
    # Decide as early as possible whether "[" begins calls, because other text is streamed.
    while _HEAD.match(source.text, source.at) is None:
        if _HALF_HEAD.fullmatch(source.text, source.at) is None:
            raise Malformed
        yield from source.wait()
    start = source.at
    yield from _skip(source)
    # Python is parsed as a whole, so unlike JSON's its arguments are not streamed.
    for name, arguments in _calls(source.text[start : source.at]):
        yield source.call_name(name)
        yield Event("arguments", arguments)
    if marked:
        yield from source.close(_END)


def _skip(source: Source) -> Reading[None]:
    """Read to the bracket that closes the first one, outside of strings."""
    depth = 0
    quote = ""
    while True:
        match = _TEXT[quote].match(source.text, source.at)
        assert match is not None
        source.at = match.end()
        character = source.text[source.at : source.at + 1]
        if not character or (quote and character == "\\"):
            yield from source.wait()
            continue
        source.at += 1
        if quote:
            quote = ""
        elif character in "\"'":
            quote = character
        elif character in "([{":
            depth += 1
        else:
            depth -= 1
        if depth == 0:
            return
        if depth > _DEEPEST:
            raise Malformed


def _calls(text: str) -> list[tuple[str, str]]:
    """Return names and arguments. Raises Malformed for Python that is no list of calls with plain values."""
    try:
        tree = _Words().visit(ast.parse(_one_line(text), mode="eval").body)
        if not isinstance(tree, ast.List):
            raise Malformed
        return [_call(node) for node in tree.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Malformed from None


def _one_line(text: str) -> str:
    """Return Python without line ends: in strings they become escapes, elsewhere spaces."""
    # Models write line breaks in quoted strings, which Python does not allow.
    parts = []
    quote = ""
    at = 0
    while at < len(text):
        match = _TEXT[quote].match(text, at)
        assert match is not None
        end = match.end() + 1
        part = text[at:end]
        character = text[end - 1 : end]
        if quote:
            parts.append(part.replace("\r", "\\r").replace("\n", "\\n"))
            quote = ""
        else:
            parts.append(part.replace("\r", " ").replace("\n", " "))
            if character in ("'", '"'):
                quote = character
        at = end
    return "".join(parts)


class _Words(ast.NodeTransformer):
    """JSON's constants as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in _WORDS:
            return node
        return ast.copy_location(ast.Constant(_WORDS[node.id]), node)


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise Malformed
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise Malformed
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return ast.unparse(node.func), dumped(arguments)


PYTHONIC = ToolFormat(
    name="pythonic", template=("func_name1(",), starts=(_BEGIN,), read=_read, opening="[", marks=(_BEGIN, _END)
)
