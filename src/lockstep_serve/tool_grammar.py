"""The grammar of an answer: tool calls or a response format, after reasoning within a budget."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.runtime.grammar import Grammar
from lockstep.runtime.grammar.trial import bounded
from lockstep.runtime.tokenizer import Tokenizer
from lockstep_serve.answer_reader import AnswerPlan
from lockstep_serve.bodies import BadRequest
from lockstep_serve.reasoning import ReasoningFormat
from lockstep_serve.tool_formats.arguments import branches, choices, kinds, properties, written
from lockstep_serve.tool_formats.base import ARGUMENTS, KEY, NAME, NUMBER, VALUE, ToolFormat
from lockstep_serve.tools import Tools

_MAX_CALLS = 32  # of an answer
_TEXT = r"/(.|\n)*/"
_ANY_KEY = r"/[^<>\n]{1,64}/"
_ANY_NUMBER = "/[0-9]{1,3}/"
_ANYTHING = "<[*]>*"
BUDGET = "thinking_token_budget"  # the field
_MARKS = re.compile(r"(<\|[^<>|]{1,40}\|>)")  # special tokens within a longer mark


def answer_grammar(
    tools: Tools | None, plan: AnswerPlan, grammar: Grammar | None, budget: int | None, tokenizer: Tokenizer
) -> Grammar | None:
    """Return the grammar of an answer: reasoning, then calls or the response format; None if nothing constrains it.

    plan: how the answer is read. grammar: of the response format. budget: maximum tokens of the reasoning, None for any
    number. Raises BadRequest where `strict` needs a format that has a grammar, and for a budget of reasoning whose
    marks are no tokens.
    """
    lark = _Lark(tokenizer)
    format = plan.format
    reasoning = plan.reasoning
    answer = None
    if tools is not None and tools.choice == "none":
        tools = None
    # The answer after reasoning: calls alone, text or calls, or what the response format allows.
    if tools is not None and format is not None and tools.must_call:
        schemas = dict(tools.schemas)
        if tools.named:
            schemas = {tools.choice: schemas[tools.choice]}
        answer = lark.calls(format, schemas, tools.single or tools.named)
        grammar = None
    elif tools is not None and format is not None and (tools.strict or grammar is not None):
        if not format.call:
            raise BadRequest(
                f"tools: strict: expected a tool_choice that requires a call, for {format.name} is read and not held "
                "to a schema; or leave out strict and response_format",
                "tools",
            )
        # Tools that are not strict may get any arguments.
        schemas = dict.fromkeys(tools.schemas, {"type": "object"})
        schemas |= {name: tools.schemas[name] for name in tools.strict}
        answer = lark.calls_or(format, schemas, tools.single, grammar is not None)
    elif grammar is not None:
        answer = lark.answer(format, "@answer")
    if reasoning is None:
        budget = None
    if answer is None and budget is None:
        return None
    if reasoning is None and answer == "@answer":
        return grammar
    # Reasoning before it: begun already by the prompt (`opened`), or optional.
    name = "tools"
    if reasoning is not None:
        thinking = lark.reasoning(reasoning, plan.opened, budget)
        if answer is not None and plan.opened:
            answer = f"{thinking} ({answer})"
        elif answer is not None:
            answer = f"(SPACE {thinking})? ({answer})"
        else:
            name = BUDGET
            answer = f"{thinking} {_ANYTHING}"
            if not plan.opened:
                answer = lark.any_answer(reasoning, thinking)
    around = "\n".join([f"start: {answer}", *lark.rules])
    if grammar is None:
        return Grammar("lark", around, name)
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
        """Return a mark: where it is a special token, by its id, as its text means something else to llguidance."""
        token = self._tokenizer.token_id(text)
        if token is not None:
            return f"<[{token}]>"
        parts = [part for part in _MARKS.split(text) if part]
        if len(parts) < 2:
            return _quoted(text)
        return " ".join(map(self._mark, parts))

    def _parts(self, format: ToolFormat, parts: Sequence[str], values: Mapping[str, str] = {}) -> str:
        """Return parts of a format; values: expressions for the placeholders."""
        return " ".join(values.get(part) or self._part(format, part) for part in parts)

    def _part(self, format: ToolFormat, part: str) -> str:
        if part in format.marks:
            return self._mark(part)
        return _quoted(part)

    def _rule(self, expression: str) -> str:
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name

    def _until(self, mark: str) -> str:
        """Return any text up to the first mark, and the mark."""
        number = len(self.rules)
        if self._tokenizer.token_id(mark) is not None:  # which no text contains
            self.rules.append(f"ANY_{number}: {_TEXT}")
            return f"ANY_{number} {self._mark(mark)}"
        self.rules.append(rf"any_{number}[lazy]: /(.|\n)*{_escaped(mark)}/")
        return f"any_{number}"

    def _arguments(self, format: ToolFormat, schema: Mapping[str, Any]) -> str:
        if not format.argument:
            return _json({"type": "object", **schema})
        inner = properties(schema)
        if inner is None:  # the schema names none
            return f"({self._argument(format, _ANY_KEY, None)})*"
        arguments = []
        for key, value in inner.items():
            argument = self._argument(format, _quoted(key), self._inner(value, schema))
            if key not in schema.get("required", ()):
                argument = f"({argument})?"
            arguments.append(argument)
        return " ".join(arguments) or '""'

    def _argument(self, format: ToolFormat, key: str, value: str | None) -> str:
        """Return an argument; value: an expression, None for any text."""
        at = format.argument.index(VALUE)
        end, *closing = format.argument[at + 1 :]
        if value is None:
            value = self._until(end)
        else:
            value = f"{value} {self._part(format, end)}"
        head = self._parts(format, format.argument[:at], {KEY: key})
        return " ".join([head, value, *(self._part(format, part) for part in closing)])

    def _inner(self, schema: Any, function: Mapping[str, Any]) -> str | None:
        """Return a value: JSON, or one of the schema's texts without quotes; None for any text."""
        shared = {name: function[name] for name in ("$defs", "definitions") if name in function}
        expressions = []
        for branch in branches(schema, function):
            values = choices(branch)
            if values is not None:
                expressions += [_quoted(written(value)) for value in values]
            elif "string" in (kinds(branch, function) or ()):
                return None
            else:
                expressions.append(self._rule(_json({**shared, **branch})))
        return self._rule(" | ".join(expressions))

    def calls(
        self, format: ToolFormat, schemas: Mapping[str, Mapping[str, Any]], single: bool, headless: bool = False
    ) -> str:
        """Return calls of functions; headless: without the mark that begins them."""
        begin, between, end = format.around
        values = []
        for number, (name, schema) in enumerate(schemas.items()):
            self.rules.append(f"arguments_{number}: {self._arguments(format, schema)}")
            values.append({NAME: json.dumps(name), ARGUMENTS: f"arguments_{number}", NUMBER: _ANY_NUMBER})
        call = self._rule(" | ".join(self._parts(format, format.call, call_values) for call_values in values))
        first = call
        if headless and not begin:
            first = self._rule(" | ".join(self._parts(format, format.call[1:], call_values) for call_values in values))
        elif headless:
            begin = begin[1:]
        repeats = ""
        if not single and not format.answer:
            repeats = f"({self._parts(format, between)} {call}){{0,{_MAX_CALLS - 1}}}"
        return f"{self._parts(format, begin)} {first} {repeats} {self._parts(format, end)}".strip()

    def calls_or(
        self, format: ToolFormat, schemas: Mapping[str, Mapping[str, Any]], single: bool, has_response_format: bool
    ) -> str:
        """Return calls, or an answer without any: text, or the response format."""
        if has_response_format:
            return f"{self.calls(format, schemas, single)} | {self.answer(format, '@answer')}"
        if format.answer:
            return f"{self.calls(format, schemas, single)} | {self.answer(format, _TEXT)}"
        if format.opening:
            self.rules.append(rf"OTHER: /([^\s{re.escape(format.opening)}](.|\n)*)?/")
            return f"{self.calls(format, schemas, single)} | OTHER"
        start = format.starts[0]
        text = f"~/(.|\\n)*{_escaped(start)}(.|\\n)*/"
        if self._tokenizer.token_id(start) is not None:
            text = _TEXT  # which has no such token
        self.rules.append(f"TEXT: {text}")
        # Without a mark around all calls, each call begins with its own, after any text.
        calls = self.calls(format, schemas, single or not format.around[0], headless=True)
        repeats = 1 if single else _MAX_CALLS
        return f"TEXT | ({self._until(start)} {calls}){{1,{repeats}}} TEXT"

    def answer(self, format: ToolFormat | None, text: str) -> str:
        """Return an answer without a call; text: an expression."""
        if format is None or not format.answer:
            return text
        if text == _TEXT:
            self.rules.append(f"TEXT: {_TEXT}")
            text = "TEXT"
        return f"{self._parts(format, format.answer)} {text}"

    def reasoning(self, format: ReasoningFormat, opened: bool, budget: int | None) -> str:
        """Return the reasoning, which ends at the first end mark; opened: the prompt has its beginning."""
        self.rules.append(r"SPACE: /\s{0,16}/")
        if budget is None:
            inside = self._until(format.end)
        else:
            inside = self._within(budget, format.end)
        inside = f"{inside} SPACE"
        if format.then:
            inside = f"{inside} {self._mark(format.then)}"
        return inside if opened else f"{self._mark(format.begin)} {inside}"

    def _within(self, budget: int, mark: str) -> str:
        """Return at most `budget` tokens, and a mark."""
        if self._tokenizer.token_id(mark) is None:
            expected = f"a tokenizer that has {mark} as one token"
            raise BadRequest(f"{BUDGET}: expected {expected}, found none in it; leave it out", BUDGET)
        if not budget:
            return self._mark(mark)
        self.rules += [f"thought[max_tokens={budget}]: THOUGHT", f"THOUGHT: {_TEXT}"]
        return f"thought {self._mark(mark)}"

    def any_answer(self, format: ReasoningFormat, thinking: str) -> str:
        """Return any answer; reasoning in it follows `thinking`."""
        first, *tail = [part for part in _MARKS.split(format.begin) if part]
        token = self._tokenizer.token_id(first)
        if token is None:
            raise BadRequest(f"{BUDGET}: expected a tokenizer that has {first} as one token, found none in it", BUDGET)
        if not tail:
            return f"(<[^{token}]>)* ({thinking} {_ANYTHING})?"
        self.rules.append(rf"OTHERWISE: /[^{re.escape(tail[0][0])}](.|\n)*/")
        return f"{thinking} {_ANYTHING} | <[{token}]> OTHERWISE {_ANYTHING}"
