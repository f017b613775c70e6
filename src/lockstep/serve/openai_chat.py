"""OpenAI's chat completions: bodies to prompts of the service, and answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from lockstep.runtime.completion import Choice
from lockstep.serve.bodies import BadRequest, Unsupported
from lockstep.serve.frames import finite
from lockstep.serve.messages import chat_text
from lockstep.serve.openai_answers import AnswerFormat, reason
from lockstep.serve.openai_parameters import Parameters, longest_prompt, prompt_requests
from lockstep.serve.prompts import encode_texts
from lockstep.serve.service import Service
from lockstep.serve.stream import AnswerDelta, PromptRequest
from lockstep.step.sampling import MAX_LOGPROBS, Logprobs

_UNSUPPORTED: Unsupported = {
    **Parameters.UNSUPPORTED,
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


class ChatBody(Parameters, kw_only=True):
    """The body of POST /v1/chat/completions, with vLLM's add_generation_prompt and its like."""

    UNSUPPORTED: ClassVar[Unsupported] = _UNSUPPORTED

    messages: Any  # see `chat_text`
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


async def chat_requests(body: ChatBody, service: Service) -> list[PromptRequest]:
    """Return the prompt of a body. Raises BadRequest."""
    await service.adapters.bring(body.lora)
    service.adapters.named(body.model, body.lora)
    # 0 without logprobs asks for nothing.
    if body.top_logprobs and not (body.logprobs and 0 <= body.top_logprobs <= MAX_LOGPROBS):
        found = f"{body.top_logprobs} with logprobs {str(bool(body.logprobs)).lower()}"
        said = f"top_logprobs: expected 0 to {MAX_LOGPROBS} with logprobs true, found {found}"
        raise BadRequest(said, "top_logprobs")
    continues, variables = bool(body.continue_final_message), body.chat_template_kwargs or {}
    text = await chat_text(service, body.messages, body.add_generation_prompt, continues, variables)
    # Without the tokens that the tokenizer puts before a text: the template has written them.
    special = bool(body.add_special_tokens)
    prompts = await encode_texts([text], service.tokenizer, "messages", longest_prompt(service), special)
    return prompt_requests(body, prompts, "messages", service)


class ChatFormat(AnswerFormat):
    """The answers to one request for chat completions."""

    ID, OBJECT, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    async def choice(self, index: int, choice: Choice) -> dict[str, Any]:
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
        content = []
        for token, each in zip(tokens, logprobs):
            top = [self._entry(other, value) for other, value in each.top]
            content.append({**self._entry(token, each.chosen), "top_logprobs": top})
        return {"content": content}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, piece = self._tokenizer.token_text(token), self._tokenizer.token_bytes(token)
        return {"token": text, "bytes": list(piece), "logprob": finite(logprob)}


def _chunk(index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
