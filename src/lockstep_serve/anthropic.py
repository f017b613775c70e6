"""Anthropic's Messages API, as an adapter to chats: bodies in; answers of blocks, whole or as events.

Fields and events are those of Anthropic's documentation of the API, version 2023-06-01.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import msgspec
from starlette.responses import Response

from lockstep_serve.blocks import Block, BlockAnswer, BlockEvent, chat_form
from lockstep_serve.bodies import BadRequest, Unsupported, error_response
from lockstep_serve.messages import partial_json
from lockstep_serve.openai_chat import ChatBody
from lockstep_serve.served_model import ServedModel
from lockstep_serve.stream import Stream, StreamError

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = ("enabled", "adaptive", "disabled")
_NO_THREADS = "thread_unsupported_request"
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessagesBody(msgspec.Struct, kw_only=True):
    """The body of POST /v1/messages and, but for what an answer needs, of /v1/messages/count_tokens."""

    UNSUPPORTED: ClassVar[Unsupported] = {"mcp_servers": (None, []), "container": (None,)}
    NAMES: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        "messages": "messages",
        "response_format": "output_config",
        "reasoning_effort": "output_config",
        "thinking_token_budget": "thinking",
    }

    messages: Any
    model: str | None = None
    max_tokens: int | None = None
    system: Any = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    thread: Any = None
    metadata: Any = None

    @property
    def thinks(self) -> bool:
        return self.thinking is not None and self.thinking.get("type") != "disabled"


def limited_messages_chat(body: MessagesBody) -> ChatBody:
    """Return `messages_chat` of a body that asks for an answer. Raises BadRequest."""
    if body.max_tokens is None:
        raise BadRequest("max_tokens: expected a value, found none", "max_tokens")
    return messages_chat(body)


def messages_chat(body: MessagesBody) -> ChatBody:
    """Return a body as that of a chat. Raises StreamError."""
    if body.thread is not None:
        reason = "expected none, for this server keeps nothing between requests; send all messages with each"
        raise StreamError(f"thread: {reason}", 400, _NO_THREADS, param="thread")
    if body.thinking is not None and body.thinking.get("type") not in _THINKING:
        kind = ascii(body.thinking.get("type"))[:60]
        raise BadRequest(f"thinking: expected type {', '.join(_THINKING)}; found {kind}", "thinking")
    if not isinstance(body.messages, list):
        raise BadRequest("messages: expected a list, found another value", "messages")
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for index, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{index}]")
    choice, parallel = _choice(body.tool_choice)
    config = body.output_config or {}
    budget = (body.thinking or {}).get("budget_tokens")
    if budget is not None and type(budget) is not int:
        raise BadRequest(f"thinking: expected budget_tokens as a whole number, found {ascii(budget)[:60]}", "thinking")
    return ChatBody(
        messages=messages,
        model=body.model,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        stream=body.stream,
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())],
        tool_choice=choice,
        parallel_tool_calls=parallel,
        # In Anthropic's API a final message of the assistant is the beginning of the answer.
        continue_final_message=bool(messages) and messages[-1]["role"] == "assistant",
        response_format=chat_form(config.get("format")),
        reasoning_effort=config.get("effort"),
        # The switch in chat templates of hybrid models (Qwen 3); others ignore it.
        chat_template_kwargs={"enable_thinking": body.thinks},
        thinking_token_budget=budget,
    )


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        kind = ascii(tool["type"])[:60]
        raise BadRequest(f"{where}: expected a tool of the client's own, of type custom; found {kind}", "tools")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    fields = {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, **fields}}


def _choice(value: Mapping[str, Any] | None) -> tuple[Any, bool]:
    """Return the chat's tool_choice, and whether several calls may come."""
    if value is None:
        return None, True
    kind = value.get("type")
    parallel = not value.get("disable_parallel_tool_use")
    if kind == "tool":
        return {"type": "function", "function": {"name": value.get("name")}}, parallel
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise BadRequest(f"tool_choice: expected type auto, any, tool or none; found {ascii(kind)[:60]}", "tool_choice")
    return _CHOICES[kind], parallel


def _messages(message: Any, where: str) -> list[dict[str, Any]]:
    """Return the chat's messages for one of Anthropic's: each tool result becomes a message."""
    role = _field(message, "role")
    if role not in ("user", "assistant", "system"):
        raise _invalid(where, "an object with the role user or assistant", role)
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise _invalid(f"{where}.content", "a text or a list of blocks", content)
    results: list[dict[str, Any]] = []
    texts = []
    thoughts = []
    calls = []
    for index, block in enumerate(content):
        block_where = f"{where}.content[{index}]"
        kind = _field(block, "type", default=block)
        if kind == "text":
            texts.append(_text([block], block_where))
        elif kind == "tool_result" and role == "user":
            text = _text(block.get("content") or "", f"{block_where}.content")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"), ensure_ascii=False)}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking" and role == "assistant":
            thoughts.append(str(block.get("thinking", "")))
        # Reasoning that Anthropic has encrypted is useless to this model.
        elif kind != "redacted_thinking":
            raise _invalid(
                block_where, "a block of text, tool_use, tool_result or thinking: this model reads text only", kind
            )
    # Results of tools are messages before the user's own text, if there is any.
    if role == "user" and results and not texts:
        return results
    turn: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls:
        turn |= {"content": turn["content"] or None, "tool_calls": calls}
    return [*results, turn]


