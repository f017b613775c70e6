"""The tools of a chat: what a client may ask for, checked; how answers are read, and the grammar that holds them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.runtime.grammar import Grammar
from lockstep.runtime.grammar.trial import bounded
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.serve.bodies import BadRequest
from lockstep.serve.reasoning import ReasoningFormat
from lockstep.serve.tool_formats import FORMATS
from lockstep.serve.tool_formats.base import ARGUMENTS, KEY, NAME, NUMBER, VALUE, ToolFormat, is_text

_MOST_TOOLS, _MOST_CALLS = 128, 32  # of a request; of an answer that a grammar holds
_DEEPEST, _LONGEST = 32, 1 << 17  # levels and characters of a schema
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_CHOICES = ("none", "auto", "required")
_TEXT, _ANY_KEY, _ANY_NUMBER = r"/(.|\n)*/", r"/[^<>\n]{1,64}/", "/[0-9]{1,3}/"
_MARKS = re.compile(r"(<\|[^<>|]{1,40}\|>)")  # in longer ones


@dataclass(frozen=True)
class Tools:
    """The tools of a request.

    given: as the client sent them, for the template. schemas: of arguments, by name. strict: names of functions whose
    calls must follow their schema. choice: "none", "auto", "required", or a function's name with `named`.
    """

    given: Sequence[Mapping[str, Any]]
    schemas: Mapping[str, Mapping[str, Any]]
    strict: frozenset[str]
    choice: str
    named: bool = False
    single: bool = False

    @property
    def must_call(self) -> bool:
        return self.named or self.choice == "required"


def tools_of(given: Any, choice: Any, parallel: bool | None) -> Tools | None:
    """Return the tools of a body's fields of these names; None for none. Raises BadRequest."""
    if not given:
        if choice not in (None, "none"):
            raise BadRequest("tool_choice: expected none without tools, found another value", "tool_choice")
        return None
    if not isinstance(given, list) or len(given) > _MOST_TOOLS:
        found = f"{len(given)} of them" if isinstance(given, list) else "no list"
        raise BadRequest(f"tools: expected up to {_MOST_TOOLS} tools, found {found}", "tools")
    schemas: dict[str, Mapping[str, Any]] = {}
    strict = set()
    for index, tool in enumerate(given):
        name, schema, is_strict = _function(tool, f"tools[{index}]")
        if name in schemas:
            raise BadRequest(f"tools[{index}].function.name: expected each name once, found {name!r} twice", "tools")
        schemas[name] = schema
        if is_strict:
            strict.add(name)
    name, named = _chosen(choice, schemas)
    return Tools(given, schemas, frozenset(strict), name, named, parallel is False)


def _function(tool: Any, where: str) -> tuple[str, Mapping[str, Any], bool]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        found = tool.get("type") if isinstance(tool, dict) else "no object"
        raise BadRequest(f"{where}: expected an object of type function, found {ascii(found)[:60]}", "tools")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        expected = "1 to 128 letters, digits, _, . or -"
        raise BadRequest(f"{where}.function.name: expected {expected}, found {ascii(name)[:80]}", "tools")
    schema = function.get("parameters")
    schema = {"type": "object", "properties": {}} if schema is None else schema
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise BadRequest(f"{where}.function.parameters: expected the JSON schema of an object, found another", "tools")
    for key, kind, expected in (("properties", dict, "an object"), ("required", list, "a list")):
        if not isinstance(schema.get(key, kind()), kind):
            said = f"expected {expected}, found {ascii(schema[key])[:60]}"
            raise BadRequest(f"{where}.function.parameters.{key}: {said}", "tools")
    if (depth := _depth(schema)) > _DEEPEST:
        raise BadRequest(f"{where}.function.parameters: expected up to {_DEEPEST} levels, found {depth}", "tools")
    if (size := len(json.dumps(schema))) > _LONGEST:
        raise BadRequest(f"{where}.function.parameters: expected up to {_LONGEST} characters, found {size}", "tools")
    if not isinstance(is_strict := function.get("strict") or False, bool):
        raise BadRequest(f"{where}.function.strict: expected true or false, found another value", "tools")
    return name, schema, is_strict


def _depth(value: Any) -> int:
    """Return the levels of objects and lists; Python's own stack is not used, for they may be many."""
    deepest, waiting = 0, [(value, 0)]
    while waiting:
        each, depth = waiting.pop()
        deepest = max(deepest, depth)
        if isinstance(each, dict | list):
            inner: Iterable[Any] = each.values() if isinstance(each, dict) else each
            waiting += [(other, depth + 1) for other in inner]
    return deepest


