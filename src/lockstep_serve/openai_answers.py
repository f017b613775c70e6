"""Answers in the format of OpenAI's API, whole or as events. Each endpoint has a subclass for its choices."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

import msgspec
from starlette.responses import Response

from lockstep.runtime.completion import Choice
from lockstep_serve.bodies import error_body, json_response
from lockstep_serve.openai_parameters import Parameters, StreamOptions
from lockstep_serve.response import TokenResponse
from lockstep_serve.served_model import ServedModel
from lockstep_serve.stream import AnswerDelta, Stream, StreamError


class AnswerFormat(TokenResponse):
    """The answers to one request; each endpoint overrides `choice` and `chunks`."""

    ID: ClassVar[str]  # what ids begin with
    OBJECT: ClassVar[str]
    CHUNK: ClassVar[str]
    _stream: Stream  # there always is one

    def __init__(self, body: Parameters, model: ServedModel, stream: Stream, request_id: str):
        super().__init__(f"{self.ID}-{request_id}", stream, bool(body.stream))
        self._model = model
        self._tokenizer = model.tokenizer
        options = body.stream_options or StreamOptions()
        self._usage = bool(options.include_usage)
        self._continuous = self._usage and bool(options.continuous_usage_stats)
        self._logprobs = body.num_logprobs is not None
        self._token_ids = bool(body.return_token_ids)
        self._common = {
            "id": self.id,
            "created": int(time.time()),
            "model": body.model or model.name,
            "system_fingerprint": model.ready.identity[:12],
        }
        if model.weights_version is not None:
            self._common["weights_version"] = model.weights_version

    async def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def opening(self) -> Iterator[dict[str, Any]]:
        """Return the choices of the chunks before any text."""
        return iter(())

    def chunks(self, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        """Return the choices of the chunks for new text."""
        raise NotImplementedError

    async def echo(self, index: int) -> dict[str, Any] | None:
        """Return the repeated prompt, as the first part of a streamed answer; None for none."""
        return None

    async def full_response(self) -> Response:
        async for _ in self._stream:
            pass
        choices = [await self.choice(index, choice) for index, choice in enumerate(self._stream.choices)]
        return json_response({**self._common, "object": self.OBJECT, "choices": choices, "usage": self._counts()})

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events: a chunk per delta, the usage if requested, and the end or an error."""
        silent = set(range(len(self._stream.choices)))  # answers without any chunk so far: the first one is the echo
        try:
            if opening := [self.event(choice) for choice in self.opening()]:
                yield b"".join(opening)
            async for deltas in self._stream:
                events: list[bytes] = []
                for delta in deltas:
                    if delta.index in silent:
                        silent.discard(delta.index)
                        if (echo := await self.echo(delta.index)) is not None:
                            events.append(self.event(echo))
                    events += map(self.event, self.chunks(delta))
                if events:
                    yield b"".join(events)
            if self._usage:
                yield self._head + b"]" + _usage(self._counts()) + b"}\n\n"
            yield b"data: [DONE]\n\n"
        except StreamError as error:
            yield b"data: " + error_body(error.message, "server_error", None, error.code) + b"\n\n"

    @functools.cached_property
    def _head(self) -> bytes:
        """Return the encoded fields before the choices, which all chunks share."""
        value = {**self._common, "object": self.CHUNK, "choices": []}
        return b"data: " + msgspec.json.encode(value).removesuffix(b"]}")

    def event(self, choice: dict[str, Any]) -> bytes:
        # Joined from encoded parts, because every token is an event and only the choice differs.
        usage = b""
        if self._continuous:
            usage = _usage(self._counts_of(choice["index"]))
        return self._head + msgspec.json.encode(choice) + b"]" + usage + b"}\n\n"

    def _counts(self) -> dict[str, Any]:
        """Return the numbers of tokens of all answers, with details."""
        stream = self._stream
        return {
            **_counts(stream.num_prompt_tokens, stream.num_answer_tokens),
            "prompt_tokens_details": {"cached_tokens": stream.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": stream.num_reasoning_tokens},
        }

    def _counts_of(self, index: int) -> dict[str, int]:
        """Return the numbers of tokens of one answer so far, and of its prompt."""
        prompt = next(prompt for prompt in reversed(self._stream.prompts) if prompt.first <= index)
        completion = prompt.collector.completion
        return _counts(completion.num_prompt_tokens, len(completion.choices[index - prompt.first].token_ids))


def _counts(prompt: int, answer: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def _usage(counts: dict[str, Any]) -> bytes:
    return b',"usage":' + msgspec.json.encode(counts)
