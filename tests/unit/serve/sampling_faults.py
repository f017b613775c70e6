"""Mistakes in how tokens are chosen, in log-probabilities and in text, as a wrong server would make them.

Those of `IN_ENGINE` are planted in the engine's process, by `follow`, which `sitecustomize` of a test's folder calls;
those of `IN_SERVER` in the process of the API. Each is a context.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from lockstep.runtime import active_choice, bad_words, completion, engine, engine_core, tokenizer
from lockstep.runtime.grammar import matcher
from lockstep.step import logits_pipeline, sampling
from lockstep.step.noise import Draw

NAMED = "LOCKSTEP_TEST_FAULT"  # in the environment: a file that holds the name of the fault to plant, or nothing
Fault = Callable[[], contextlib.AbstractContextManager[Any]]


def _patch(target: Any, name: str, wrap: Callable[..., Any]) -> Fault:
    """Have `wrap` called with what it replaces, and with its arguments."""
    right = getattr(target, name)
    return lambda: mock.patch.object(target, name, lambda *arguments, **named: wrap(right, *arguments, **named))


def _other_rules(change: Callable[[sampling.Sampling], dict[str, Any]]) -> Fault:
    """Have logits changed as other parameters say."""

    def changed(right: Any, self: logits_pipeline.Sampler, *arguments: Any) -> np.ndarray:
        was = self.sampling
        self.sampling = replace(was, **change(was))
        try:
            return right(self, *arguments)
        finally:
            self.sampling = was

    return _patch(logits_pipeline.Sampler, "_adjust", changed)


def _counting_the_prompt(right: Any, self: logits_pipeline.Sampler, *arguments: Any) -> np.ndarray:
    prompt = self.prompt_ids.tolist()
    rules = self.sampling
    wrong_counts = {
        "answer": [*prompt, *self.answer],
        "counts": self.counts + Counter(prompt),
        "sampling": replace(rules, min_tokens=rules.min_tokens and rules.min_tokens + len(prompt)),
    }
    with mock.patch.multiple(self, **wrong_counts):
        return right(self, *arguments)


def _dividing_all(right: Any, self: logits_pipeline.Sampler, *arguments: Any) -> np.ndarray:
    logits = right(self, *arguments)
    previous = np.union1d(self.prompt_ids, list(self.counts)).astype(np.int64)
    multiplied = previous[logits[previous] < 0]
    logits[multiplied] /= self.sampling.repetition_penalty**2
    return logits


def _less_likely(right: Any, *arguments: Any) -> sampling.Logprobs:
    logprobs = right(*arguments)
    return sampling.Logprobs(logprobs.chosen - 0.1, tuple((token, value - 0.1) for token, value in logprobs.top))


def _noise(**change: Callable[[int], int]) -> Fault:
    def changed(draw: Draw) -> Draw:
        return draw._replace(**{name: to(getattr(draw, name)) for name, to in change.items()})

    def other(right: Any, draws: Sequence[Draw]) -> list[np.ndarray]:
        return right([changed(draw) for draw in draws])

    return _patch(logits_pipeline, "exponential_noise", other)


IN_ENGINE: dict[str, Fault] = {
    "top-p keeps half the mass": _patch(
        logits_pipeline, "_nucleus", lambda right, weights, top_p: right(weights, top_p / 2)
    ),
    "temperature squared": _patch(logits_pipeline, "scaled_temperature", lambda right, of: right(of) ** 2),
    "min-p ignored": _patch(logits_pipeline, "candidates", lambda right, row, of: right(row, replace(of, min_p=0.0))),
    "repetition penalty squared": _other_rules(lambda of: {"repetition_penalty": of.repetition_penalty**2}),
    "logit_bias of the other sign": _other_rules(
        lambda of: {"logit_bias": {token: -value for token, value in of.logit_bias.items()}}
    ),
    "min_tokens ignored": _other_rules(lambda of: {"min_tokens": 0}),
    "seed ignored": _noise(seed=lambda seed: 0),
    "log-probabilities 0.1 off": _patch(logits_pipeline, "log_probabilities", _less_likely),
    "presence for frequency": _other_rules(
        lambda of: {"presence_penalty": of.frequency_penalty, "frequency_penalty": of.presence_penalty}
    ),
    "presence counted each time": _other_rules(
        lambda of: {"presence_penalty": 0.0, "frequency_penalty": of.frequency_penalty + of.presence_penalty}
    ),
    "repetition penalty divides negative logits": _patch(logits_pipeline.Sampler, "_adjust", _dividing_all),
    "penalties count the prompt": _patch(logits_pipeline.Sampler, "_adjust", _counting_the_prompt),
    "top-k one more": _patch(logits_pipeline, "candidates", lambda right, row, of: right(row, _top_k(of, 1))),
    "top-p before top-k": _patch(logits_pipeline, "candidates", lambda right, row, of: _top_p_first(right, row, of)),
    "bad words let through": _patch(bad_words.BadWordFilter, "tokens", lambda right, self: np.zeros(0, np.int64)),
    "copies all alike": _noise(choice=lambda choice: 0),
    "noise of the next position": _noise(position=lambda position: position + 1),
    "top_logprobs one short": _patch(
        logits_pipeline, "log_probabilities", lambda right, row, token, count: right(row, token, max(0, count - 1))
    ),
    "log-probabilities of a prompt 0.1 off": _patch(engine_core, "log_probabilities", _less_likely),
    "grammar ignored": _patch(matcher.Matcher, "allowed", lambda right, self, ends: np.ones(self._vocab_size, bool)),
    "answers end early": _patch(
        active_choice.ActiveChoice, "next_token", lambda right, *arguments: _ended(right(*arguments))
    ),
}


def _top_k(of: sampling.Sampling, offset: int) -> sampling.Sampling:
    return replace(of, top_k=of.top_k + offset) if of.top_k else of


def _top_p_first(right: Any, row: np.ndarray, of: sampling.Sampling) -> tuple[np.ndarray | None, np.ndarray]:
    candidates, _ = right(row, replace(of, top_k=0, min_p=0.0))
    ids, weights = right(row, replace(of, top_p=1.0))
    ids = np.arange(len(row)) if ids is None else ids
    is_kept = np.isin(ids, np.arange(len(row)) if candidates is None else candidates)
    return ids[is_kept], weights[is_kept]


def _ended(token: Any) -> Any:
    return token and (token if token.finish or token.token % 7 else replace(token, finish="max_new_tokens"))


def follow() -> None:
    """Plant, in this process, the fault that the file names whenever a request comes."""
    path = Path(os.environ[NAMED])
    add = engine.Engine.add
    planted = ""
    stack = contextlib.ExitStack()

    def looked(self: engine.Engine, *arguments: Any) -> int:
        nonlocal planted
        name = path.read_text()
        if name != planted:
            stack.close()
            planted = name
            if name in IN_ENGINE:
                stack.enter_context(IN_ENGINE[name]())
        return add(self, *arguments)

    engine.Engine.add = looked  # type: ignore[method-assign]


def in_server() -> dict[str, Fault]:
    """Return the faults of the process of the API, whose packages an engine's Python need not have."""
    from msgspec import structs

    from lockstep_serve import openai, openai_answers, openai_chat, stream
    from lockstep_serve.openai_parameters import prompt_requests

    def cut_stop(right: Any, self: completion.StopFilter, *arguments: Any) -> str:
        was = self.found
        text = right(self, *arguments)
        return text + self.found if self.found and not was else text

    async def echo(right: Any, self: openai.CompletionFormat, index: int) -> Any:
        value = await right(self, index)
        if value and value["logprobs"]:
            value["logprobs"] = {name: entries[1:] for name, entries in value["logprobs"].items()}
        return value

    def chunks(right: Any, self: Any, delta: Any) -> Iterator[Any]:
        return (({**chunk, "text": chunk["text"].replace("e", "")}) for chunk in right(self, delta))

    def same_seed(right: Any, *arguments: Any) -> Sequence[Any]:
        requests = right(*arguments)
        for request in requests:
            request.request = replace(request.request, sampling=requests[0].request.sampling)
        return requests

    def with_eos(ignored: bool) -> Fault:
        def requests(right: Any, body: Any, *arguments: Any) -> Any:
            return right(structs.replace(body, ignore_eos=ignored), *arguments)

        return _patch(openai, "prompt_requests", requests)

    def offsets(right: Any, self: Any, *arguments: Any) -> Any:
        part = right(self, *arguments)
        return {**part, "text_offset": [offset + 1 for offset in part["text_offset"]]}

    def one_more(right: Any, prompt: int, answer: int) -> dict[str, int]:
        return right(prompt, answer + 1)

    def chat_chunks(right: Any, self: Any, tokens: Sequence[int], logprobs: Sequence[Any]) -> Any:
        value = right(self, tokens, logprobs)
        for entry in value["content"] if value else ():
            entry["logprob"] -= 0.1
        return value

    assert prompt_requests is openai.prompt_requests
    reasons = {**stream.FINISH_REASONS, "max_new_tokens": "stop"}
    stops = {**stream.FINISH_REASONS, "stop_id": "length"}
    return {
        "pieces in capitals": _patch(tokenizer.TextStream, "push", lambda right, *arguments: right(*arguments).upper()),
        "the stop string stays": _patch(completion.StopFilter, "push", cut_stop),
        "the beginning of a stop string is lost": _patch(completion.StopFilter, "finish", lambda right, self: ""),
        "echo loses the first entry": _patch(openai.CompletionFormat, "echo", echo),
        "streamed text loses letters": _patch(openai.CompletionFormat, "chunks", chunks),
        "every end is a stop": lambda: mock.patch.dict(stream.FINISH_REASONS, reasons),
        "a stop id is a length": lambda: mock.patch.dict(stream.FINISH_REASONS, stops),
        "all prompts have one seed": _patch(openai, "prompt_requests", same_seed),
        "end tokens end nothing": with_eos(True),
        "ignore_eos ignored": with_eos(False),
        "offsets one off": _patch(openai.LogprobsFormat, "part", offsets),
        "usage counts one more": _patch(openai_answers, "_counts", one_more),
        "log-probabilities of chats 0.1 off": _patch(openai_chat.ChatFormat, "_token_logprobs", chat_chunks),
    }