def _text(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _invalid(where, "a text or a list of blocks of type text", value)
    texts = []
    for block in value:
        kind = _field(block, "type", default=block)
        text = _field(block, "text")
        if kind != "text" or not isinstance(text, str):
            raise _invalid(where, "blocks of type text: this model reads text only", kind)
        texts.append(text)
    return "\n".join(texts)


def _field(value: Any, name: str, default: Any = None) -> Any:
    """Return a field of a JSON object; `default` for any other value."""
    return value.get(name) if isinstance(value, dict) else default


def _invalid(where: str, expected: str, value: Any) -> BadRequest:
    param = where.partition("[")[0].partition(".")[0]
    return BadRequest(f"{where}: expected {expected}; found {ascii(value)[:80]}", param)


def anthropic_error(error: StreamError) -> Response:
    """Return the response to a request that is refused, or failed before any answer."""
    return error_response(error, json.dumps(_error(error)).encode())


def _error(error: StreamError) -> dict[str, Any]:
    default = "invalid_request_error" if error.status < 500 else "api_error"
    fields: dict[str, Any] = {"type": _ERRORS.get(error.status, default), "message": error.message}
    # Anthropic's client then sends the whole conversation.
    if error.code == _NO_THREADS:
        fields["details"] = {"error_code": error.code, "unsupported": ["thread"]}
    return {"type": "error", "error": fields}


class MessagesAnswer(BlockAnswer):
    """The answer to POST /v1/messages."""

    ID = "msg"
    error_response = staticmethod(anthropic_error)

    def __init__(self, body: MessagesBody, chat: ChatBody, model: ServedModel, stream: Stream, request_id: str):
        super().__init__(chat, model, stream, request_id, body.thinks)

    def value(self) -> dict[str, Any]:
        return {**self._message([_block(block) for block in self.blocks]), **self._end_of_message()}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        common = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}
        return {**common, "stop_reason": None, "stop_sequence": None, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        stream = self._stream
        return {
            "input_tokens": stream.num_prompt_tokens - stream.num_cached_tokens,  # the two together are the prompt's
            "cache_read_input_tokens": stream.num_cached_tokens,
            "output_tokens": stream.num_answer_tokens,
            "output_tokens_details": {"thinking_tokens": stream.num_reasoning_tokens},
        }

    def _end_of_message(self) -> dict[str, Any]:
        choice = self._stream.choices[0]
        reason = "end_turn"
        if self.finish in ("max_new_tokens", "max_seq_len"):
            reason = "max_tokens"
        elif choice.stop is not None:
            reason = "stop_sequence"
        elif self.has_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": choice.stop}

    def opening(self) -> Iterator[dict[str, Any]]:
        yield {"type": "message_start", "message": self._message([])}

    def block_events(self, event: BlockEvent) -> Iterator[dict[str, Any]]:
        block = event.block
        if event.kind == "begin":
            started = _block(block)
            yield {"type": "content_block_start", "index": block.number, "content_block": started}
            return
        if event.kind == "end":
            yield {"type": "content_block_stop", "index": block.number}
            return
        delta = {"type": "text_delta", "text": event.text}
        if block.kind == "reasoning":
            delta = {"type": "thinking_delta", "thinking": event.text}
        elif block.kind == "call":
            delta = {"type": "input_json_delta", "partial_json": event.text}
        yield {"type": "content_block_delta", "index": block.number, "delta": delta}

    def closing(self) -> Iterator[dict[str, Any]]:
        yield {"type": "message_delta", "delta": self._end_of_message(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def failing(self, error: StreamError) -> dict[str, Any]:
        return _error(error)


def _block(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        # Anthropic signs reasoning and checks it in later requests; this server does not.
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(block.text)}
    return {"type": "text", "text": block.text}


def _input(arguments: str) -> Any:
    """Return a call's arguments: the streamed text if it is JSON, else what can be read of it."""
    try:
        # Return the model's text, not the parsed value, so that numbers keep their digits, as in a stream.
        json.loads(arguments)
        return msgspec.Raw(arguments.encode())
    except (ValueError, RecursionError):
        return _partial(arguments)


def _partial(arguments: str) -> Any:
    """Return what can be read of truncated arguments; {} if they end within a surrogate pair."""
    try:
        return partial_json(arguments) or {}
    except ValueError:
        return {}
