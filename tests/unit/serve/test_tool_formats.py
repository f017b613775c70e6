"""Texts of answers to reasoning, content and tool calls: by format, whole and in any pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import InputError
from lockstep_serve.answer_reader import AnswerPlan, Message, join_parts
from lockstep_serve.reasoning import FORMATS as REASONING
from lockstep_serve.reasoning import reasoning_format
from lockstep_serve.tool_formats import FORMATS, tool_format
from lockstep_serve.tool_formats.arguments import branches, choices, coerced

TOOLS: dict[str, Any] = {"f": {"properties": {"s": {"type": "string"}}}, "g": {}}
NESTED = {"q": 'she said "{[\\"]}" \\ and left', "ü": ["😀", "</tool_call", {"deep": [1.5, None, True]}]}
QUOTED = json.dumps(NESTED, ensure_ascii=False)
F = ("f", QUOTED)
G = ("g", "{}")
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
K2 = "<|tool_call_begin|>functions.{1}:{0}<|tool_call_argument_begin|>{2}<|tool_call_end|>"
SAID = "<|channel|>commentary<|message|>Hm.<|end|>"
PYTHON = f"f(q={NESTED['q']!r}, ü={NESTED['ü']!r})"
GLM = "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>12</arg_value>\n<arg_key>n</arg_key><arg_value>[12]</arg_value>\n"
CODER = "<tool_call>\n<function=f>\n<parameter=s>\n12\n\n3\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n"
SEED = (
    "<seed:tool_call>\n<function=f>\n<parameter=s>12</parameter>\n<parameter=n>3</parameter>\n</function>\n"
    "</seed:tool_call>"
)
JSONIC = ("f", '{"q": true, "ü": [null, "a\\nb", "it\'s"], "n": {"a": false}}')


def call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def hermes(*calls: tuple[str, str]) -> str:
    return "\n".join(f"<tool_call>\n{call(*arguments)}\n</tool_call>" for arguments in calls)


# Format, an answer, its content, its calls.
WHOLE = [
    ("hermes", hermes(F), "", [F]),
    ("hermes", f"  Let me look.\n{hermes(F, G)}\n", "  Let me look.", [F, G]),
    ("hermes", f"before {hermes(G)} after \n", "before\nafter \n", [G]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "id": [3, "x"], "name": "g"}</tool_call>', "", [("g", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "g", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("g", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "g"}', "", [G]),
    ("hermes", f"<tool_call>[{call(*F)}, {call(*G)}]</tool_call>", "", [F, G]),
    ("json", f" {call(*F, key='parameters')}\n", "", [F]),
    ("json", f"[{call(*F)}, {call(*G)}]", "", [F, G]),
    ("llama3_json", call(*F, key="parameters"), "", [F]),
    ("llama3_json", f"<|python_tag|>{call(*F, key='parameters')}; {call(*G)}", "", [F, G]),
    ("mistral", f"Well. [TOOL_CALLS] [{call(*F)}, {call(*G)}]", "Well.", [F, G]),
    ("mistral", f"[TOOL_CALLS]f{QUOTED}", "", [F]),
    ("mistral_args", f"Well.[TOOL_CALLS]f[ARGS]{QUOTED}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{{}}", "Well.", [F, G]),
    ("deepseek_v3", f"<｜tool▁calls▁begin｜>{V3.format(*F)}\n{V3.format(*G)}<｜tool▁calls▁end｜>", "", [F, G]),
    (
        "deepseek_v31",
        f"Hm<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{QUOTED}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Hm",
        [F],
    ),
    ("kimi_k2", f"Hm.{KIMI.format(f'{K2.format(0, *F)} {K2.format(1, *G)}')}", "Hm.", [F, G]),
    ("kimi_k2", f"{KIMI.split('{')[0]}{K2.format(0, *G).replace('functions.', '')}", "", [G]),
    ("harmony", f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{QUOTED}<|call|>", "", [F]),
    ("harmony", f"{SAID}<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{{}}", "Hm.", [G]),
    ("harmony", f"{SAID}<|start|>assistant<|channel|>final<|message|> Well. <|return|>", "Hm.\nWell.", []),
    ("harmony", "no <head", "no <head", []),
    ("granite", f"<|tool_call|>[{call(*F)}, {call(*G)}]", "", [F, G]),
    ("granite", f"<|tool_call|>[{call(*G)}]<|/tool_call|>", "", [G]),
    ("pythonic", f"[{PYTHON}, g()]", "", [F, G]),
    ("pythonic", "<|python_start|>[g()]<|python_end|>", "", [G]),
    ("pythonic", '[f(q=true, ü=[null, \'a\nb\', "it\'s"], n={"a": false}),\n g()]', "", [JSONIC, G]),
    ("seed_oss", f"I see.\n{SEED}", "I see.", [("f", '{"s": "12", "n": 3}')]),
    ("glm", f"I see.\n{GLM}</tool_call>", "I see.", [("f", '{"s": "12", "n": [12]}')]),
    ("qwen3_coder", f"I see.\n{CODER}</tool_call>", "I see.", [("f", '{"s": "12\\n\\n3", "n": 3}')]),
]
# Format, an answer that is content, as nothing in it is a call.
NOT_CALLS = [
    ("hermes", "just words, < and <tool and </tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": '),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "1"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\n"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>" + '{"name": "f", "arguments": ' + '{"a":' * 99),
    ("json", 'Here: {"name": "f"}'),
    ("json", '{"name": "f", "arguments": {}} and more'),
    ("json", '{"answer": 42}'),
    ("llama3_json", "{}"),
    ("mistral", "[TOOL_CALLS] none"),
    ("mistral_args", '[TOOL_CALLS]f[ARGS]{"a"'),
    ("deepseek_v3", "<｜tool▁calls▁begin｜> f"),
    ("granite", "<|tool_call|>[]"),
    ("kimi_k2", KIMI.format(K2.format(0, "unknown", "{}"))),
    ("harmony", "<|channel|>commentary to=functions.unknown<|message|>{}<|call|>"),
    ("harmony", '<|channel|>commentary to=functions.f<|message|>{"a": '),
    ("harmony", "<|channel|>comm"),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[f(open)]"),
    ("pythonic", "[f(a=open())]"),
    ("pythonic", "[f(a=1, a=2)]"),
    ("pythonic", "[f(a=1"),
    ("glm", "<tool_call>f\n<arg_key>a</arg_key>"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>1"),
]


def read(plan: AnswerPlan, pieces: list[str]) -> tuple[Message, int]:
    """Return the message of an answer that comes in pieces, and how many beginnings of calls were none."""
    reader = plan.reader()
    parts = []
    for piece in pieces:
        parts += reader.push(piece)
    parts += reader.finish()
    assert all(part.text or part.kind == "name" for part in parts)
    message = join_parts(parts)
    assert reader.num_calls == len(message.calls)
    return message, reader.num_malformed


def plan(name: str, **fields: Any) -> AnswerPlan:
    return AnswerPlan(format=FORMATS[name], tools=TOOLS, **fields)


@pytest.mark.parametrize(("name", "text", "content", "calls"), WHOLE)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
def test_calls_are_read_in_any_pieces(name: str, text: str, content: str, calls: list, size: int) -> None:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    for forced in (False, True):
        message, malformed = read(plan(name, forced=forced), pieces)
        assert message == Message("", content, calls) and not malformed


@pytest.mark.parametrize(("name", "text"), NOT_CALLS)
@pytest.mark.parametrize("size", [1, 5, 10_000])
def test_what_is_no_call_is_content_to_the_character(name: str, text: str, size: int) -> None:
    message, malformed = read(plan(name), [text[at : at + size] for at in range(0, len(text), size)])
    assert message == Message("", text, [])
    begins = any(start in text for start in FORMATS[name].starts) or text[0] in (FORMATS[name].opening or "\0")
    assert malformed == begins


def test_a_call_after_one_that_is_none_is_read() -> None:
    text = f'<tool_call>{{"name": "f", <tool_call>{hermes(G)}'
    message, malformed = read(plan("hermes"), [text])
    assert message == Message("", '<tool_call>{"name": "f", <tool_call>', [G]) and malformed == 2


def test_only_the_first_call_counts_where_one_is_asked_for() -> None:
    assert read(plan("hermes", single=True), [hermes(F, G)])[0].calls == [F]


def test_a_held_call_is_given_out_as_it_comes_and_a_free_one_when_it_is_whole() -> None:
    text = hermes(F)
    for forced, first in ((True, text.index('"arguments"')), (False, len(text))):
        reader = plan("hermes", forced=forced).reader()
        came = next(at for at in range(1, len(text) + 1) if reader.push(text[at - 1 : at]))
        assert came <= first and (forced or came == first)


def test_a_held_call_that_is_cut_short_ends_where_it_does() -> None:
    text = hermes(F)[:40]
    message, _ = read(plan("hermes", forced=True), [text])
    assert message.calls == [("f", QUOTED[: len(message.calls[0][1])])] and not message.content
    assert read(plan("hermes"), [text])[0] == Message("", text, [])


SCHEMA: dict[str, Any] = {
    "$defs": {"City": {"type": "string", "enum": ["a", "null"]}, "Count": {"type": "integer"}},
    "properties": {
        "text": {"type": "string"},
        "flag": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "nullable": {"type": "integer", "nullable": True},
        "list": {"type": "array"},
        "object": {"allOf": [{"type": "object"}]},
        "count": {"$ref": "#/$defs/Count"},
        "city": {"anyOf": [{"$ref": "#/$defs/City"}, {"type": "null"}]},
        "number": {"type": "number"},
        "either": {"type": ["string", "integer"]},
        "one": {"enum": [1, "2"]},
        "round": {"$ref": "#/properties/round"},
        "any": True,
    },
    "additionalProperties": {"type": "string"},
}
# An argument, its text, its value.
COERCED = [
    ("text", "None", "None"), ("text", " 12\n", " 12\n"), ("other", "12", "12"),
    ("flag", "True", True), ("flag", "false", False), ("flag", "yes", "yes"), ("flag", "1", "1"),
    ("maybe", "123", "123"), ("maybe", "None", None), ("maybe", "null", None), ("maybe", '"a"', '"a"'),
    ("nullable", "None", None), ("nullable", "7", 7), ("nullable", "x", "x"),
    ("list", "['a', None, (1, 2)]", ["a", None, [1, 2]]), ("list", '["a", null]', ["a", None]), ("list", "[1", "[1"),
    ("object", "{'a': True, 1: 'b'}", {"a": True, "1": "b"}), ("object", "{1, 2}", "{1, 2}"),
    ("list", "[open('a')]", "[open('a')]"), ("list", "[1e999]", "[1e999]"),
    ("count", "3", 3), ("count", "3.0", 3), ("count", "3.5", "3.5"), ("count", "True", "True"),
    ("city", "null", "null"), ("city", "None", None), ("city", "b", "b"),
    ("number", "1e999", "1e999"), ("number", "-Infinity", "-Infinity"), ("number", "3", 3), ("number", "3.5", 3.5),
    ("either", "12", 12), ("either", "1.5", "1.5"), ("one", "1", 1), ("one", "2", "2"),
    ("round", "{}", {}), ("any", '"a"', "a"), ("any", "None", None), ("any", "a b", "a b"),
    ("any", '"\\ud800"', "\ud800"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "value"), COERCED)
def test_arguments_are_read_by_their_schema(name: str, text: str, value: Any) -> None:
    answers = {
        "glm": f"<tool_call>f\n<arg_key>{name}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
        "qwen3_coder": f"<tool_call>\n<function=f>\n<parameter={name}>\n{text}\n</parameter></function></tool_call>",
        "seed_oss": f"<seed:tool_call><function=f><parameter={name}>{text}</parameter></function></seed:tool_call>",
    }
    for format, answer in answers.items():
        if format == "seed_oss" and text.endswith("\n"):
            continue  # which would be the tags'
        plan = AnswerPlan(format=FORMATS[format], tools={"f": SCHEMA})
        ((_, arguments),) = read(plan, [answer])[0].calls
        arguments.encode()  # no half of a surrogate pair
        actual = json.loads(arguments, parse_constant=pytest.fail)[name]
        assert (actual, type(actual)) == (value, type(value))


def test_calls_are_not_lost_where_a_model_leaves_out_a_mark() -> None:
    bare = CODER.removeprefix("<tool_call>\n")
    f = ("f", '{"s": "12\\n\\n3", "n": 3}')
    for ending in ("", "</tool_call>", " Done."):
        message, malformed = read(plan("qwen3_coder"), [f"I see. {bare}{ending}"])
        content = "I see.\nDone." if "D" in ending else "I see."
        assert message == Message("", content, [f]) and not malformed
    unknown = bare.replace("=f>", "=unknown>")
    assert read(plan("qwen3_coder"), [unknown]) == (Message("", unknown, []), 1)


def test_calls_in_reasoning_that_does_not_end() -> None:
    """The formats that end it are those whose models' own readers do so."""
    think = REASONING["think"]
    for name, call in (("kimi_k2", KIMI.format(K2.format(0, *G))), ("qwen3_coder", f"{CODER}</tool_call>")):
        for pieces in ([f"Hm. {call}"], list(f"Hm. {call}")):
            message, malformed = read(plan(name, reasoning=think, opened=True), pieces)
            assert (message.reasoning, message.content, len(message.calls), malformed) == ("Hm.", "", 1, 0)
    for opened, text in ((True, f"Hm. {hermes(F, G)}"), (False, f"<think>Hm. {hermes(F, G)}")):
        message, malformed = read(plan("hermes", reasoning=think, opened=opened), list(text))
        assert not message.calls and not message.content and malformed == 2


