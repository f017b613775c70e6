"""The stream of one HTTP request: deltas, each with all that came since its reader took the one before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from lockstep.runtime.completion import Choice, Collector
from lockstep.runtime.request import Request
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.serve.answer_reader import AnswerPlan
from lockstep.step.sampling import Logprobs

# Whose request it is that this task is at: prefixes are shared with nobody else.
TENANT: ContextVar[str] = ContextVar("tenant", default="")
# Why an answer ended, as OpenAI's API and vLLM's metrics call it.
FINISH_REASONS = {
    "stop_id": "stop",
    "stop_string": "stop",
    "grammar_end": "stop",
    "max_new_tokens": "length",
    "max_seq_len": "length",
    "abort": "abort",
}


@dataclass(eq=False)
class PromptRequest:
    """A prompt of an HTTP request, from its front end to the end of its answers.

    request: what the engine computes. stop: the strings that end its text. echo: the text that the answer begins with,
    where the prompt is to be repeated. min_stop_tokens, shown: as of `Collector`. plan: how a chat's answers are read.
    The rest is there once it is submitted.
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
    first: int = field(init=False)  # index of its first answer
    choices: set[int] = field(init=False)  # those that have not ended
    number: int = -1  # as the engine process knows it
    admitted: float | None = None
    num_cached_tokens: int = 0  # of its prompt, found again as a prefix
    last_token: float | None = None
    deaths: int = 0  # engine processes that died while it was theirs
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # of its tokens but the first
    resumed: dict[int, int] = field(default_factory=dict)  # numbers of its choices in the engine process after one


@dataclass
class AnswerDelta:
    """New text of an answer, and its tokens, whose text may come later; index: its number, prompt by prompt."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs]
    finish: str | None


class StreamError(Exception):
    """The error of a stream without an answer; status: of HTTP. param: the field of the body that is why."""

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
    """The answers of one request, as lists of deltas that came together. Raises StreamError at a bad end."""

    def __init__(self, prompts: Sequence[PromptRequest], tokenizer: Tokenizer):
        self.began = time.monotonic()
        self.sending_since: float | None = None  # a delta waits for the reader since
        self.first_token: float | None = None  # when it came
        self.num_prompt_tokens = sum(len(prompt.request.prompt_ids) for prompt in prompts)
        self.prompts = prompts
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
        self._open = first

    @property
    def choices(self) -> list[Choice]:
        """Return all answers, in order."""
        return [choice for prompt in self.prompts for choice in prompt.collector.completion.choices]

    @property
    def num_cached_tokens(self) -> int:
        return sum(prompt.num_cached_tokens for prompt in self.prompts)

    @property
    def num_answer_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def num_reasoning_tokens(self) -> int:
        """Return how many of the answers' tokens are reasoning, with its marks."""
        each = ((choice, prompt.plan) for prompt in self.prompts for choice in prompt.collector.completion.choices)
        return sum(plan.num_reasoning_tokens(choice.token_ids, choice.text, self._tokenizer) for choice, plan in each)

    @property
    def done(self) -> bool:
        """Return whether nothing more comes."""
        return self.error is not None or not self._open

    @property
    def is_admitted(self) -> bool:
        return any(prompt.admitted is not None for prompt in self.prompts)

    def push(self, index: int, text: str, token: int | None, logprobs: Logprobs | None, finish: str | None) -> None:
        """Add to an answer. token: None for text without a new token; finish: why the answer ends, if it does."""
        delta = self._pending.get(index)
        if delta is None:
            delta = self._pending[index] = AnswerDelta(index, "", [], [], None)
        delta.text += text
        if token is not None:
            delta.token_ids.append(token)
        if logprobs is not None:
            delta.logprobs.append(logprobs)
        if finish:
            delta.finish = finish
            self._open -= 1
        if self._waiter is not None:
            self.wake()

    def fail(self, error: StreamError) -> None:
        """End without an answer."""
        if not self.done:
            self.error = error
            self.wake()

    def wake(self) -> None:
        """Wake the reader: something came, or the engine admitted a prompt."""
        waiter = self._waiter
        self._waiter = None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def admission(self) -> None:
        """Wait until the engine has admitted it, or anything came. Raises StreamError."""
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
            if not self._open:
                raise StopAsyncIteration
            await self._woken()
        deltas = list(self._pending.values())
        self._pending = {}
        return deltas

    def _woken(self) -> asyncio.Future[None]:
        assert self._waiter is None or self._waiter.done(), "a stream has one reader"
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter
