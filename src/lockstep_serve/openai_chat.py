"""OpenAI's chat completions: bodies to prompts of a model, and answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from lockstep.runtime.completion import Choice
from lockstep.step.sampling import MAX_LOGPROBS, Logprobs
from lockstep_serve.answer_reader import AnswerPlan, AnswerReader, Part, join_parts
from lockstep_serve.bodies import BadRequest, Unsupported
from lockstep_serve.logprobs import finite
from lockstep_serve.messages import chat_text
from lockstep_serve.openai_answers import AnswerFormat
from lockstep_serve.openai_parameters import Parameters, longest_prompt, prompt_requests
from lockstep_serve.prompts import encode_texts
from lockstep_serve.served_model import ServedModel
from lockstep_serve.stream import AnswerDelta, PromptRequest, Stream, finish_reason
from lockstep_serve.tool_grammar import BUDGET, answer_grammar
from lockstep_serve.tools import Tools, calling_format, tools_of

_UNSUPPORTED: Unsupported = {
    **Parameters.UNSUPPORTED,
    "echo": (None, False),
    "functions": (None, []),
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "documents": (None, []),
    "chat_template": (None,),  # a template in a request is code from the client
}
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class ChatBody(Parameters, kw_only=True):
    """The body of POST /v1/chat/completions, with vLLM's extensions, such as add_generation_prompt."""

    UNSUPPORTED: ClassVar[Unsupported] = _UNSUPPORTED

    messages: Any  # see `chat_text`
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None  # see `tools_of`, and for the next two
    tool_choice: Any = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None  # -1: none

    @property
    def num_logprobs(self) -> int | None:
        if not self.logprobs:
            return None
        return self.top_logprobs or 0


async def chat_prompt(body: ChatBody, model: ServedModel) -> tuple[Tools | None, str, np.ndarray]:
    """Return a body's tools, its prompt as text, and as token ids. Raises BadRequest."""
    await model.adapters.ensure_loaded(body.lora)
    tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
    format = model.tool_format
    if tools is not None and format is None:
        raise BadRequest(
            "tools: expected none, for the model's chat template tells no known format of tool calls; start the server "
            "with --tool-call-parser NAME (json: plain JSON)",
            "tools",
        )
    continues = bool(body.continue_final_message)
    variables = _variables(body)
    declared = () if tools is None else tools.declared
    instructs = tools is not None and format is not None and format.instructs
    text = await chat_text(model, body.messages, body.add_generation_prompt, continues, variables, declared, instructs)
    special = bool(body.add_special_tokens)  # False by default: the template writes them
    (ids,) = await encode_texts([text], model.tokenizer, "messages", longest_prompt(model), special)
    return tools, text, ids


async def chat_requests(body: ChatBody, model: ServedModel) -> list[PromptRequest]:
    """Return the prompt of a body. Raises BadRequest."""
    if body.top_logprobs and not (body.logprobs and 0 <= body.top_logprobs <= MAX_LOGPROBS):
        fault = f"{body.top_logprobs} with logprobs {str(bool(body.logprobs)).lower()}"
        message = f"top_logprobs: expected 0 to {MAX_LOGPROBS} with logprobs true, found {fault}"
        raise BadRequest(message, "top_logprobs")
    tools, text, ids = await chat_prompt(body, model)
    requests = prompt_requests(body, [ids], "messages", model)
    plan = _plan(tools, model, text, body.messages)
    tokenizer = model.tokenizer
    if (budget := body.thinking_token_budget) is not None and budget < -1:
        raise BadRequest(f"{BUDGET}: expected 0 or more tokens, or -1 for any number, found {budget}", BUDGET)
    (prompt,) = requests
    if budget is not None and not 0 <= budget < prompt.request.max_new_tokens:
        budget = None  # the answer ends before the budget does
    grammar = answer_grammar(tools, plan, prompt.request.grammar, budget, tokenizer)
    prompt.request = replace(prompt.request, grammar=grammar)
    prompt.plan = plan
    prompt.shown = tokenizer.silent(plan.marks)
    return requests


def _variables(body: ChatBody) -> dict[str, Any]:
    """Return the template's variables; templates know `reasoning_effort` "none" as `enable_thinking` false."""
    if body.reasoning_effort is None:
        return body.chat_template_kwargs or {}
    if body.reasoning_effort not in _EFFORTS:
        effort = ascii(body.reasoning_effort)[:60]
        raise BadRequest(f"reasoning_effort: expected {', '.join(_EFFORTS)}; found {effort}", "reasoning_effort")
    variables: dict[str, Any] = {"reasoning_effort": body.reasoning_effort}
    if body.reasoning_effort == "none":
        variables["enable_thinking"] = False
    return variables | (body.chat_template_kwargs or {})