def _chosen(choice: Any, schemas: Mapping[str, Any]) -> tuple[str, bool]:
    if choice is None or (isinstance(choice, str) and choice in _CHOICES):
        return choice or "auto", False
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        expected = 'none, auto, required or {"type": "function", "function": {"name": ...}}'
        raise BadRequest(f"tool_choice: expected {expected}; found {ascii(choice)[:80]}", "tool_choice")
    if name not in schemas:
        raise BadRequest(f"tool_choice: expected the name of one of tools, found {name[:64]!r}", "tool_choice")
    return name, True


def calling_format(format: ToolFormat, tools: Tools) -> ToolFormat:
    """Return the format that answers are read in: where calls are held, one that a grammar can be made of."""
    return format if format.call or not tools.must_call else FORMATS["json"]


def held_grammar(
    tools: Tools | None,
    format: ToolFormat | None,
    grammar: Grammar | None,
    reasoning: ReasoningFormat | None,
    opened: bool,
    tokenizer: Tokenizer,
) -> Grammar | None:
    """Return the grammar of an answer: of calls, of the form that was asked for, both of them behind the reasoning.

    format: of the calls, None where none are read. grammar: of the form, None where none was asked for. Raises
    BadRequest where `strict` asks for what the format cannot be held to.
    """
    lark = _Lark(tokenizer)
    answer = None
    if tools is not None and tools.choice == "none":
        tools = None
    if tools is not None and format is not None and tools.must_call:
        names = [tools.choice] if tools.named else list(tools.schemas)
        answer = lark.calls(format, {name: tools.schemas[name] for name in names}, tools.single or tools.named)
        grammar = None
    elif tools is not None and format is not None and (tools.strict or grammar is not None):
        if not format.call:
            said = f"expected a tool_choice that requires a call, for {format.name} is read and not held to a schema"
            raise BadRequest(f"tools: strict: {said}; or leave out strict and response_format", "tools")
        anything = {"type": "object"}
        schemas = {name: schema if name in tools.strict else anything for name, schema in tools.schemas.items()}
        answer = lark.calls_or(format, schemas, tools.single, grammar is not None)
    elif grammar is not None:
        answer = lark.answer(format, "@answer")
    if answer is None:
        return None
    if reasoning is not None:
        answer = f"{lark.reasoning(reasoning, opened)} ({answer})"
    elif answer == "@answer":
        return grammar
    around = "\n".join([f"start: {answer}", *lark.rules])
    if grammar is None:
        return Grammar("lark", around, "tools")
    return Grammar(grammar.kind, grammar.text, grammar.name, around)


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {bounded(json.dumps(schema), ' ?')}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Return a text for a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


