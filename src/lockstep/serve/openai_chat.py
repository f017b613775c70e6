"""OpenAI's chat completions: a body in, a prompt for the service out.

And answers in OpenAI's format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.runtime.completion import Choice
from lockstep.serve.bodies import BadRequest
from lockstep.serve.chat import ChatError
from lockstep.serve.frames import finite
from lockstep.serve.openai_answers import AnswerFormat, reason
from lockstep.serve.openai_parameters import Parameters, check_supported, longest_prompt, prompt_requests, refuse
from lockstep.serve.prompts import encode_texts
from lockstep.serve.service import Service
from lockstep.serve.stream import AnswerDelta, PromptRequest
from lockstep.step.sampling import MAX_LOGPROBS, Logprobs

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MOST_MESSAGES = 4096
_UNSUPPORTED = {
    "echo": (None, False),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "functions": (None, []),
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "documents": (None, []),
    "chat_template": (None,),  # a program of whoever sends it
}
_GIVEN = ("messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message")


class ChatBody(Parameters, kw_only=True):
    """The body of POST /v1/chat/completions.

    add_generation_prompt, continue_final_message, chat_template_kwargs: as vLLM has them.
    """

    messages: Any  # see `_messages`
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    echo: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    documents: Any = None
    chat_template: Any = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


async def chat_requests(body: ChatBody, service: Service) -> list[PromptRequest]:
    """Return the prompt of a body.

    Raises BadRequest for values that cannot be, and where the model has no chat template.
    """
    await service.adapters.bring(body.lora)
    check_supported(body, service)
    refuse(body, _UNSUPPORTED)
    if service.chat.fault is not None:
        raise BadRequest(f"messages: {service.chat.fault}; use /v1/completions", "messages")
    if body.top_logprobs is not None and not (body.logprobs and 0 <= body.top_logprobs <= MAX_LOGPROBS):
        raise BadRequest(
            f"top_logprobs: expected 0 to {MAX_LOGPROBS} with logprobs true, found {body.top_logprobs} with logprobs "
            f"{str(bool(body.logprobs)).lower()}",
            "top_logprobs",
        )
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise BadRequest(
            "continue_final_message: expected false with add_generation_prompt true; leave one out",
            "continue_final_message",
        )
    variables = body.chat_template_kwargs or {}
    if taken := sorted(set(variables) & set(_GIVEN)):
        raise BadRequest(
            f"chat_template_kwargs: expected no {taken[0]}, which is no variable of its own", "chat_template_kwargs"
        )
    messages = _messages(body.messages)
    if continues and not isinstance(messages[-1].get("content"), str):
        raise BadRequest("messages: expected a text to go on from in the last one, found none", "messages")
    opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    try:
        text = await service.chat.render(messages, opens, continues, variables)
    except ChatError as error:
        raise BadRequest(
            f"messages: expected a chat that the model's template renders, found: {error}", "messages"
        ) from None
    # Without the tokens that the tokenizer puts before a text: the template has written them.
    special = bool(body.add_special_tokens)
    prompts = await encode_texts([text], service.tokenizer, "messages", longest_prompt(service), special)
    return prompt_requests(body, prompts, "messages", service)


def _messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages as a template takes them.

    Without nulls, with one text as content, and with tool calls whose arguments are objects. Raises BadRequest for
    others.
    """
    if not isinstance(value, list) or not 1 <= len(value) <= _MOST_MESSAGES:
        found = f"{len(value)} of them" if isinstance(value, list) else "no list"
        raise BadRequest(f"messages: expected 1 to {_MOST_MESSAGES} messages, found {found}", "messages")
    messages = []
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES:
            raise _wrong(where, f"an object with a role: {', '.join(_ROLES)}", role)
        kept = {name: entry for name, entry in message.items() if entry is not None}
        if role == "developer":  # OpenAI's newer name of it, which templates do not know
            kept["role"] = "system"
        if "tool_calls" in kept:
            kept["tool_calls"] = _tool_calls(kept["tool_calls"], f"{where}.tool_calls")
        if "content" in kept or not kept.get("tool_calls"):
            kept["content"] = _content(kept.get("content"), f"{where}.content")
        messages.append(kept)
    return messages


def _content(value: Any, where: str) -> str:
    """Return a message's content as one text; parts become lines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(where, "a text, or a list of parts of type text", value)
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            found = part.get("type") if isinstance(part, dict) else part
            raise _wrong(f"{where}[{index}]", 'a part {"type": "text", "text": ...}: this model reads text only', found)
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_calls(value: Any, where: str) -> list[Any]:
    """Return the tool calls of an assistant's message, arguments as objects.

    OpenAI has them as JSON in a text.
    """
    if not isinstance(value, list) or not all(isinstance(call, dict) for call in value):
        raise _wrong(where, "a list of objects", value)
    calls = []
    for index, call in enumerate(value):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                raise _wrong(f"{where}[{index}].function.arguments", "JSON", function["arguments"]) from None
            call = {**call, "function": {**function, "arguments": arguments}}
        calls.append(call)
    return calls


def _wrong(where: str, expected: str, found: Any) -> BadRequest:
    return BadRequest(f"{where}: expected {expected}; found {ascii(found)[:80]}", "messages")


class ChatFormat(AnswerFormat):
    """The answers to one request for chat completions."""

    ID, OBJECT, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text}
        found = self._token_logprobs(choice.token_ids, choice.logprobs)
        return {"index": index, "message": message, "logprobs": found, "finish_reason": reason(choice.finish)}

    def opening(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self._stream.choices)):
            yield _chunk(index, {"role": "assistant", "content": ""})

    def chunks(self, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        if delta.text or delta.logprobs:
            yield _chunk(
                delta.index, {"content": delta.text}, logprobs=self._token_logprobs(delta.token_ids, delta.logprobs)
            )
        if delta.finish:
            yield _chunk(delta.index, {}, reason(delta.finish))

    def _token_logprobs(self, tokens: Sequence[int], logprobs: Sequence[Logprobs]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return {
            "content": [
                {
                    **self._entry(token, each.chosen),
                    "top_logprobs": [self._entry(other, value) for other, value in each.top],
                }
                for token, each in zip(tokens, logprobs)
            ]
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.token_text(token)
        is_whole = "\N{REPLACEMENT CHARACTER}" not in text  # else it is a part of a character
        return {"token": text, "bytes": list(text.encode()) if is_whole else None, "logprob": finite(logprob)}


def _chunk(index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
