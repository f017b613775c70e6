"""The stream of one HTTP request: deltas, each with all tokens since the previous one was read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lockstep.runtime.completion import Choice, Collector
from lockstep.runtime.request import Request
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.step.sampling import Logprobs
from lockstep_serve.answer_reader import AnswerPlan

if TYPE_CHECKING:
    from lockstep_serve.metrics import ModelMetrics

# Tenant of the current request; prefixes are never shared across tenants.
TENANT: ContextVar[str] = ContextVar("tenant", default="")
# Models that the current request's key opens; none: all.
OPENED_MODELS: ContextVar[Collection[str]] = ContextVar("opened models", default=())
# The finish reasons of OpenAI's API and vLLM's metrics.
FINISH_REASONS = {
    "stop_id": "stop",
    "stop_string": "stop",
    "grammar_end": "stop",
    "max_new_tokens": "length",
    "max_seq_len": "length",
    "abort": "abort",
}


def finish_reason(finish: str | None) -> str | None:
    """Return why an answer ended, in the words of OpenAI's API and vLLM's metrics; other reasons have their own."""
    return finish and FINISH_REASONS.get(finish, finish)


@dataclass(eq=False)
class PromptRequest:
    """A prompt of an HTTP request, until its answers have ended.

    request: what the engine computes. stop: the strings that end its text. echo: the prompt's text, if answers repeat
    it. min_stop_tokens, shown: see `Collector`. plan: how a chat's answers are read. `Stream` sets the fields without a
    default.
    """

    request: Request
    stop: tuple[str, ...] = ()
    echo: str | None = None
    min_stop_tokens: int = 0
    shown: Mapping[int, str] = field(default_factory=dict)
    plan: AnswerPlan = AnswerPlan()
    stream: Stream = field(init=False)
    collector: Collector = field(init=False)
    arrived: float = field(init=False)
    first: int = field(init=False)  # index of its first answer in the stream
    choices: set[int] = field(init=False)  # unfinished ones
    number: int = -1  # in the engine process
    admitted: float | None = None
    num_cached_tokens: int = 0  # of its prompt, from the prefix cache
    last_token: float | None = None
    num_crashes: int = 0  # of engine processes that ran it
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # of all its tokens but the first
    resumed: dict[int, int] = field(default_factory=dict)  # after a crash: number in the engine process by choice


@dataclass
class AnswerDelta:
    """New text of an answer, and its tokens, whose text may come later; index: of the answer, over all prompts."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs]
    finish: str | None


class StreamError(Exception):
    """The error of a stream without an answer; status: of HTTP. param: the field of the body that caused it."""

    def __init__(
        self,
        message: str,
        status: int = 500,
        code: str | None = "engine_error",
        retry_after: int | None = None,
        param: str | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.retry_after = retry_after
        self.param = param


class Stream:
    """The answers of one request, as an iterator of lists of deltas. Raises StreamError where they fail."""

    def __init__(
        self,
        prompts: Sequence[PromptRequest],
        tokenizer: Tokenizer,
        metrics: ModelMetrics,
        cancel: Callable[[Stream], None],
    ):
        """cancel: aborts the answers of a stream that have not ended."""
        self._cancel = cancel
        self.began = time.monotonic()
        self.sending_since: float | None = None  # since when a delta has waited for the client
        self.first_token: float | None = None  # its time
        self.num_prompt_tokens = sum(len(prompt.request.prompt_ids) for prompt in prompts)
        self.prompts = prompts
        self.metrics = metrics
        self._tokenizer = tokenizer
        first = 0
        for prompt in prompts:
            n = prompt.request.n
            ids = prompt.request.prompt_ids
            echoes = prompt.echo is not None
            prompt.collector = Collector(tokenizer, ids, n, prompt.stop, prompt.min_stop_tokens, echoes, prompt.shown)
            prompt.stream = self
            prompt.arrived = self.began
            prompt.first = first
            prompt.choices = set(range(n))
            first += n
        self._pending: dict[int, AnswerDelta] = {}
        self._waiter: asyncio.Future[None] | None = None  # of the one task that takes the deltas
        self.error: StreamError | None = None  # why it ended without an answer, if it did
        self._num_open = first

    @property
    def choices(self) -> list[Choice]:
        """Return all answers, in order."""
        answers: list[Choice] = []
        for prompt in self.prompts:
            answers += prompt.collector.completion.choices
        return answers

    @property
    def num_cached_tokens(self) -> int:
        return sum(prompt.num_cached_tokens for prompt in self.prompts)

    @property
    def num_answer_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def num_reasoning_tokens(self) -> int:
        """Return the number of reasoning tokens in the answers, marks included."""
        count = 0
        for prompt in self.prompts:
            for choice in prompt.collector.completion.choices:
                count += prompt.plan.num_reasoning_tokens(choice.token_ids, choice.text, self._tokenizer)
        return count

    @property
    def done(self) -> bool:
        return self.error is not None or self._num_open == 0

    @property
    def is_admitted(self) -> bool:
        return any(prompt.admitted is not None for prompt in self.prompts)

    def push(self, index: int, text: str, token: int | None, logprobs: Logprobs | None, finish: str | None) -> None:
        """Add to an answer. token: None for text without a new token; finish: why the answer ends, if it does."""
        delta = self._pending.get(index)
        if delta is None:
            delta = AnswerDelta(index, "", [], [], None)
            self._pending[index] = delta
        delta.text += text
        if token is not None:
            delta.token_ids.append(token)
        if logprobs is not None:
            delta.logprobs.append(logprobs)
        if finish:
            delta.finish = finish
            self._num_open -= 1
        if self._waiter is not None:
            self.wake()

    def cancel(self) -> None:
        self._cancel(self)

    def fail(self, error: StreamError) -> None:
        if not self.done:
            self.error = error
            self.wake()

    def wake(self) -> None:
        """Wake the reader: a delta arrived, or the engine admitted a prompt."""
        waiter = self._waiter
        self._waiter = None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def admission(self) -> None:
        """Wait until the engine has admitted a prompt. Raises StreamError."""
        while not (self.is_admitted or self._pending or self.error):
            await self._woken()
        if self.error and not self._pending:
            raise self.error

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> list[AnswerDelta]:
        while not self._pending:
            if self.error:
                raise self.error
            if self._num_open == 0:
                raise StopAsyncIteration
            await self._woken()
        deltas = list(self._pending.values())
        self._pending = {}
        return deltas

    def _woken(self) -> asyncio.Future[None]:
        assert self._waiter is None or self._waiter.done(), "a stream has one reader"
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter
