"""Triton's inference, over HTTP and gRPC: a request in, responses out. Another request can stop it by its id."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lockstep.runtime.completion import Choice
from lockstep_serve.bodies import BadRequest
from lockstep_serve.logprobs import finite
from lockstep_serve.served_model import ServedModel
from lockstep_serve.service import Service
from lockstep_serve.stream import TENANT, AnswerDelta, Stream, StreamError
from lockstep_serve.triton.inputs import Batch, InferRequest, Prompt, check_outputs, prompts_of
from lockstep_serve.triton.models import MODELS, Model
from lockstep_serve.triton.statistics import Statistics
from lockstep_serve.triton.tensors import Tensor, new_tensor
from lockstep_serve.triton.text_models import postprocess, preprocess

_CONTEXT = 32  # tokens before a piece, from which postprocessing decodes spaces and incomplete characters


@dataclass(frozen=True)
class InferResponse:
    """The output tensors of one response; final: the last one of its request."""

    outputs: Sequence[Tensor]
    final: bool = True


class Inference:
    """An accepted request; stream: of its answers, if it generates. in_tokens: tokens are sent as they come."""

    stream: Stream | None = None
    in_tokens = False

    def __init__(self, outputs: Sequence[Tensor] = (), id: str = ""):
        """Hold outputs that are ready. id: of the client's, "" for none."""
        self._outputs = outputs
        self.id = id

    async def full_response(self) -> InferResponse:
        return InferResponse(self._outputs)

    async def parts(self, in_tokens: bool) -> AsyncIterator[InferResponse]:
        """Yield a response for each answer, or for each piece of one. Raises StreamError."""
        yield InferResponse(self._outputs)

    def close(self) -> None:
        """Abort the request's unfinished answers."""


class Triton:
    """The five models in front of a service's first model, and an ensemble in front of each by its name."""

    def __init__(self, service: Service, fold_ids: bool = False):
        """fold_ids: take token ids modulo the vocabulary's size."""
        self.service = service
        self._fold_ids = fold_ids
        # By the clients' keys and the ids of their requests, which may be the same.
        self._running: dict[tuple[str, str], set[Generation]] = {}
        self.statistics = Statistics()
        self._ensembles = {name: replace(MODELS["ensemble"], name=name) for name in service.models}

    @property
    def models(self) -> dict[str, Model]:
        """Return the models, by name, that the current request's key opens."""
        return {**{model.name: self._ensembles[model.name] for model in self.service.opened_models}, **MODELS}

    def served_model(self, request: InferRequest) -> ServedModel:
        """Return the model that computes a request: the first one that its key opens, or the one that it names."""
        name = request.model.name
        return self.service.model(name if name in self._ensembles else None)

    async def infer(self, request: InferRequest) -> Inference:
        """Accept a request. Raises BadRequest, and StreamError where the queue is full."""
        began = time.monotonic()
        name = request.model.name
        try:
            inference = await self._infer(request)
        except StreamError:
            self.statistics.failed(name, time.monotonic() - began)
            raise
        if inference.stream is None:
            self.statistics.succeeded(name, time.monotonic() - began)
        return inference

    async def _infer(self, request: InferRequest) -> Inference:
        model = self.served_model(request)
        batch = Batch(request, model.ready.max_batch_size)
        outputs = request.outputs
        check_outputs(request)
        if request.model.name in ("preprocessing", "postprocessing"):
            if request.model.name == "preprocessing":
                tensors = await preprocess(batch, model)
            else:
                tensors = postprocess(batch, model)
            return Inference([tensor for tensor in tensors if outputs is None or tensor.name in outputs], request.id)
        if any(batch.value("stop", number) for number in range(batch.size)):
            if not request.id:
                raise BadRequest("id: expected that of the request to stop, found none", "id")
            # A copy: each removes itself.
            for generation in list(self._running.get((TENANT.get(), request.id), ())):
                generation.close()
            return Inference(id=request.id)
        lora = request.parameters.get("lora")
        if isinstance(lora, str) and lora:
            await model.adapters.ensure_loaded(lora)
        prompts = await prompts_of(batch, model, self._fold_ids, lora)
        generation = Generation(self, request, model, batch, prompts)
        self._running.setdefault(generation.key, set()).add(generation)
        return generation

    def ended(self, request: InferRequest, generation: Generation, stream: Stream) -> None:
        """Remove an ended generation and count it; later calls do nothing."""
        generations = self._running.get(generation.key, set())
        if generation not in generations:
            return
        generations.discard(generation)
        if not generations:
            del self._running[generation.key]
        name = request.model.name
        seconds = time.monotonic() - stream.began
        if any(choice.finish in (None, "abort") for choice in stream.choices) or stream.error:
            return self.statistics.failed(name, seconds)
        admitted = min(
            (prompt.admitted for prompt in stream.prompts if prompt.admitted is not None), default=stream.began
        )
        self.statistics.succeeded(name, seconds, admitted - stream.began, len(stream.prompts))


@dataclass(eq=False)
class _Answer:
    """One answer of a prompt; text: up to the end of a stop word. sent: how many of `tokens` were sent."""

    batch: int
    sequence: int
    prompt: Prompt
    choice: Choice
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    text: str = ""
    sent: int = 0
    ended: bool = False

    def take(self, delta: AnswerDelta) -> None:
        """Add new tokens up to a stop sequence, without the end token."""
        for position, token in enumerate(delta.token_ids):
            last = position == len(delta.token_ids) - 1
            if last and delta.finish == "stop_id" and token in self.prompt.end_ids:
                break
            self.tokens.append(token)
            if delta.logprobs:
                self.log_probs.append(float(finite(delta.logprobs[position].chosen)))
            if any(tuple(self.tokens[-len(stop) :]) == stop for stop in self.prompt.stop_ids):
                self.ended = True
                break
        self.ended = self.ended or delta.finish is not None


class Generation(Inference):
    """A request that generates tokens; creating it queues it."""

    def __init__(
        self, triton: Triton, request: InferRequest, model: ServedModel, batch: Batch, prompts: Sequence[Prompt]
    ):
        """Queue the prompts. Raises StreamError where the queue is full."""
        super().__init__(id=request.id)
        self.key = (TENANT.get(), request.id)
        self._triton = triton
        self._request = request
        self._tokenizer = model.tokenizer
        self.in_tokens = any(batch.value("stream", number, False) for number in range(batch.size))
        self._accumulates = request.model.name == "tensorrt_llm_bls" and request.parameters.get("accumulate_tokens")
        self._batch_size = batch.size
        self._n = max(prompt.prompt_request.request.n for prompt in prompts)
        self.stream = triton.service.submit([prompt.prompt_request for prompt in prompts], model)
        self._answers: list[_Answer] = []
        for number, prompt in enumerate(prompts):
            for sequence, choice in enumerate(prompt.prompt_request.collector.completion.choices):
                self._answers.append(_Answer(number, sequence, prompt, choice))

    def close(self) -> None:
        assert self.stream is not None
        self.stream.cancel()
        self._triton.ended(self._request, self, self.stream)

    async def full_response(self) -> InferResponse:
        async for _ in self._added():
            pass
        return InferResponse(self._outputs_of(self._answers, list(map(self._whole_text, self._answers)), True))

    async def parts(self, in_tokens: bool) -> AsyncIterator[InferResponse]:
        async for answer, text in self._added():
            final = all(other.ended for other in self._answers)
            if in_tokens:
                yield InferResponse(self._outputs_of([answer], [text], False), final)
                answer.sent = len(answer.tokens)
            elif answer.ended:
                yield InferResponse(self._outputs_of([answer], [self._whole_text(answer)], True), final)

    async def _added(self) -> AsyncIterator[tuple[_Answer, str]]:
        """Yield each answer with new tokens, and its new text, or all of its text if it accumulates."""
        assert self.stream is not None
        try:
            async for deltas in self.stream:
                for delta in deltas:
                    answer = self._answers[delta.index]
                    # The engine does not know stop sequences of tokens, and may continue.
                    if answer.ended:
                        continue
                    answer.take(delta)
                    text = delta.text
                    if delta.finish:  # upstream sends the stop word that ends an answer
                        text += answer.choice.stop or ""
                    answer.text += text
                    yield answer, (answer.text if self._accumulates else text)
                if all(answer.ended for answer in self._answers):
                    break
        finally:
            self.close()

    def _whole_text(self, answer: _Answer) -> str:
        """Return the text of an answer, with the prompt before it unless that is excluded."""
        return self._tokenizer.text(answer.prompt.repeated_ids) + answer.text

    def _outputs_of(self, answers: Sequence[_Answer], texts: Sequence[str], with_prompt: bool) -> list[Tensor]:
        """Return the tensors of a response: of one answer, or of all."""
        names = self._request.outputs
        complete = self._request.complete
        batch = len({answer.batch for answer in answers})  # prompts with an answer here
        num_sequences = len(answers) // batch
        min_length = int(complete)
        tensors: list[Tensor] = []
        if "text_output" in self._request.model.outputs:
            shape = [batch, num_sequences] if complete else [len(texts)]
            tensors.append(
                new_tensor("text_output", "BYTES", [text.encode(errors="replace") for text in texts], *shape)
            )
        else:
            rows: list[list[Any]] = [answer.tokens[answer.sent :] for answer in answers]
            if with_prompt:
                rows = [[*answer.prompt.repeated_ids, *row] for answer, row in zip(answers, rows)]
            tensors.append(_padded("output_ids", "INT32", rows, -1, batch, num_sequences, min_length))
            tensors.append(new_tensor("sequence_length", "INT32", list(map(len, rows)), batch, num_sequences))
            if complete:
                tensors += _context(answers[0], with_prompt)
        # Zeros for a client that lists them as outputs but did not request them, as upstream does.
        log_probs = complete or any(answer.prompt.log_probs for answer in answers)
        if log_probs or "cum_log_probs" in (names or ()):
            tensors.append(
                new_tensor("cum_log_probs", "FP32", [sum(answer.log_probs) for answer in answers], batch, num_sequences)
            )
        if log_probs or "output_log_probs" in (names or ()):
            rows = [(answer.log_probs or [0.0] * len(answer.tokens))[answer.sent :] for answer in answers]
            tensors.append(_padded("output_log_probs", "FP32", rows, 0.0, batch, num_sequences, min_length))
        if len(answers) == 1 and (complete or self._batch_size > 1):
            tensors.append(new_tensor("batch_index", "INT32", [answers[0].batch], 1, 1))
        if len(answers) == 1 and (complete or self._n > 1):
            tensors.append(new_tensor("sequence_index", "INT32", [answers[0].sequence], 1, 1))
        return [tensor for tensor in tensors if names is None or tensor.name in names]


def _context(answer: _Answer, with_prompt: bool) -> list[Tensor]:
    """Return CONTEXT_IDS (tokens before a piece, -1 for a text's first) and IS_LAST, for postprocessing."""
    before: list[int] = []
    if not (with_prompt and answer.prompt.repeated_ids):
        prompt_ids = answer.prompt.prompt_request.request.prompt_ids
        before = np.asarray(prompt_ids[-_CONTEXT:]).tolist()
        before = [*before, *answer.tokens[max(0, answer.sent - _CONTEXT) : answer.sent]][-_CONTEXT:]
    return [
        new_tensor("CONTEXT_IDS", "INT32", before or [-1], 1, 1, -1),
        new_tensor("IS_LAST", "BOOL", [answer.ended], 1, 1),
    ]


def _padded(
    name: str, datatype: str, rows: Sequence[Sequence[Any]], fill: Any, batch: int, num_sequences: int, min_length: int
) -> Tensor:
    """Return the tensor [batch, answers per prompt, length] of rows, padded to at least `min_length`."""
    length = max(min_length, *map(len, rows))
    values = [[*row, *[fill] * (length - len(row))] for row in rows]
    return new_tensor(name, datatype, values, batch, num_sequences, length)
