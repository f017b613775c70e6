"""The engine's inputs and outputs: requests, tokens, speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.runtime.grammar import Grammar
from lockstep.step.sampling import Logprobs, Sampling

# What ends a request whose token cannot be chosen.
NOT_FINITE = (
    "logits: expected finite numbers, found NaN or infinity as the largest; lockstep bisect says in which layer, and "
    "whether float16 overflows there"
)


@dataclass(frozen=True)
class Request:
    """A prompt (token ids, at least one) and how to go on.

    Ends after `max_new_tokens`, after a token of `stop_ids` (which is given out), or when `max_seq_len` is reached.
    choose: gives the next token from logits [vocab_size] float32, instead of `sampling`. n: how many choices to make of
    the prompt, which is computed once. choice: number of the first, which decides what it draws. priority: lower goes
    first. cache_salt: prefixes are shared with requests of the same salt only. answer_ids: tokens that were given out
    before an interruption: they are computed again, one a step as then, and new ones follow them. grammar: what each
    choice must be; it ends where nothing can follow. prompt_logprobs: log-probabilities of the prompt's tokens, and of
    so many of the likeliest, come too (`Engine.prompt_logprobs`); max_new_tokens may then be 0. adapter: which one
    it is computed with, by name; None: none.
    """

    prompt_ids: Sequence[int] | np.ndarray
    max_new_tokens: int
    choose: Callable[[np.ndarray], int] | None = None
    stop_ids: frozenset[int] = frozenset()
    sampling: Sampling = Sampling()
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    answer_ids: Sequence[int] = ()
    choice: int = 0
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class Token:
    """One new token of choice `choice` of request number `request`.

    It was chosen from `logits` [vocab_size] float32; None when the model chose, greedy or drawn: see `Engine`.

    `finish` says why it is the last: "stop_id", "grammar_end" (the grammar allows nothing behind it), "max_new_tokens",
    "max_seq_len", or, when `token` is -1, "error" for logits that are NaN or infinite, "grammar_error" for a grammar
    that became too complex, or "max_new_tokens" where none was asked for; None when more follow.
    """

    request: int
    token: int
    logits: np.ndarray | None
    finish: str | None
    choice: int = 0
    logprobs: Logprobs | None = None


@dataclass
class Speed:
    """Tokens and seconds spent in steps.

    A step that brings any part of a prompt counts as prefill, with its prompt tokens only. One that was under way
    before it was asked for (on a GPU) takes from the end of the one before: what the reader of its tokens did meanwhile
    is in it.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0