class _Lark:
    """Rules of a grammar in llguidance's dialect of Lark; the methods return expressions."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.rules: list[str] = []

    def _mark(self, text: str) -> str:
        """Return a mark: where it is one token, that token, as llguidance takes its text for another thing."""
        token = self._tokenizer.token_id(text)
        if token is not None:
            return f"<[{token}]>"
        parts = [part for part in _MARKS.split(text) if part]
        return _quoted(text) if len(parts) < 2 else " ".join(map(self._mark, parts))

    def _parts(self, format: ToolFormat, parts: Sequence[str], values: Mapping[str, str] = {}) -> str:
        """Return parts of a format; values: expressions for the variable ones."""
        return " ".join(values[part] if part[0] == "\0" else self._part(format, part) for part in parts)

    def _part(self, format: ToolFormat, part: str) -> str:
        return self._mark(part) if part in format.marks else _quoted(part)

    def _rule(self, expression: str) -> str:
        """Add a rule and return its name."""
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name

    def _until(self, mark: str) -> str:
        """Return any text up to the first mark, and the mark."""
        number = len(self.rules)
        if self._tokenizer.token_id(mark) is not None:  # no text has it
            self.rules.append(f"ANY_{number}: {_TEXT}")
            return f"ANY_{number} {self._mark(mark)}"
        self.rules.append(rf"any_{number}[lazy]: /(.|\n)*{_escaped(mark)}/")
        return f"any_{number}"

    def _arguments(self, format: ToolFormat, schema: Mapping[str, Any]) -> str:
        if not format.argument:
            return _json({"type": "object", **schema})
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):  # nothing is known of them
            return f"({self._argument(format, _ANY_KEY, None)})*"
        found = []
        for key, value in properties.items():
            shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
            inner = {**shared, **value} if isinstance(value, Mapping) else {}
            if is_text(schema, key) and not inner.keys() & {"enum", "const"}:
                argument = self._argument(format, _quoted(key), None)
            else:
                argument = self._argument(format, _quoted(key), self._inner(inner, is_text(schema, key)))
            found.append(argument if key in schema.get("required", ()) else f"({argument})?")
        return " ".join(found) or '""'

    def _argument(self, format: ToolFormat, key: str, value: str | None) -> str:
        """Return an argument; value: an expression, None for any text."""
        at = format.argument.index(VALUE)
        end, *rest = format.argument[at + 1 :]
        parts = [self._until(end) if value is None else f"{value} {self._part(format, end)}"]
        head = self._parts(format, format.argument[:at], {KEY: key})
        return " ".join([head, *parts, *(self._part(format, part) for part in rest)])

    def _inner(self, schema: Mapping[str, Any], is_text: bool) -> str:
        """Return a value: JSON, or one of the schema's texts as it is."""
        if not is_text:
            return self._rule(_json(schema))
        choices = schema.get("enum")
        if not isinstance(choices, list) or not choices:
            choices = [schema.get("const")]
        return self._rule(" | ".join(_quoted(str(each)) for each in choices))

    def calls(
        self, format: ToolFormat, schemas: Mapping[str, Mapping[str, Any]], single: bool, headless: bool = False
    ) -> str:
        """Return calls of functions; headless: without the mark that begins them."""
        begin, between, end = format.around
        values = []
        for number, (name, schema) in enumerate(schemas.items()):
            self.rules.append(f"arguments_{number}: {self._arguments(format, schema)}")
            values.append({NAME: json.dumps(name), ARGUMENTS: f"arguments_{number}", NUMBER: _ANY_NUMBER})
        call = self._rule(" | ".join(self._parts(format, format.call, each) for each in values))
        first = call
        if headless and not begin:
            first = self._rule(" | ".join(self._parts(format, format.call[1:], each) for each in values))
        more = "" if single or format.answer else f"({self._parts(format, between)} {call}){{0,{_MOST_CALLS - 1}}}"
        head = self._parts(format, begin[1:] if headless else begin)
        return f"{head} {first} {more} {self._parts(format, end)}".strip()

    def calls_or(
        self, format: ToolFormat, schemas: Mapping[str, Mapping[str, Any]], single: bool, has_form: bool
    ) -> str:
        """Return calls, or text without any; has_form: instead of text, what the client asked for."""
        if has_form or format.answer:
            return f"{self.calls(format, schemas, single)} | {self.answer(format, '@answer' if has_form else _TEXT)}"
        if format.opening:
            self.rules.append(rf"OTHER: /([^\s{re.escape(format.opening)}](.|\n)*)?/")
            return f"{self.calls(format, schemas, single)} | OTHER"
        start = format.starts[0]
        text = f"~/(.|\\n)*{_escaped(start)}(.|\\n)*/"
        if self._tokenizer.token_id(start) is not None:
            text = _TEXT  # which has no such token
        self.rules.append(f"TEXT: {text}")
        # Where each call has a mark of its own, one is looked for again behind each call.
        calls = self.calls(format, schemas, single or not format.around[0], headless=True)
        return f"TEXT | ({self._until(start)} {calls}){{1,{1 if single else _MOST_CALLS}}} TEXT"

    def answer(self, format: ToolFormat | None, text: str) -> str:
        """Return an answer without a call; text: an expression."""
        if format is None or not format.answer:
            return text
        if text == _TEXT:
            self.rules.append(f"TEXT: {_TEXT}")
            text = "TEXT"
        return f"{self._parts(format, format.answer)} {text}"

    def reasoning(self, format: ReasoningFormat, opened: bool) -> str:
        """Return the reasoning, which ends at the first end mark; opened: the prompt has its beginning."""
        self.rules.append(r"SPACE: /\s{0,16}/")
        inside = f"{self._until(format.end)} SPACE {self._mark(format.then) if format.then else ''}".rstrip()
        return inside if opened else f"(SPACE {self._mark(format.begin)} {inside})?"
