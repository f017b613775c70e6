"""OpenAI's Responses API without state, as an adapter to chats: bodies in; items out, whole or as typed events.

Codex works with it: tools that a provider would run are left out, and the answer's metadata says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import msgspec

from lockstep_serve.blocks import Block, BlockAnswer, BlockEvent, chat_form, rename_param
from lockstep_serve.bodies import BadRequest, Unsupported, error_response
from lockstep_serve.log import log_once
from lockstep_serve.openai_chat import ChatBody
from lockstep_serve.served_model import ServedModel
from lockstep_serve.stream import Stream, StreamError

# Fields that need state between requests, and their values that do not.
_STATE: Mapping[str, tuple] = {
    "previous_response_id": (None,),
    "conversation": (None,),
    "background": (None, False),
    "prompt": (None,),
}
_INCLUDE = ("reasoning.encrypted_content",)  # the reasoning itself, as this server stores nothing
_ROLES = ("user", "assistant", "system", "developer")


class ResponsesBody(msgspec.Struct, kw_only=True):
    """The body of POST /v1/responses."""

    UNSUPPORTED: ClassVar[Unsupported] = {
        "top_logprobs": (None, 0),
        "max_tool_calls": (None,),
        "stream_options": (None, {}, {"include_obfuscation": False}),
    }
    NAMES: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text",
        "reasoning_effort": "reasoning",
    }

    input: Any
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    stream: bool | None = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = True
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    truncation: str | None = None
    previous_response_id: Any = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None


def responses_chat(body: ResponsesBody) -> ChatBody:
    """Return a body as that of a chat. Raises BadRequest, also for fields that need stored state."""
    for name, harmless in _STATE.items():
        if getattr(body, name) not in harmless:
            reason = "expected none, for this server keeps nothing between requests; send all of the input with each"
            raise BadRequest(f"{name}: {reason}", name)
    if unknown := [name for name in body.include or () if name not in _INCLUDE]:
        raise BadRequest(f"include: expected {_INCLUDE[0]} alone, found {unknown[0][:60]!r}", "include")
    if body.store:
        log_once("store true is accepted, but nothing is stored")
    if body.truncation not in (None, "disabled"):
        log_once("truncation is treated as disabled: an input that is too long is rejected")
    tools = [tool for tool in body.tools or () if tool.get("type") == "function"]
    messages = _messages(body.input)
    if body.instructions is not None:
        messages = _with_instructions(body.instructions, messages)
    # A chat refuses a choice without tools, but clients send "auto" even if all of their tools are left out here.
    choice = None
    if tools or body.tool_choice != "auto":
        choice = _choice(body.tool_choice)
    return ChatBody(
        messages=messages,
        model=body.model,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
        tools=[_tool(tool) for tool in tools],
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=chat_form((body.text or {}).get("format")),
        reasoning_effort=(body.reasoning or {}).get("effort"),
    )


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _warning(body: ResponsesBody) -> dict[str, str]:
    """Return metadata that names the types of tools that were left out."""
    kinds = sorted({ascii(tool.get("type"))[:60] for tool in body.tools or () if tool.get("type") != "function"})
    if not kinds:
        return {}
    log_once("tools that are not functions, such as those of Codex CLI, are not shown to the model")
    # 512 characters are OpenAI's limit for a value of metadata.
    return {"warning": f"tools of these types are left out, for this server runs none: {', '.join(kinds)}"[:512]}


def _with_instructions(instructions: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages after one system message: templates take only one, so leading developer messages join it."""
    parts: list[Any] = [{"type": "text", "text": instructions}]
    for number, message in enumerate(messages):
        content = message.get("content")
        if message["role"] not in ("system", "developer") or not isinstance(content, str | list):
            return [{"role": "system", "content": parts}, *messages[number:]]
        if isinstance(content, str):
            content = [content]
        parts += content
    return [{"role": "system", "content": parts}]