REASONED = [
    ("<think>\nI think {x}.\n</think>\n\nYes. ", False, "I think {x}.", "Yes. "),
    ("I think.</think>Yes.", True, "I think.", "Yes."),
    ("No thought, <think> none", False, "", "No thought, <think> none"),
    ("<think>never ends < /think>", False, "never ends < /think>", ""),
    ("", True, "", ""),
    ("<thin", False, "", "<thin"),
    ("  <think></think>", False, "", ""),
]


@pytest.mark.parametrize(("text", "opened", "reasoning", "content"), REASONED)
@pytest.mark.parametrize("size", [1, 4, 10_000])
def test_reasoning_is_parted_from_content(text: str, opened: bool, reasoning: str, content: str, size: int) -> None:
    plan = AnswerPlan(reasoning=REASONING["think"], opened=opened)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert read(plan, pieces)[0] == Message(reasoning, content, [])


@pytest.mark.parametrize("size", [1, 4, 10_000])
def test_channels_of_harmony(size: int) -> None:
    text = "<|channel|>analysis<|message|>Hm. <|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    answer_plan = plan("harmony", reasoning=REASONING["harmony"])
    assert read(answer_plan, pieces)[0] == Message("Hm.", "Yes.", [])
    again = text.replace(
        "<|channel|>final", "<|channel|>analysis<|message|>Or?<|end|><|start|>assistant<|channel|>final"
    )
    assert read(answer_plan, [again])[0] == Message("Hm.Or?", "Yes.", [])
    assert read(plan("harmony"), pieces)[0] == Message("", "Hm.\nYes.", [])


