"""The messages of a chat, as OpenAI's API has them, to the text of a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic_core

from lockstep.serve.bodies import BadRequest
from lockstep.serve.chat import ChatError
from lockstep.serve.say import say_once
from lockstep.serve.service import Service

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MOST_MESSAGES = 4096
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # fields by type of part
_INSTRUCTIONS = (
    "You can call these functions: {functions}\nTo call one, answer with nothing but JSON: "
    '{{"name": NAME, "arguments": {{...}}}}, or a list of such objects for several calls.'
)
_GIVEN = ("messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message")


async def chat_text(
    service: Service,
    messages: Any,
    opens: bool | None,
    continues: bool,
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] = (),
    instructs: bool = False,
) -> str:
    """Return a chat's text by the template; opens: None: unless it `continues`.

    tools: for the template, or where it `instructs` for a system message that describes them. Raises BadRequest.
    """
    if service.chat.fault is not None:
        raise BadRequest(f"messages: {service.chat.fault}; use /v1/completions", "messages")
    if continues and opens:
        name = "continue_final_message"
        raise BadRequest(f"{name}: expected false with add_generation_prompt true; leave one out", name)
    if taken := sorted(set(variables) & set(_GIVEN)):
        name = "chat_template_kwargs"
        raise BadRequest(f"{name}: expected no {taken[0]}, which is no variable of its own", name)
    found = template_messages(messages)
    if continues and not isinstance(found[-1].get("content"), str):
        raise BadRequest("messages: expected a text to go on from in the last one, found none", "messages")
    if instructs:
        found = plain_messages(found, tools)
    elif tools:
        variables = {**variables, "tools": tools}
    try:
        return await service.chat.render(found, not continues if opens is None else opens, continues, variables)
    except ChatError as error:
        said = f"messages: expected a chat that the model's template renders, found: {error}"
        raise BadRequest(said, "messages") from None


def template_messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages as a template takes them: one text as content, no nulls. Raises BadRequest."""
    if not isinstance(value, list) or not 1 <= len(value) <= _MOST_MESSAGES:
        found = f"{len(value)} of them" if isinstance(value, list) else "no list"
        raise BadRequest(f"messages: expected 1 to {_MOST_MESSAGES} messages, found {found}", "messages")
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES:
            raise _wrong(where, f"an object with a role: {', '.join(_ROLES)}", role)
        if role == "tool" and not _has_call(message, messages):
            say_once("a tool's result without its call, as of a trimmed chat, goes to the chat template as it is")
        kept = {name: entry for name, entry in message.items() if entry is not None}
        if role == "developer":  # OpenAI's newer name of it, which templates do not know
            kept["role"] = "system"
        if "tool_calls" in kept:
            kept["tool_calls"] = _tool_calls(kept["tool_calls"], f"{where}.tool_calls")
        if kept.get("tool_calls") and not kept.get("content") and (thought := _thought(kept)):
            kept["thinking"] = thought  # as GPT-OSS's template calls it
        if "content" in kept or not kept.get("tool_calls"):
            kept["content"] = _content(kept.get("content"), f"{where}.content")
        elif "content" in message:  # templates ask whether it is none
            kept["content"] = None
        messages.append(kept)
    return messages


def _thought(message: Mapping[str, Any]) -> Any:
    return message.get("reasoning_content") or message.get("reasoning")


def _content(value: Any, where: str) -> str:
    """Return a message's content as one text; parts become lines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(where, "a text, or a list of parts of type text", value)
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(value))


def _part(part: Any, where: str) -> str:
    """Return the text of a part; the kinds of text are those that vLLM takes."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else part
    text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else None
    if not isinstance(text, str):
        raise _wrong(where, 'a part {"type": "text", "text": ...}: this model reads text only', kind)
    return text


def _has_call(message: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a tool's result comes after an assistant's message with its call."""
    calling: Mapping[str, Any] = next((other for other in reversed(before) if other["role"] != "tool"), {})
    ids = [call.get("id") for call in calling.get("tool_calls") or ()]
    return bool(ids) and (message.get("tool_call_id") in (None, *ids) or None in ids)


def plain_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for a template that knows no tools: a system message describes them, and calls are text."""
    functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    said = _INSTRUCTIONS.format(functions=functions)
    plain: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            result = {"tool_call_id": message.get("tool_call_id"), "result": message["content"]}
            plain.append({"role": "user", "content": json.dumps(result, ensure_ascii=False)})
        elif calls := message.get("tool_calls"):
            calls = [_plain_call(call) for call in calls]
            text = json.dumps(calls if len(calls) > 1 else calls[0], ensure_ascii=False)
            plain.append({"role": "assistant", "content": text})
        else:
            plain.append(dict(message))
    if plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{said}"}, *plain[1:]]
    return [{"role": "system", "content": said}, *plain]


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments") or {}
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"name": function.get("name"), "arguments": arguments, "id": call.get("id")}


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls whose arguments are an object, or the JSON of one. Raises BadRequest for others."""
    if not isinstance(value, list) or not all(isinstance(call, dict) for call in value):
        raise _wrong(where, "a list of objects", value)
    return [_tool_call(call, f"{where}[{index}].function") for index, call in enumerate(value)]


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            if isinstance(json.loads(arguments), dict):
                return call
        except (ValueError, RecursionError):
            pass
        try:
            arguments = partial_json(arguments)
        except ValueError:
            raise _wrong(f"{where}.arguments", "JSON", arguments) from None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise _wrong(f"{where}.arguments", "JSON of an object", arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def partial_json(text: str) -> Any:
    """Return the value of JSON that is cut short, as calls are at `max_tokens`; None of nothing. Raises ValueError."""
    return pydantic_core.from_json(text, allow_partial="trailing-strings") if text.strip() else None


def _wrong(where: str, expected: str, found: Any) -> BadRequest:
    return BadRequest(f"{where}: expected {expected}; found {ascii(found)[:80]}", "messages")