def _choice(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") == "function":
        return {"type": "function", "function": {"name": value.get("name")}}
    return value


def _messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat: an assistant's text, reasoning and calls of one turn become one message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise BadRequest("input: expected a text or a list of items, found another value", "input")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(value):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise BadRequest(f"{where}: expected an object, found another value", "input")
        kind = item.get("type", "message")
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind == "message" and item.get("role") in _ROLES:
            message = {"role": item["role"], "content": item.get("content")}
            # The turn began with an item of reasoning.
            if item["role"] == "assistant" and _is_begun(messages) and "content" not in messages[-1]:
                messages[-1] |= message
            else:
                messages.append(message)
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not _is_begun(messages):
                messages.append({"role": "assistant"})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or ()
            text = "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
            messages.append({"role": "assistant", "reasoning_content": text})
        else:
            expected = "a message, function_call, function_call_output or reasoning"
            raise BadRequest(f"{where}: expected {expected}; found {ascii(kind)[:60]}", "input")
    # Reasoning alone is no turn.
    return [message for message in messages if "content" in message or "tool_calls" in message]


def _is_begun(messages: list[dict[str, Any]]) -> bool:
    """Return whether the last message is an assistant's, so that its turn may continue."""
    return bool(messages) and messages[-1]["role"] == "assistant"


class ResponsesAnswer(BlockAnswer):
    """The answer to POST /v1/responses."""

    ID = "resp"

    def __init__(self, body: ResponsesBody, chat: ChatBody, model: ServedModel, stream: Stream, request_id: str):
        super().__init__(chat, model, stream, request_id)
        self.error_response = lambda error: error_response(rename_param(error, body.NAMES))
        self._body = body
        self._created = int(time.time())
        self._number = 0

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        stream = self._stream
        incomplete_details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        usage: dict[str, Any] | None = {
            "input_tokens": stream.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": stream.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": stream.num_answer_tokens,
            "output_tokens_details": {"reasoning_tokens": stream.num_reasoning_tokens},
            "total_tokens": stream.num_prompt_tokens + stream.num_answer_tokens,
        }
        if status == "in_progress":
            usage = None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete_details,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {**(body.metadata or {}), **_warning(body)},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": usage,
        }

    def _status(self) -> str:
        return "incomplete" if self.finish in ("max_new_tokens", "max_seq_len") else "completed"

    def value(self) -> dict[str, Any]:
        status = self._status()
        return self._response(status, [self._item(block) for block in self.blocks])

    def _item_id(self, block: Block) -> str:
        begins = {"reasoning": "rs", "text": "msg", "call": "fc"}[block.kind]
        return f"{begins}_{self._request_id}_{block.number}"

    def _item(self, block: Block, begins: bool = False) -> dict[str, Any]:
        status = "completed"
        if begins:
            status = "in_progress"
        elif block is self.blocks[-1]:
            status = self._status()
        common = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {**common, "type": "function_call", **call}
        content = [] if begins else [_part(block)]
        if block.kind == "reasoning":
            return {**common, "type": "reasoning", "summary": [], "content": content}
        return {**common, "type": "message", "role": "assistant", "content": content}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **fields}

    def opening(self) -> Iterator[dict[str, Any]]:
        yield self._event("created", response=self._response("in_progress", []))
        yield self._event("in_progress", response=self._response("in_progress", []))

    def block_events(self, event: BlockEvent) -> Iterator[dict[str, Any]]:
        block = event.block
        item = {"output_index": block.number}
        place: dict[str, Any] = {"item_id": self._item_id(block), **item}
        if block.kind != "call":
            place["content_index"] = 0
        kind = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}[block.kind]
        logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if event.kind == "begin":
            yield self._event("output_item.added", **item, item=self._item(block, begins=True))
            if block.kind != "call":
                yield self._event("content_part.added", **place, part=_part(Block(block.number, block.kind)))
        elif event.kind == "more":
            yield self._event(f"{kind}.delta", **place, delta=event.text, **logprobs)
        else:
            if block.kind == "call":
                yield self._event(f"{kind}.done", **place, name=block.name, arguments=block.text)
            else:
                yield self._event(f"{kind}.done", **place, text=block.text, **logprobs)
                yield self._event("content_part.done", **place, part=_part(block))
            yield self._event("output_item.done", **item, item=self._item(block))

    def closing(self) -> Iterator[dict[str, Any]]:
        yield self._event(self._status(), response=self.value())

    def failing(self, error: StreamError) -> dict[str, Any]:
        failed = {"code": "server_error", "message": error.message}
        return self._event("failed", response={**self._response("failed", []), "error": failed})


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