def test_kimis_ids_go_on_from_those_of_the_chat() -> None:
    assert plan("kimi_k2", earlier=3).call_id("any", 1, "f") == "functions.f:4"


def test_a_call_in_the_reasoning_is_none() -> None:
    answer_plan = plan("hermes", reasoning=REASONING["think"])
    message, _ = read(answer_plan, [f"<think>{hermes(G)}</think>\n{hermes(F)}"])
    assert message == Message(hermes(G), "", [F])


ANSWERS = [text for _, text, *_ in WHOLE]
PIECES = {*ANSWERS, *(text[: len(text) // 2] for text in ANSWERS)}
MARKS = set().union(*((*format.starts, *format.marks) for format in FORMATS.values()))
OTHER_TEXT = st.text('{}[]"\\<>:, \n\ttool_callé😀', max_size=8)
TEXTS = st.lists(
    st.one_of(st.sampled_from(sorted(PIECES)), st.sampled_from(sorted(MARKS)), OTHER_TEXT), max_size=6
).map("".join)


@given(st.sampled_from(sorted(FORMATS)), TEXTS, st.lists(st.integers(1, 60), max_size=30), st.booleans(), st.booleans())
def test_the_pieces_do_not_matter(name: str, text: str, sizes: list[int], opened: bool, thinks: bool) -> None:
    pieces = []
    at = 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    answer_plan = plan(name, reasoning=REASONING["think"] if thinks else None, opened=opened)
    full = read(answer_plan, [text])
    assert read(answer_plan, [*pieces, text[at:]]) == full
    for _, arguments in full[0].calls:
        assert isinstance(json.loads(arguments), dict)


def test_formats_are_recognised_by_the_template() -> None:
    hermes = "{{ '<tool_call>' }}"
    # What tells a family, as its templates have it.
    templates = {
        hermes: "hermes",
        f"{hermes} <arg_key>{{{{ key }}}}</arg_key>": "glm",
        f"{hermes} <function=example><parameter=value>": "qwen3_coder",
        "{%- set begin = '<seed:tool_call>' -%} <function=example><parameter=value>": "seed_oss",
        "[AVAILABLE_TOOLS] {{ '[TOOL_CALLS] [' }}": "mistral",
        "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}": "mistral_args",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json": "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>": "deepseek_v31",
        "<|tool_calls_section_begin|>": "kimi_k2",
        "{{ '<|start|>assistant<|channel|>analysis<|message|>' }}": "harmony",
        "start your answer with <|tool_call|> and a JSON list": "granite",
        "<|start_header_id|> [func_name1(params_name1=params_value1, ...)]": "pythonic",
        '<|start_header_id|> Respond in the format {"name": function name, "parameters": dictionary}': "llama3_json",
        "<|start_header_id|>{{ messages }}": None,
    }
    for template, name in templates.items():
        format = tool_format(None, template)
        assert (format and format.name) == name
    named = tool_format("granite", hermes)
    assert named is FORMATS["granite"] and tool_format("none", hermes) is None and tool_format(None, None) is None
    with pytest.raises(InputError, match="--tool-call-parser: expected none or one of deepseek_v3, .*; found 'hermit'"):
        tool_format("hermit", None)
    assert reasoning_format(None, "<|end|>") is None
    assert reasoning_format(None, "<|channel|>analysis<|message|>") is REASONING["harmony"]
    assert reasoning_format(None, "</think>") is REASONING["think"] and reasoning_format("none", "</think>") is None
    with pytest.raises(InputError, match="--reasoning-parser: expected none or one of cohere, .*; found 'thin'"):
        reasoning_format("thin", None)


def test_a_schema_that_multiplies_by_itself_takes_no_time() -> None:
    """2^64 branches and more: those beyond the first thousand allow any value."""
    for word in ("anyOf", "allOf"):
        again = {word: [{"$ref": "#/$defs/A"}] * 16}
        function = {"properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": again}}
        assert coerced("7", function, "x") == 7


def test_an_enum_behind_one_all_of_is_that_enum() -> None:
    color = {"$defs": {"Color": {"enum": ["red", "7"]}}, "properties": {"x": {"allOf": [{"$ref": "#/$defs/Color"}]}}}
    assert coerced("7", color, "x") == "7"
    assert [choices(branch) for branch in branches(color["properties"]["x"], color)] == [["red", "7"]]
