"""The input tensors of a Triton request, checked against its model: tensors in, prompts out."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.errors import InputError
from lockstep.runtime.checks import check_ranges, expect_tokens
from lockstep.runtime.request import Request
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.step.sampling import Sampling
from lockstep_serve.bodies import BadRequest, bad_request, check_words
from lockstep_serve.prompts import encode_texts
from lockstep_serve.served_model import ServedModel
from lockstep_serve.stream import PromptRequest
from lockstep_serve.triton.models import NEVER_MADE, Model, Spec
from lockstep_serve.triton.tensors import Tensor
from lockstep_serve.triton.words import spellings, word_ids

# The other models' names of tensorrt_llm's inputs.
_COMMON = {
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "request_output_len": "max_tokens",
    "streaming": "stream",
}
# Inputs' names of the fields of `Request` and `Sampling`.
_NAMES = {"n": "num_return_sequences", "max_new_tokens": "max_tokens", "logit_bias": "bias"}


@dataclass(frozen=True)
class InferRequest:
    """An inference request; outputs: None for all. complete: a response for each answer, with all of config.pbtxt."""

    model: Model
    id: str
    inputs: Mapping[str, Tensor]
    outputs: tuple[str, ...] | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = False


@dataclass(frozen=True)
class Prompt:
    """One prompt of a batch. end_ids end its answer and are not sent; sequences of stop_ids end it and are sent."""

    prompt_request: PromptRequest
    end_ids: frozenset[int]
    stop_ids: tuple[tuple[int, ...], ...]
    exclude_input: bool
    log_probs: bool

    @property
    def repeated_ids(self) -> list[int]:
        """Return the prompt's tokens that the answer repeats: all, or none."""
        return [] if self.exclude_input else np.asarray(self.prompt_request.request.prompt_ids).tolist()


class Batch:
    """The checked inputs of a model, by name and number of the prompt."""

    def __init__(self, request: InferRequest, max_batch_size: int):
        """Check the inputs. Raises BadRequest for names, datatypes, shapes and values that the model does not take."""
        model = request.model
        self.id = request.id
        self._tensors: dict[str, np.ndarray] = {}
        sizes: dict[str, int] = {}
        for input_name, tensor in request.inputs.items():
            spec = model.inputs.get(input_name)
            if spec is None:
                raise BadRequest(
                    f"{input_name[:80]}: expected an input of the model {model.name}, found another name", input_name
                )
            _check(input_name, spec, tensor)
            name = _COMMON.get(spec.name, spec.name)
            if name in self._tensors:
                raise BadRequest(f"{input_name}: expected it once, found also {spec.name}; leave one out", input_name)
            self._tensors[name] = tensor.array
            sizes[input_name] = tensor.array.shape[0]
        for spec in model.listed:
            if spec.use == "required" and _COMMON.get(spec.name, spec.name) not in self._tensors:
                raise BadRequest(f"{spec.name}: required by the model {model.name}, found none", spec.name)
        self.size = next(iter(sizes.values()))
        other = next((name for name, size in sizes.items() if size != self.size), None)
        if other is not None:
            raise BadRequest(f"{other}: expected a batch of {self.size} as before, found one of {sizes[other]}", other)
        if not 1 <= self.size <= max_batch_size:
            raise BadRequest(f"batch: expected 1 to {max_batch_size} prompts, found {self.size}")

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def values(self, name: str, number: int) -> np.ndarray:
        """Return a prompt's tensor without the batch dimension; empty where it has none."""
        return np.empty(0) if name not in self._tensors else self._tensors[name][number]

    def value(self, name: str, number: int, default: Any = None) -> Any:
        """Return the only value of a prompt's tensor."""
        return default if name not in self._tensors else self._tensors[name][number].item()

    def texts(self, name: str, number: int) -> list[str]:
        """Return a prompt's strings without empty ones, which mean none. Raises BadRequest for other than UTF-8."""
        try:
            return [value.decode() for value in self.values(name, number).ravel() if value]
        except UnicodeDecodeError as error:
            raise BadRequest(f"{name}: expected text in UTF-8, found {error}", name) from None


def _check(input_name: str, spec: Spec, tensor: Tensor) -> None:
    if tensor.datatype != spec.datatype:
        raise BadRequest(f"{input_name}: datatype: expected {spec.datatype}, found {tensor.datatype}", input_name)
    shape = tensor.shape
    fits = len(shape) == 1 + len(spec.dims) and all(dim in (-1, size) for dim, size in zip(spec.dims, shape[1:]))
    if not fits:
        raise BadRequest(f"{input_name}: shape: expected {[-1, *spec.dims]} (-1: any), found {shape}", input_name)
    if spec.use == "refused" and tensor.array.any():
        raise BadRequest(f"{input_name}: not supported by this server; leave it out", input_name)


def check_outputs(request: InferRequest) -> None:
    """Raise BadRequest for an output that the model does not have."""
    for name in request.outputs or ():
        if name not in request.model.outputs and name not in NEVER_MADE:
            raise BadRequest(f"{name[:80]}: expected an output of the model {request.model.name}, found another name")


async def prompts_of(batch: Batch, model: ServedModel, fold_ids: bool, lora: Any = None) -> list[Prompt]:
    """Return a batch's prompts; fold_ids: see `Triton`. lora: the parameter. Raises BadRequest."""
    ready = model.ready
    texts = []
    if "input_ids" not in batch:
        texts = [next(iter(batch.texts("text_input", number)), "") for number in range(batch.size)]
    # A prompt leaves room for a token of its answer.
    longest = min(ready.max_input_len, ready.max_seq_len - 1)
    ids = iter(await encode_texts(texts, model.tokenizer, "text_input", longest))
    none = np.zeros(0, np.int32)
    prompts = [_prompt(batch, number, model, fold_ids, lora, next(ids, none)) for number in range(batch.size)]
    if len({prompt.prompt_request.request.n for prompt in prompts}) > 1:
        raise BadRequest("num_return_sequences: expected the same for all prompts of a batch, found different ones")
    return prompts


def _adapter(batch: Batch, number: int, model: ServedModel, lora: Any) -> str | None:
    """Return a prompt's adapter, by name or `lora_task_id`: its position among the names from 1 on; None for none."""
    task = batch.value("lora_task_id", number, 0)
    names = model.adapters.names
    if not 0 <= task <= len(names):
        raise BadRequest(
            f"lora_task_id: expected 0 (none) to {len(names)}, the adapters in the order of their names "
            f"({', '.join(names) or 'the model has none'}), found {task}",
            "lora_task_id",
            404 if names else 400,
        )
    if lora is not None and not isinstance(lora, str):
        raise BadRequest(f"lora: expected the name of an adapter, found {str(lora)[:40]}", "lora")
    name = model.name
    if task:
        name = f"{name}:{names[task - 1]}"
    return model.adapters.resolve(name, lora or None)


