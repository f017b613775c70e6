"""OpenAI's completions: bodies to prompts of the service, and answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from lockstep.runtime.completion import Choice
from lockstep.serve.bodies import BadRequest, Unsupported
from lockstep.serve.logprobs import LogprobsFormat
from lockstep.serve.openai_answers import AnswerFormat, reason
from lockstep.serve.openai_parameters import Parameters, longest_prompt, prompt_requests
from lockstep.serve.prompts import encode_texts
from lockstep.serve.service import Service
from lockstep.serve.stream import AnswerDelta, PromptRequest, Stream
from lockstep.step.sampling import Logprobs

_MOST_PROMPTS = 256


class CompletionBody(Parameters, kw_only=True):
    """The body of POST /v1/completions."""

    UNSUPPORTED: ClassVar[Unsupported] = {
        **Parameters.UNSUPPORTED,
        "prompt_embeds": (None,),
        "thinking_token_budget": (None, -1),
    }

    prompt: Any  # text, token ids, or a list of either: see `_prompts`
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = False

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


async def completion_requests(body: CompletionBody, service: Service) -> list[PromptRequest]:
    """Return the prompts of a body. Raises BadRequest for values that cannot be."""
    await service.adapters.bring(body.lora)
    service.adapters.named(body.model, body.lora)
    prompts, texts = await _prompts(body, service)
    if not body.echo:
        return prompt_requests(body, prompts, "prompt", service)
    prompt_logprobs = None if body.logprobs is None and body.most_tokens != 0 else body.logprobs or 0
    if prompt_logprobs is not None and not service.ready.prompt_logprobs:
        raise BadRequest(
            "echo: expected a backend that computes the logits behind all tokens of a prompt, such as onnxruntime, "
            f"found {service.ready.backend}; leave out echo, or logprobs, and ask for a token",
            "echo",
        )
    requests = prompt_requests(body, prompts, "prompt", service, prompt_logprobs)
    # A thread: others need not wait for a long prompt's.
    for request, text in zip(requests, texts):
        ids = request.request.prompt_ids
        request.echo = await asyncio.to_thread(service.tokenizer.text, ids) if text is None else text
    return requests


async def _prompts(body: CompletionBody, service: Service) -> tuple[list[list[int]], list[str | None]]:
    """Return the token ids of each prompt, and its text if it came as one."""
    each = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if each and _are_ids(each):
        each = [each]
    if not each or len(each) > _MOST_PROMPTS:
        raise BadRequest(f"prompt: expected 1 to {_MOST_PROMPTS} prompts, found {len(each)}", "prompt")
    if not all(isinstance(prompt, str) or _are_ids(prompt) for prompt in each):
        raise BadRequest("prompt: expected text, token ids, or a list of either", "prompt")
    texts = [prompt if isinstance(prompt, str) else None for prompt in each]
    given = [text for text in texts if text is not None]
    special = body.add_special_tokens is not False
    encoded = iter(await encode_texts(given, service.tokenizer, "prompt", longest_prompt(service), special))
    return [prompt if text is None else next(encoded) for prompt, text in zip(each, texts)], texts


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(type(token) is int for token in prompt)


class CompletionFormat(AnswerFormat):
    """The answers to one request for completions."""

    ID = "cmpl"
    OBJECT = "text_completion"
    CHUNK = "text_completion"

    def __init__(self, body: CompletionBody, service: Service, stream: Stream, request_id: str):
        super().__init__(body, service, stream, request_id)
        self._prompts = [prompt for prompt in stream.prompts for _ in range(prompt.request.n)]
        prompts = self._prompts if self._logprobs else []
        self._formats = [LogprobsFormat(service.tokenizer, each.request.prompt_ids, each.echo) for each in prompts]

    async def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        echo = await self.echo(index)
        answer = self._choice(index, choice.text, choice.token_ids, choice.logprobs, choice.finish)
        if echo is None:
            return answer
        found = answer["logprobs"]
        if found is not None:
            found = {name: echo["logprobs"][name] + values for name, values in found.items()}
        return {**answer, "text": echo["text"] + answer["text"], "logprobs": found}

    def chunks(self, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        # Else it is in the middle of a character, or of what may be a stop string.
        if delta.text or delta.finish or delta.logprobs or self._token_ids:
            yield self._choice(delta.index, delta.text, delta.token_ids, delta.logprobs, delta.finish)

    def _choice(
        self, index: int, text: str, tokens: Sequence[int], logprobs: Sequence[Logprobs], finish: str | None
    ) -> dict[str, Any]:
        found = self._formats[index].part(tokens, logprobs, finish) if self._logprobs else None
        choice = {"index": index, "text": text, "logprobs": found, "finish_reason": reason(finish)}
        return {**choice, "token_ids": list(tokens)} if self._token_ids else choice

    async def echo(self, index: int) -> dict[str, Any] | None:
        prompt = self._prompts[index]
        if prompt.echo is None:
            return None
        found = None
        if self._logprobs:
            part = LogprobsFormat(self._tokenizer).part
            # A thread: others need not wait for a long prompt's.
            found = await asyncio.to_thread(part, list(prompt.request.prompt_ids), [None, *prompt.prompt_logprobs])
        return {"index": index, "text": prompt.echo, "logprobs": found, "finish_reason": None}
