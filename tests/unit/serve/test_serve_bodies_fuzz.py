"""Bodies of chats, messages and responses with any JSON in any place: each is accepted, or rejected with one line."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
from demo_model import DEMO
from hypothesis import given
from hypothesis import strategies as st

from lockstep.runtime import Tokenizer
from lockstep_serve.answer_reader import AnswerPlan
from lockstep_serve.anthropic import MessagesBody, messages_chat
from lockstep_serve.bodies import BadRequest
from lockstep_serve.messages import plain_messages, template_messages
from lockstep_serve.openai_chat import ChatBody
from lockstep_serve.reasoning import FORMATS as REASONING
from lockstep_serve.responses import ResponsesBody, responses_chat
from lockstep_serve.tool_formats import FORMATS
from lockstep_serve.tool_grammar import answer_grammar
from lockstep_serve.tools import calling_format, tools_of

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "enum": ["b"]}, "c": {"type": "integer"}, "d": {"type": "string"}},
    "required": ["a"],
    "$defs": {"e": {"type": "string"}},
}
FUNCTION = {"name": "f", "description": "d", "strict": True, "parameters": SCHEMA}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
CHAT = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
}
MESSAGES = {
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "b"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f"},
    "thinking": {"type": "enabled", "budget_tokens": 1},
    "max_tokens": 1,
}
RESPONSES = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "reasoning", "summary": [{"text": "s"}], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": "b"}'},
        {"type": "function_call_output", "call_id": "1", "output": "r"},
        {"type": "message", "role": "assistant", "content": "a"},
    ],
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    "reasoning": {"effort": "low"},
    "include": ["reasoning.encrypted_content"],
}
TOKENIZER = Tokenizer(DEMO / "tokenizer.json")
ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.sampled_from(["", "auto", "text", "string", "f", "{"])),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(["type", "a"]), inner)),
    max_leaves=4,
)


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Return the paths of all values inside of one."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    paths = []
    for key, item in items:
        inner = (*path, key)
        paths += [inner, *places(item, inner)]
    return paths


def changed(body: dict[str, Any], path: tuple, value: Any) -> dict[str, Any]:
    body = copy.deepcopy(body)
    at: Any = body
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return body


def check(chat: ChatBody) -> None:
    """Take a chat's messages and tools as the server does before its template is rendered."""
    tools = tools_of(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
    messages = template_messages(chat.messages)
    if tools is not None:
        plain_messages(messages, tools.declared)
        for name in ("hermes", "glm", "mistral"):
            format = calling_format(FORMATS[name], tools)
            answer_grammar(tools, AnswerPlan(REASONING["think"], False, format), None, None, TOKENIZER)


def takes(kind: Any, chat_of: Any, body: dict[str, Any]) -> bool:
    """Return whether a body is accepted; any other must raise an error of one line."""
    try:
        check(chat_of(msgspec.convert(body, kind)))
    except msgspec.ValidationError:
        return False
    except BadRequest as error:
        assert error.status == 400 and error.param and "\n" not in error.message
        return False
    return True


CASES = [
    (ChatBody, lambda chat: chat, CHAT),
    (MessagesBody, messages_chat, MESSAGES),
    (ResponsesBody, responses_chat, RESPONSES),
]


def test_the_bodies_are_taken_as_they_are() -> None:
    assert all(takes(*case) for case in CASES)


@pytest.mark.long
@given(st.sampled_from(range(len(CASES))), st.data(), ANY)
def test_any_value_in_any_place_is_taken_or_refused(number: int, data: st.DataObject, value: Any) -> None:
    kind, chat_of, body = CASES[number]
    path = data.draw(st.sampled_from(places(body)))
    takes(kind, chat_of, changed(body, path, value))
