"""The part of the check `served` on tool calls: a call follows its schema, and the same request gets it again."""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.errors import CheckError, pip_install
from lockstep.verify.served.client import post
from lockstep.verify.served.server import Server

_CONTEXT = 768  # tokens of the prompt with the tool, and of the answer
_TOKENS = 256  # of the answer
NO_GRAMMARS = pip_install("grammar")  # in the error where llguidance is missing
_CITIES = ["Paris", "Berlin"]
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": _CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
_TOOL = {"name": "weather", "description": "Tell the weather of a city.", "parameters": _SCHEMA}


def calls_tools(server: Server) -> bool:
    """Return whether the model has a format of calls and context for one, and its reasoning can be cut off."""
    model = server.default
    reasoning = model.reasoning_format
    has_format = model.tool_format is not None and model.chat.fault is None
    can_end = reasoning is None or model.tokenizer.token_id(reasoning.end) is not None
    return has_format and can_end and server.ready.max_seq_len >= _CONTEXT


async def tool_call(server: Server, socket: Path) -> tuple[int, str | None]:
    """Request a call twice; return the number of answers, and a line about their fault, if any."""
    body = {
        "model": server.name,
        "messages": [{"role": "user", "content": "How is the weather in Paris?"}],
        "tools": [{"type": "function", "function": _TOOL}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": _TOKENS,
        "thinking_token_budget": 0,
    }
    answers = []
    try:
        for _ in range(2):
            answers += (await post(socket, "/v1/chat/completions", body, "served"))["choices"]
    except CheckError as error:
        if NO_GRAMMARS in str(error):
            return len(answers), None
        return len(answers), f"tool call: {error}"
    first, second = answers
    functions = [call["function"] for call in first["message"].get("tool_calls", ())]
    expected = [[{"name": _TOOL["name"], "arguments": {"city": city}}] for city in _CITIES]
    if [{**function, "arguments": json.loads(function["arguments"])} for function in functions] not in expected:
        message = json.dumps(first["message"])[:200]
        return 2, f"tool call: expected one of weather with a city of its schema, found {message}"
    if first != second:
        return 2, f"tool call: expected one answer, found {json.dumps(answers)[:300]}"
    return 2, None
