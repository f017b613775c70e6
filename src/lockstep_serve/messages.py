"""The messages of a chat, as in OpenAI's API, to the text of a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic_core

from lockstep_serve.bodies import BadRequest
from lockstep_serve.chat import ChatError
from lockstep_serve.log import log_once
from lockstep_serve.served_model import ServedModel

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_MESSAGES = 4096
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # fields by type of part
_INSTRUCTIONS = (
    "You can call these functions: {functions}\nTo call one, answer with nothing but JSON: "
    '{{"name": NAME, "arguments": {{...}}}}, or a list of such objects for several calls.'
)
_RESERVED = ("messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message")


async def chat_text(
    model: ServedModel,
    messages: Any,
    opens: bool | None,
    continues: bool,
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] = (),
    instructs: bool = False,
) -> str:
    """Return a chat's text, rendered by the template. Raises BadRequest.

    opens: end with the generation prompt; None: unless the chat `continues` its last message. instructs: a system
    message describes the tools, instead of the template.
    """
    if model.chat.fault is not None:
        raise BadRequest(f"messages: {model.chat.fault}; use /v1/completions", "messages")
    if continues and opens:
        name = "continue_final_message"
        raise BadRequest(f"{name}: expected false with add_generation_prompt true; leave one out", name)
    if reserved := sorted(set(variables) & set(_RESERVED)):
        name = "chat_template_kwargs"
        raise BadRequest(f"{name}: expected no {reserved[0]}, which is a field of the body", name)
    turns = template_messages(messages)
    if continues and not isinstance(turns[-1].get("content"), str):
        raise BadRequest("messages: expected text in the last message to continue, found none", "messages")
    if tools and instructs:
        turns = plain_messages(turns, tools)
    elif tools:
        variables = {**variables, "tools": tools}
    if opens is None:
        opens = not continues
    try:
        return await model.chat.render(turns, opens, continues, variables)
    except ChatError as error:
        message = f"messages: expected a chat that the model's template renders, found: {error}"
        raise BadRequest(message, "messages") from None


def template_messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages as templates expect them: content is one text, and no field is null. Raises BadRequest."""
    if not isinstance(value, list):
        raise BadRequest(f"messages: expected 1 to {_MAX_MESSAGES} messages, found no list", "messages")
    if not 1 <= len(value) <= _MAX_MESSAGES:
        raise BadRequest(f"messages: expected 1 to {_MAX_MESSAGES} messages, found {len(value)} of them", "messages")
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES:
            raise _invalid(where, f"an object with a role: {', '.join(_ROLES)}", role)
        if role == "tool" and not _has_call(message, messages):
            log_once("a tool's result without its call, as in a trimmed chat, is passed to the chat template unchanged")
        turn = {name: entry for name, entry in message.items() if entry is not None}
        # OpenAI's newer name for the system's role, which templates do not know.
        if role == "developer":
            turn["role"] = "system"
        if "tool_calls" in turn:
            turn["tool_calls"] = _tool_calls(turn["tool_calls"], f"{where}.tool_calls")
        if turn.get("tool_calls") and not turn.get("content"):
            reasoning = turn.get("reasoning_content") or turn.get("reasoning")
            if reasoning:
                # The name in GPT-OSS's template.
                turn["thinking"] = reasoning
        if "content" in turn or not turn.get("tool_calls"):
            turn["content"] = _content(turn.get("content"), f"{where}.content")
        # It was null: some templates test `content is none`.
        elif "content" in message:
            turn["content"] = None
        messages.append(turn)
    return messages


def _content(value: Any, where: str) -> str:
    """Return a message's content as one text; parts become lines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _invalid(where, "a text, or a list of parts of type text", value)
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(value))


def _part(part: Any, where: str) -> str:
    """Return the text of a part; the types of text parts are those of vLLM."""
    if isinstance(part, str):
        return part
    kind = part
    text = None
    if isinstance(part, dict):
        kind = part.get("type")
        if isinstance(kind, str) and kind in _TEXTS:
            text = part.get(_TEXTS[kind])
    if not isinstance(text, str):
        raise _invalid(where, 'a part {"type": "text", "text": ...}: this model reads text only', kind)
    return text


def _has_call(message: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a tool's result comes after an assistant's message with its call."""
    calling: Mapping[str, Any] = next((other for other in reversed(before) if other["role"] != "tool"), {})
    ids = [call.get("id") for call in calling.get("tool_calls") or ()]
    return bool(ids) and (message.get("tool_call_id") in (None, *ids) or None in ids)


def plain_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for a template without tools: a system message describes them, and calls become text."""
    functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    instructions = _INSTRUCTIONS.format(functions=functions)
    plain: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            result = {"tool_call_id": message.get("tool_call_id"), "result": message["content"]}
            plain.append({"role": "user", "content": json.dumps(result, ensure_ascii=False)})
        elif calls := message.get("tool_calls"):
            content: Any = [_plain_call(call) for call in calls]
            if len(content) == 1:
                content = content[0]
            plain.append({"role": "assistant", "content": json.dumps(content, ensure_ascii=False)})
        else:
            plain.append(dict(message))
    # Many templates allow a single system message, at the beginning.
    if plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{instructions}"}, *plain[1:]]
    return [{"role": "system", "content": instructions}, *plain]


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {"name": function.get("name"), "arguments": arguments, "id": call.get("id")}


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls whose arguments are an object, or the JSON of one. Raises BadRequest for others."""
    if not isinstance(value, list) or not all(isinstance(call, dict) for call in value):
        raise _invalid(where, "a list of objects", value)
    return [_tool_call(call, f"{where}[{index}].function") for index, call in enumerate(value)]


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # Complete arguments stay unchanged; those of a truncated answer are completed.
        try:
            if isinstance(json.loads(arguments), dict):
                return call
        except (ValueError, RecursionError):
            pass
        try:
            arguments = partial_json(arguments)
        except ValueError:
            raise _invalid(f"{where}.arguments", "JSON", arguments) from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise _invalid(f"{where}.arguments", "JSON of an object", arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def partial_json(text: str) -> Any:
    """Return the value of truncated JSON, such as a call cut at `max_tokens`; None for "". Raises ValueError."""
    if not text.strip():
        return None
    return pydantic_core.from_json(text, allow_partial="trailing-strings")


def _invalid(where: str, expected: str, value: Any) -> BadRequest:
    return BadRequest(f"{where}: expected {expected}; found {ascii(value)[:80]}", "messages")
