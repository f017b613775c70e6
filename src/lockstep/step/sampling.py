"""How a request's tokens are chosen, and the results: parameters, tokens, log-probabilities."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.errors import InputError

MAX_LOGPROBS = 20
SMALLEST = 1e-30  # lower bound of a temperature or penalty above 0: fp32 can divide by it
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, with vLLM's names and meanings.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 keeps all tokens.
        top_p: 1 keeps all tokens.
        min_p: Drops tokens less likely than this fraction of the likeliest.
        repetition_penalty: Divides positive logits of tokens in the prompt or the answer, multiplies negative ones.
        presence_penalty: Subtracted from the logits of tokens in the answer.
        frequency_penalty: The same, times their count.
        logit_bias: Added to logits, by token.
        bad_words: Texts that must not appear in the answer, however tokenized, and forbidden token sequences.
        min_tokens: No end token or stop string before this many tokens.
        seed: 0 to 2**64-1.
        logprobs: Return log-probabilities of the chosen token and of this many likeliest ones; None: none.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    min_tokens: int = 0
    seed: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        def expect(name: str, expected: str, holds: bool) -> None:
            if not holds:
                raise InputError(f"{name}: expected {expected}, found {str(getattr(self, name))[:60]}")

        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            expect(name, "a number", isinstance(value, int | float) and not isinstance(value, bool))
        for name in ("top_k", "min_tokens", "seed"):
            value = getattr(self, name)
            expect(name, "a whole number", isinstance(value, int) and not isinstance(value, bool))
        if self.logprobs is not None:
            expect("logprobs", "a whole number, or none", type(self.logprobs) is int)
        expect("temperature", "0 or more", 0 <= self.temperature < math.inf)
        expect("top_k", "0 (all) or more", self.top_k >= 0)
        expect("top_p", "above 0 and up to 1", 0 < self.top_p <= 1)
        expect("min_p", "0 to 1", 0 <= self.min_p <= 1)
        expect("repetition_penalty", "above 0", 0 < self.repetition_penalty < math.inf)
        for name in ("temperature", "repetition_penalty"):
            expect(name, f"at most {LARGEST:.2g}", getattr(self, name) <= LARGEST)
        for name in ("presence_penalty", "frequency_penalty"):
            expect(name, "-2 to 2", -2 <= getattr(self, name) <= 2)
        biases = self.logit_bias.values()
        expect("logit_bias", "numbers by token id", all(map(_is_bias, self.logit_bias, biases)))
        expect("logit_bias", "finite numbers by token id", all(abs(bias) <= LARGEST for bias in biases))
        expect(
            "bad_words",
            "texts in UTF-8 that are not empty, or sequences of at least one token",
            not isinstance(self.bad_words, str) and all(map(_is_word, self.bad_words)),
        )
        expect("min_tokens", "0 or more", self.min_tokens >= 0)
        expect("seed", "0 to 2**64-1", 0 <= self.seed < 1 << 64)
        expect("logprobs", f"0 to {MAX_LOGPROBS}, or none", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS)

    @property
    def bad_texts(self) -> list[str]:
        return [word for word in self.bad_words if isinstance(word, str)]

    @property
    def bad_sequences(self) -> list[tuple[int, ...]]:
        return [word for word in self.bad_words if not isinstance(word, str)]

    @property
    def needs_logits(self) -> bool:
        """Return whether more than a draw is needed: changed logits, or log-probabilities."""
        return self.logprobs is not None or self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Return whether biases, penalties or forbidden tokens change the logits."""
        return bool(self.logit_bias or self.bad_words or self.min_tokens or self.has_penalties)

    @property
    def has_penalties(self) -> bool:
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)


def _is_bias(token: object, bias: object) -> bool:
    return _are_tokens([token]) and isinstance(bias, numbers.Real) and not isinstance(bias, bool)


def _is_word(word: object) -> bool:
    if not isinstance(word, str):
        return _are_tokens(word)
    try:
        return bool(word.encode())
    except UnicodeEncodeError:
        return False


def _are_tokens(word: object) -> bool:
    return (
        isinstance(word, Sequence)
        and not isinstance(word, str | bytes)
        and len(word) > 0
        and all(isinstance(token, numbers.Integral) and not isinstance(token, bool) for token in word)
    )


@dataclass(frozen=True)
class Logprobs:
    """Natural log-probabilities of the chosen token, and of the likeliest tokens in descending order."""

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Sampled:
    """A chosen token; -1 if the largest logit is NaN or infinite."""

    token: int
    logprobs: Logprobs | None = None


def scaled_temperature(sampling: Sampling) -> np.float32:
    """Return a temperature above 0 as the draws use it."""
    return np.float32(max(sampling.temperature, SMALLEST))
