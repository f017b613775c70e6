"""Grammars of tool calls in llguidance itself: what each format's hold, and that the format reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from demo_model import DEMO
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from lockstep.runtime import Tokenizer
from lockstep.runtime.grammar import Grammar
from lockstep.runtime.grammar.trial import compiled, open_tokenizer
from lockstep_serve.answer_reader import AnswerPlan, join_parts
from lockstep_serve.bodies import BadRequest
from lockstep_serve.reasoning import FORMATS as REASONING
from lockstep_serve.tool_formats import FORMATS
from lockstep_serve.tool_grammar import answer_grammar
from lockstep_serve.tools import Tools, calling_format, tools_of

SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "c": {"type": "string", "enum": ["x", "y/z"]},
        "n": {"type": "array", "items": {"$ref": "#/$defs/item"}},
        "e": {"anyOf": [{"$ref": "#/$defs/either"}, {"type": "null"}]},
        "t": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["s", "n"],
    "additionalProperties": False,
    "$defs": {"item": {"type": "integer"}, "either": {"enum": ["left", 3]}},
}
GIVEN = [
    {"type": "function", "function": {"name": "f", "strict": True, "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
    {"type": "function", "function": {"name": "h", "parameters": {"type": "object"}}},
]
ARGUMENTS = {"s": 'a <b>\n"é', "c": "y/z", "n": [1, 2], "e": None, "t": "it is 3"}
HELD = sorted(name for name, format in FORMATS.items() if format.call)


class Setup:
    """A tokenizer, and whether its llguidance takes texts."""

    def __init__(self, folder: Path, has_marks: bool) -> None:
        library = Library.from_file(str(DEMO / "tokenizer.json"))
        marks = {"<think>", "</think>"}
        for format in FORMATS.values():
            marks |= {*format.marks, *format.starts}
        if has_marks:
            library.add_tokens([AddedToken(mark, normalized=False) for mark in sorted(marks)])
        path = folder / "tokenizer.json"
        library.save(str(path))
        self.tokenizer = Tokenizer(path)
        self._guide = open_tokenizer(path.read_text(), 1, [0])

    def takes(self, grammar: Grammar | None, text: str) -> bool:
        """Return whether a text is all of an answer that follows a grammar."""
        assert grammar is not None
        matcher = compiled(self._guide, grammar.kind, grammar.text, grammar.around)
        ids = self.tokenizer.encode(text).tolist()
        return all(matcher.consume_token(token) for token in ids) and matcher.is_accepting()


@pytest.fixture(scope="module", params=[False, True], ids=["marks as text", "marks as tokens"])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("marks"), request.param)


def ask(choice: Any) -> Tools:
    tools = tools_of(GIVEN, choice, True)
    assert tools is not None
    return tools


def written(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Return calls as a model writes them, by the format's own table."""
    format = FORMATS[name]
    texts = []
    for function, arguments in calls:
        text = json.dumps(arguments, ensure_ascii=False)  # llguidance takes no other spelling of a character
        if format.argument:
            text = ""
            for key, argument in arguments.items():
                value = argument if isinstance(argument, str) else json.dumps(argument)
                text += "".join(filled(format.argument, {"\0key": key, "\0value": value}))
        texts.append("".join(filled(format.call, {"\0name": function, "\0arguments": text, "\0number": "0"})))
    begin, between, end = ("".join(parts) for parts in format.around)
    return begin + between.join(texts) + end


def filled(parts: tuple[str, ...], values: dict[str, str]) -> list[str]:
    return [values.get(part, part) for part in parts]


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_calls_that_follow_their_schemas_are_taken_and_others_are_not(setup: Setup, name: str, choice: str) -> None:
    tools = ask(choice)
    format = FORMATS[name]
    grammar = answer_grammar(tools, AnswerPlan(format=format), None, None, setup.tokenizer)
    good = [[("f", ARGUMENTS)], [("g", {})], [("f", {**ARGUMENTS, "e": "left"})]]
    if not format.answer:  # else a call ends the answer
        good.append([("f", ARGUMENTS), ("g", {})])
    prefix = "".join(format.answer)
    for calls in good:
        text = written(name, calls)
        assert setup.takes(grammar, text)
        reader = AnswerPlan(format=format, tools=tools.schemas).reader()
        actual = join_parts(reader.push(text) + reader.finish()).calls
        assert [(function, json.loads(arguments)) for function, arguments in actual] == calls
    for wrong in ({**ARGUMENTS, "n": ["a"]}, {**ARGUMENTS, "e": "right"}, {**ARGUMENTS, "c": "z"}, {"s": "a"}):
        assert not setup.takes(grammar, written(name, [("f", wrong)]))
    assert not setup.takes(grammar, written(name, [("unknown", {})]))
    assert setup.takes(grammar, f"{prefix}just a < text") == (choice == "auto")
    if not format.opening and not prefix:
        before = "Let me [look] < here.\n"
        assert setup.takes(grammar, before + written(name, [("f", ARGUMENTS)])) == (choice == "auto")
    # Of a function that is not strict any object will do, where no call is required.
    assert choice == "required" or setup.takes(grammar, written(name, [("h", {"a": "b"})]))


@pytest.mark.parametrize("name", HELD)
def test_a_named_function_is_called_once(setup: Setup, name: str) -> None:
    tools = ask({"type": "function", "function": {"name": "f"}})
    grammar = answer_grammar(tools, AnswerPlan(format=FORMATS[name]), None, None, setup.tokenizer)
    assert setup.takes(grammar, written(name, [("f", ARGUMENTS)]))
    assert not setup.takes(grammar, written(name, [("g", {})]))
    assert not setup.takes(grammar, written(name, [("f", ARGUMENTS), ("f", ARGUMENTS)]))


@pytest.mark.parametrize("name", HELD)
def test_reasoning_and_an_asked_form_go_with_calls(setup: Setup, name: str) -> None:
    think = REASONING["think"]
    form = Grammar("json_schema", '{"type": "integer"}', "response_format")
    call = written(name, [("f", ARGUMENTS)])
    prefix = "".join(FORMATS[name].answer)
    for opened, before in ((True, ""), (False, "<think>")):
        grammar = answer_grammar(ask("auto"), AnswerPlan(think, opened, FORMATS[name]), form, None, setup.tokenizer)
        assert setup.takes(grammar, f"{before}free {{text</think>\n\n{call}")
        assert setup.takes(grammar, f"{before}free {{text</think>{prefix}12")
        assert not setup.takes(grammar, f"{before}free {{text</think>\n\nwords")
        assert setup.takes(grammar, f"{prefix}12") == (not opened)


def test_the_reasoning_of_harmony_is_a_message_before_the_call(setup: Setup) -> None:
    plan = AnswerPlan(REASONING["harmony"], False, FORMATS["harmony"])
    thought = "<|channel|>analysis<|message|>Hm.<|end|>"
    call = written("harmony", [("f", ARGUMENTS)])
    grammar = answer_grammar(ask("required"), plan, None, None, setup.tokenizer)
    assert setup.takes(grammar, call) and setup.takes(grammar, f"{thought}<|start|>assistant{call}")
    assert not setup.takes(grammar, thought + call)
    form = Grammar("json_schema", '{"type": "integer"}', "response_format")
    grammar = answer_grammar(None, plan, form, None, setup.tokenizer)
    assert setup.takes(grammar, f"{thought}<|start|>assistant<|channel|>final<|message|>12")
    assert not setup.takes(grammar, f"{thought}<|start|>assistant12")


def test_a_budget_ends_the_reasoning(setup: Setup) -> None:
    think = REASONING["think"]
    harmony = REASONING["harmony"]
    if setup.tokenizer.token_id("</think>") is None:
        with pytest.raises(BadRequest, match="thinking_token_budget: expected a tokenizer that has </think> as one"):
            answer_grammar(None, AnswerPlan(think), None, 2, setup.tokenizer)
        return
    for budget, thought in ((0, ""), (2, "a"), (2, "ab")):
        opened = answer_grammar(None, AnswerPlan(think, True), None, budget, setup.tokenizer)
        assert setup.takes(opened, f"{thought}</think>then <think> or <tool_call> [TOOL_CALLS]")
        assert not setup.takes(opened, f"{thought}ccccccc</think>")
    free = answer_grammar(None, AnswerPlan(think), None, 2, setup.tokenizer)
    assert setup.takes(free, "no thought <tool_call>") and setup.takes(free, "\n<think>a</think>b")
    assert not setup.takes(free, "<think>ccccccc</think>") and not setup.takes(free, " \n<think>ccccccc")
    form = Grammar("json_schema", '{"type": "integer"}', "response_format")
    grammars = answer_grammar(None, AnswerPlan(think, True), form, 2, setup.tokenizer)
    assert setup.takes(grammars, "a</think>12") and not setup.takes(grammars, "ccccccc</think>12")
    head = "<|channel|>analysis<|message|>"
    end = "<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    channels = answer_grammar(None, AnswerPlan(harmony, False, FORMATS["harmony"]), None, 2, setup.tokenizer)
    assert setup.takes(channels, f"{head}a{end}") and not setup.takes(channels, f"{head}ccccccc{end}")
    assert setup.takes(channels, "<|channel|>final<|message|>Yes.")


def test_a_format_without_a_grammar_is_plain_json_where_a_call_is_required(setup: Setup) -> None:
    assert calling_format(FORMATS["pythonic"], ask("required")) is FORMATS["json"]
    assert calling_format(FORMATS["pythonic"], ask("auto")) is FORMATS["pythonic"]
    with pytest.raises(BadRequest, match="strict: expected a tool_choice that requires a call, for pythonic is read"):
        answer_grammar(ask("auto"), AnswerPlan(format=FORMATS["pythonic"]), None, None, setup.tokenizer)