def _plan(tools: Tools | None, model: ServedModel, prompt: str, messages: Sequence[Mapping[str, Any]]) -> AnswerPlan:
    """Return the plan by which the answers to a prompt are read."""
    reasoning = model.reasoning_format
    format = model.tool_format
    # Some templates end with the mark, so that the answer begins with reasoning.
    opened = reasoning is not None and prompt.rstrip().endswith(reasoning.begin)
    if tools is None or tools.choice == "none" or format is None:
        # Harmony marks answers too, so it is parsed with and without tools.
        if format is not None and not format.answer:
            format = None
        return AnswerPlan(reasoning, opened, format)
    format = calling_format(format, tools)
    earlier = sum(len(message.get("tool_calls") or ()) for message in messages)
    return AnswerPlan(reasoning, opened, format, tools.schemas, tools.single, tools.must_call, earlier)


class ChatFormat(AnswerFormat):
    """The answers to one request for chat completions."""

    ID = "chatcmpl"
    OBJECT = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def __init__(self, body: ChatBody, model: ServedModel, stream: Stream, request_id: str):
        super().__init__(body, model, stream, request_id)
        self._plan = stream.prompts[0].plan
        self._request_id = request_id
        self._readers = [self._plan.reader() for _ in stream.choices]

    async def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        reader = self._plan.reader()
        answer = join_parts([*reader.push(choice.text), *reader.finish()])
        message: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if self._plan.reasoning is not None:
            message |= _reasoning(answer.reasoning or None)
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [
                {
                    "id": self._call_id(index, number, name),
                    "type": "function",
                    "function": {"name": name, "arguments": text},
                }
                for number, (name, text) in enumerate(answer.calls)
            ]
        logprobs = self._token_logprobs(choice.token_ids, choice.logprobs)
        finish = self._finish(reader, choice.finish)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def _call_id(self, index: int, number: int, name: str) -> str:
        return self._plan.call_id(f"{self._request_id}/{index}", number, name)

    def _finish(self, reader: AnswerReader, finish: str | None) -> str | None:
        """Return an answer's finish reason, and count its calls."""
        self._model.metrics.called(reader.num_calls, reader.num_malformed)
        reason = finish_reason(finish)
        if reason == "stop" and reader.num_calls:
            return "tool_calls"
        return reason

    def opening(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self._stream.choices)):
            yield _chunk(index, {"role": "assistant", "content": ""})

    def chunks(self, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        reader = self._readers[delta.index]
        parts = reader.push(delta.text)
        if delta.finish:
            parts += reader.finish()
        deltas = [self._delta(delta.index, part) for part in parts]
        logprobs = self._token_logprobs(delta.token_ids, delta.logprobs)
        # A token without text yet (part of a character or of a mark) still has log-probabilities.
        if delta.logprobs and not deltas:
            deltas = [{"content": ""}]
        for part_delta in deltas:
            yield _chunk(delta.index, part_delta, logprobs=logprobs)
            # Sent once: they are of all tokens of the delta.
            logprobs = None
        if delta.finish:
            yield _chunk(delta.index, {}, self._finish(reader, delta.finish))

    def _delta(self, index: int, part: Part) -> dict[str, Any]:
        if part.kind == "content":
            return {"content": part.text}
        if part.kind == "reasoning":
            return _reasoning(part.text)
        call: dict[str, Any] = {"index": part.call, "function": {"arguments": part.text}}
        if part.kind == "name":
            function = {"name": part.text, "arguments": ""}
            id = self._call_id(index, part.call, part.text)
            call = {"index": part.call, "id": id, "type": "function", "function": function}
        return {"tool_calls": [call]}

    def _token_logprobs(self, tokens: Sequence[int], logprobs: Sequence[Logprobs]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = []
        for token, entry in zip(tokens, logprobs):
            top = [self._entry(other, value) for other, value in entry.top]
            content.append({**self._entry(token, entry.chosen), "top_logprobs": top})
        return {"content": content}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.token_text(token)
        piece = self._tokenizer.token_bytes(token)
        return {"token": text, "bytes": list(piece), "logprob": finite(logprob)}


def _reasoning(text: str | None) -> dict[str, Any]:
    """Return the reasoning under vLLM's current name and its older one."""
    return {"reasoning": text, "reasoning_content": text}


def _chunk(index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
