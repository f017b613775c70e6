"""OpenAI's completions: bodies to prompts of a model, and answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from lockstep.runtime.completion import Choice
from lockstep.step.sampling import Logprobs
from lockstep_serve.bodies import BadRequest, Unsupported
from lockstep_serve.logprobs import LogprobsFormat
from lockstep_serve.openai_answers import AnswerFormat
from lockstep_serve.openai_parameters import Parameters, longest_prompt, prompt_requests
from lockstep_serve.prompts import encode_texts
from lockstep_serve.served_model import ServedModel
from lockstep_serve.stream import AnswerDelta, PromptRequest, Stream, finish_reason

_MAX_PROMPTS = 256


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
    forced_token_ids: Any = None  # token ids of the answer, or a list of them for each prompt

    def __post_init__(self) -> None:
        """Convert token ids to arrays: a long body is decoded in a thread, so this delays no other request."""
        if isinstance(self.prompt, list):
            if self.prompt:
                self.prompt = _array(self.prompt)
            if isinstance(self.prompt, list):
                self.prompt = list(map(_array, self.prompt))

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


def _array(prompt: Any) -> Any:
    """Return a list of token ids as an array, int32 if they fit; any other value unchanged."""
    if not isinstance(prompt, list) or not set(map(type, prompt)) <= {int}:
        return prompt
    try:
        return np.array(prompt, np.int32)
    except OverflowError:
        return np.array(prompt, object)  # outside any vocabulary: the next check reports it


async def completion_requests(body: CompletionBody, model: ServedModel) -> list[PromptRequest]:
    """Return the prompts of a body. Raises BadRequest."""
    await model.adapters.ensure_loaded(body.lora)
    prompts, texts = await _prompts(body, model)
    forced_ids = _forced_ids(body, len(prompts))
    if not body.echo:
        return prompt_requests(body, prompts, "prompt", model, forced_ids=forced_ids)
    prompt_logprobs = body.logprobs
    if body.max_new_tokens == 0:  # only the prompt is computed, for its log-probabilities
        prompt_logprobs = body.logprobs or 0
    if prompt_logprobs is not None and not model.ready.prompt_logprobs:
        raise BadRequest(
            "echo: expected a backend that computes the logits after all tokens of a prompt, such as onnxruntime, "
            f"found {model.ready.backend}; leave out echo, or logprobs, and ask for a token",
            "echo",
        )
    requests = prompt_requests(body, prompts, "prompt", model, prompt_logprobs, forced_ids)
    for request, text in zip(requests, texts):
        if text is None:  # in a thread: a long prompt would block the event loop
            text = await asyncio.to_thread(model.tokenizer.text, request.request.prompt_ids)
        request.echo = text
    return requests


def _forced_ids(body: CompletionBody, num_prompts: int) -> list[list[int]]:
    """Return the given answer to each prompt; none if they are not given. Raises BadRequest."""
    given = body.forced_token_ids
    if given is None:
        return []
    answers = given if isinstance(given, list) and given and isinstance(given[0], list) else [given]
    are_ids = all(isinstance(answer, list) and answer and set(map(type, answer)) <= {int} for answer in answers)
    if not are_ids or len(answers) != num_prompts or body.stop:
        raise BadRequest(
            f"forced_token_ids: expected a list of token ids for each of {num_prompts} prompts, and no stop, found "
            "something else",
            "forced_token_ids",
        )
    return answers


async def _prompts(body: CompletionBody, model: ServedModel) -> tuple[list[np.ndarray], list[str | None]]:
    """Return the token ids of each prompt, and the text of those that came as text."""
    prompts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if not prompts or len(prompts) > _MAX_PROMPTS:
        raise BadRequest(f"prompt: expected 1 to {_MAX_PROMPTS} prompts, found {len(prompts)}", "prompt")
    if not all(isinstance(prompt, str | np.ndarray) for prompt in prompts):
        raise BadRequest("prompt: expected text, token ids, or a list of either", "prompt")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    special = body.add_special_tokens is not False
    encoded = iter(await encode_texts(texts, model.tokenizer, "prompt", longest_prompt(model), special))
    ids: list[np.ndarray] = []
    echoes: list[str | None] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids.append(next(encoded))
            echoes.append(prompt)
        else:
            ids.append(prompt)
            echoes.append(None)
    return ids, echoes


class CompletionFormat(AnswerFormat):
    """The answers to one request for completions."""

    ID = "cmpl"
    OBJECT = "text_completion"
    CHUNK = "text_completion"

    def __init__(self, body: CompletionBody, model: ServedModel, stream: Stream, request_id: str):
        super().__init__(body, model, stream, request_id)
        self._prompts: list[PromptRequest] = []  # of each answer
        self._formats: list[LogprobsFormat] = []
        for prompt in stream.prompts:
            for _ in range(prompt.request.n):
                self._prompts.append(prompt)
                self._formats.append(LogprobsFormat(model.tokenizer, prompt.request.prompt_ids, prompt.echo))

    async def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        echo = await self.echo(index)
        answer = self._choice(index, choice.text, choice.token_ids, choice.logprobs, choice.finish)
        if echo is None:
            return answer
        logprobs = answer["logprobs"]
        if logprobs is not None:
            logprobs = {name: echo["logprobs"][name] + values for name, values in logprobs.items()}
        return {**answer, "text": echo["text"] + answer["text"], "logprobs": logprobs}

    def chunks(self, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        # A delta without text may end inside a character, or inside a possible stop string.
        if delta.text or delta.finish or delta.logprobs or self._token_ids:
            yield self._choice(delta.index, delta.text, delta.token_ids, delta.logprobs, delta.finish)

    def _choice(
        self, index: int, text: str, tokens: Sequence[int], logprobs: Sequence[Logprobs], finish: str | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": finish_reason(finish),
        }
        if self._logprobs:
            choice["logprobs"] = self._formats[index].part(tokens, logprobs, finish)
        if self._token_ids:
            choice["token_ids"] = list(tokens)
        return choice

    async def echo(self, index: int) -> dict[str, Any] | None:
        prompt = self._prompts[index]
        if prompt.echo is None:
            return None
        logprobs = None
        if self._logprobs:
            part = LogprobsFormat(self._tokenizer).part
            # In a thread: a long prompt would block the event loop.
            ids = np.asarray(prompt.request.prompt_ids).tolist()
            logprobs = await asyncio.to_thread(part, ids, [None, *prompt.prompt_logprobs])
        return {"index": index, "text": prompt.echo, "logprobs": logprobs, "finish_reason": None}
