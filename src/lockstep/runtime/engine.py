"""The engine as programs use it: requests run to their end, texts completed, answers scored.

Steps, and requests that come and go between them, are `EngineCore`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from lockstep.errors import CheckError, InputError
from lockstep.runtime.completion import Collector, Completion
from lockstep.runtime.engine_core import EngineCore
from lockstep.runtime.prefix import root_key
from lockstep.runtime.request import NOT_FINITE, Request, Token
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.step.sampling import Logprobs, Sampling


class Engine(EngineCore):
    """An engine whose caller steps it (`EngineCore`), or has it run requests to their end."""

    def add_all(self, requests: Iterable[Request]) -> list[int]:
        """Queue all of the requests, or none, and return their numbers.

        Raises InputError, which names the prompt by its position, where `add` rejects one.
        """
        added: list[int] = []
        try:
            for request in requests:
                added.append(self.add(request))
        except InputError as error:
            for index in added:
                self.abort(index)
            raise InputError(f"prompt {len(added) + 1}: {str(error).removeprefix('prompt_ids: ')}") from None
        return added

    def run(self, requests: Iterable[Request] = ()) -> Iterator[Token]:
        """Add requests and yield their tokens until all have ended. Closing the iterator early aborts all requests."""
        self.add_all(requests)
        with contextlib.closing(self.steps()) as steps:
            for tokens in steps:
                yield from tokens

    def steps(self, feed: Callable[[], bool] = lambda: False) -> Generator[Iterator[Token]]:
        """Step until no request is left, and yield the tokens of each step.

        A choice that the caller aborts at one of its tokens yields no more. Closing the generator early aborts all
        requests.

        feed: called before each step; adds requests, and returns whether it may add more later.

        Raises InputError for a request whose grammar does not compile.
        """
        try:
            while feed() or self.has_work:
                tokens = self.step()
                for _, message in (*self.refused, *self.failed):
                    raise InputError(message)
                yield (token for token in tokens if not self._was_aborted(token))
        finally:
            self.close()

    def _was_aborted(self, token: Token) -> bool:
        return not self._aborted.isdisjoint({(token.request, None), (token.request, token.choice)})

    def generate(
        self,
        prompts: Sequence[str | Sequence[int] | np.ndarray],
        tokenizer: Tokenizer,
        sampling: Sampling | Sequence[Sampling] = Sampling(),
        max_new_tokens: int = 16,
        stop: Sequence[str] = (),
        n: int = 1,
    ) -> list[Completion]:
        """Complete all prompts (text or token ids), and return the completions in their order.

        sampling: one for all prompts, or one for each.

        Raises InputError, before any step, for an invalid prompt, and while other requests run: their tokens would be
        lost.
        """
        if isinstance(prompts, str):
            raise InputError(f"prompts: expected a list, found one text; give [{prompts[:20]!r}]")
        self._check_idle("generate")
        samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(samplings) != len(prompts):
            raise InputError(
                f"sampling: expected one, or one for each of {len(prompts)} prompts, found {len(samplings)}"
            )
        stop_ids = frozenset(self._model.eos_token_ids)
        requests = []
        collectors = []
        for prompt, prompt_sampling in zip(prompts, samplings):
            ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            requests.append(Request(ids, max_new_tokens, stop_ids=stop_ids, sampling=prompt_sampling, n=n))
            collectors.append(Collector(tokenizer, ids, n, stop, prompt_sampling.min_tokens))
        collector_of = dict(zip(self.add_all(requests), collectors))
        for token in self.run():
            collector = collector_of[token.request]
            collector.push(token)
            if collector.stopped(token):
                self.abort(token.request, token.choice)
        return [collector.completion for collector in collectors]

    def score(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], logprobs: int = 0
    ) -> list[list[Logprobs]]:
        """Return the log-probability of each token of given answers, with the bits that decoding it gives.

        logprobs: how many of the likeliest tokens to list besides.

        Raises InputError as `generate` does, and CheckError for logits that are not finite.
        """
        self._check_idle("score")
        sampling = Sampling(logprobs=logprobs)
        requests = []
        for prompt, answer in zip(prompts, answers, strict=True):
            requests.append(Request(prompt, len(answer), sampling=sampling, forced_ids=answer))
        scores: dict[int, list[Logprobs]] = {number: [] for number in self.add_all(requests)}
        for token in self.run():
            if token.logprobs is None:
                raise CheckError(NOT_FINITE)
            scores[token.request].append(token.logprobs)
        return list(scores.values())

    def update_weights(self, weights_json: Path, waiting: Callable[[], None] = lambda: None) -> str:
        """Replace the weights of the first checkpoint, and return the model's new identity.

        Cached prefixes of the old weights are not reused. waiting: called again and again until the new ones are there.
        Raises InputError while there are requests.
        """
        self._check_idle("update_weights")
        self._model.checkpoints.update("", weights_json, waiting)
        self.root_key.cache_clear()
        return root_key(self._model).hex()

    def _check_idle(self, name: str) -> None:
        if self.has_work:
            raise InputError(f"{name}: expected an engine without requests, found some; step until they have ended")

    def describe(self) -> Iterator[str]:
        """Yield a line about the engine, and one about each choice that has not ended."""
        scheduler = self.scheduler
        tables = scheduler.tables
        pool = tables.pool
        yield (
            f"engine: {scheduler.num_running} running, {scheduler.num_waiting} waiting, {len(self._compiling)} with "
            f"grammars that compile; {pool.num_available} of {pool.num_pages} pages free, {pool.num_cached} cached"
        )
        for scheduled, choice in self.choices.items():
            num_pages = len(tables[scheduled.slot]) if scheduled.slot >= 0 else 0
            yield (
                f"request {choice.index} ({choice.request.id}): choice {choice.number} {scheduled.status.name.lower()} "
                f"in slot {scheduled.slot}, {num_pages} pages, {scheduled.num_computed} tokens computed of "
                f"{scheduled.num_prompt_tokens} of its prompt and {len(choice.answer)} of its answer"
            )