def _prompt(batch: Batch, number: int, model: ServedModel, fold_ids: bool, lora: Any, ids: np.ndarray) -> Prompt:
    """Return prompt `number` of a batch; ids: of its text, where it is one."""
    ready = model.ready
    tokenizer = model.tokenizer
    vocab_size = ready.vocab_size
    if batch.value("beam_width", number, 1) != 1:
        raise BadRequest("beam_width: expected 1, as this server has no beam search, found another", "beam_width")
    if "input_ids" in batch:
        field_name = "input_ids"
        length = batch.value("input_lengths", number)
        ids = batch.values("input_ids", number)
        if not 1 <= length <= len(ids):
            raise BadRequest(f"input_lengths: expected 1 to {len(ids)}, found {length}", "input_lengths")
        ids = ids[:length].astype(np.int32)
        if fold_ids:
            ids = ids % vocab_size
        stop: tuple[str, ...] = ()
        stop_ids = word_ids("stop_words_list", batch.values("stop_words_list", number))
        bad_words: Sequence[str | tuple[int, ...]] = word_ids("bad_words_list", batch.values("bad_words_list", number))
        biases = batch.values("embedding_bias", number)
        bias = {int(token): float(biases[token]) for token in np.flatnonzero(biases)}
    else:
        field_name = "text_input"
        stop = tuple(batch.texts("stop_words", number))
        stop_ids = ()
        check_words("stop_words", stop)
        bad_words = batch.texts("bad_words", number)
        check_words("bad_words", bad_words)
        bias = word_biases(batch, "embedding_bias_words", "embedding_bias_weights", number, tokenizer)
    end_ids = frozenset(ready.eos_token_ids)
    if "end_id" in batch:
        end_ids = frozenset([batch.value("end_id", number)])
    # With end_id -1 no token ends the answer.
    end_ids = frozenset(token for token in end_ids if 0 <= token < vocab_size)
    # The engine stops at single tokens only; `_Answer.take` finds longer sequences.
    log_probs = batch.value("return_log_probs", number, False)
    ends = end_ids | {tokens[0] for tokens in stop_ids if len(tokens) == 1}
    # As upstream, max_tokens beyond the context is no error.
    max_new_tokens = min(batch.value("max_tokens", number), max(1, ready.max_seq_len - len(ids)))
    n = batch.value("num_return_sequences", number, 1) or 1
    adapter = _adapter(batch, number, model, lora)
    try:
        sampling = _sampling(batch, number, bias, bad_words, log_probs)
        request = Request(ids, max_new_tokens, None, frozenset(ends), sampling, n, adapter=adapter, id=batch.id)
        check_ranges(request, ready, min(ready.max_input_len, ready.max_seq_len - 1))
        expect_tokens("stop_words", list(itertools.chain.from_iterable(stop_ids)), vocab_size)
    except InputError as error:
        raise bad_request(error, {**_NAMES, "prompt_ids": field_name}) from None
    exclude = batch.value("exclude_input_in_output", number, False)
    return Prompt(PromptRequest(request, stop), end_ids, stop_ids, exclude, log_probs)


def _sampling(
    batch: Batch, number: int, bias: Mapping[int, float], bad_words: Sequence[str | tuple[int, ...]], log_probs: bool
) -> Sampling:
    """Return a prompt's sampling: greedy without top_k and top_p, seed 0, as upstream. Raises InputError."""
    top_k = batch.value("top_k", number, 0)
    top_p = batch.value("top_p", number, 0.0)
    temperature = batch.value("temperature", number, 1.0)
    if temperature >= 0 and (top_k == 1 or (top_k == 0 and top_p <= 0)):
        temperature = 0.0
    if top_p <= 0:
        top_p = 1.0
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "seed")
    values = {name: batch.value(name, number) for name in names if name in batch}
    logprobs = 0 if log_probs else None
    return Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        logit_bias=bias,
        bad_words=tuple(bad_words),
        logprobs=logprobs,
        **values,
    )


def word_biases(
    batch: Batch, words_name: str, weights_name: str, number: int, tokenizer: Tokenizer
) -> dict[int, float]:
    """Return the logit biases {token: bias} for all spellings of words. Raises BadRequest."""
    raw = batch.values(words_name, number)
    weights = batch.values(weights_name, number)
    if len(raw) != len(weights):
        raise BadRequest(f"{weights_name}: expected {len(raw)}, one for each word, found {len(weights)}", weights_name)
    check_words(words_name, list(raw))
    biases: dict[int, float] = {}
    for word, weight in zip(raw, weights.tolist()):
        if word:
            text = word.decode(errors="replace")
            # A token counts as often as the spelling that has it most often.
            counts: Counter[int] = Counter()
            for tokens in spellings(words_name, [text], tokenizer):
                counts |= Counter(tokens)
            for token, count in counts.items():
                biases[token] = biases.get(token, 0.0) + count * weight
    return biases
