"""Sampling: the reference implementation, which the device kernels match.

Logits are processed in vLLM's order: grammar mask, logit bias, forbidden tokens (bad words, and end tokens before
`min_tokens`), penalties; then, at a temperature above 0: temperature, min-p, top-k, top-p (nucleus sampling, Holtzman
et al. 2020) and a draw. Log-probabilities are of the model's unprocessed logits.

The draw is stateless: it takes the token t with the largest p(t) / E(t), where E(t) is exponential noise from the
counter-based generator Philox4x64-10 (Salmon et al. 2011), with the key (seed, choice) and a counter of (t, position).
So a request's tokens depend only on its logits and seed, not on batch, order, preemption or restart.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.errors import InputError

MAX_LOGPROBS = 20
_SMALLEST = 1e-30  # lower bound of a temperature or penalty above 0: fp32 can divide by it
# A slot's sampling parameters on a device, see `parameters`. temperature: 0 is greedy; top_k: 0 is all.
PARAMETERS = np.dtype(
    [
        ("temperature", "f4"),
        ("top_k", "i4"),
        ("min_p", "f4"),
        ("unused", "i4"),
        ("top_p", "f8"),
        ("seed", "u8"),
        ("choice", "u8"),
    ]
)
_LARGEST = float(np.finfo(np.float32).max)


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
            expect(name, f"at most {_LARGEST:.2g}", getattr(self, name) <= _LARGEST)
        for name in ("presence_penalty", "frequency_penalty"):
            expect(name, "-2 to 2", -2 <= getattr(self, name) <= 2)
        biases = self.logit_bias.values()
        expect("logit_bias", "numbers by token id", all(map(_is_bias, self.logit_bias, biases)))
        expect("logit_bias", "finite numbers by token id", all(abs(bias) <= _LARGEST for bias in biases))
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
        """Return the texts in `bad_words`."""
        return [word for word in self.bad_words if isinstance(word, str)]

    @property
    def bad_sequences(self) -> list[tuple[int, ...]]:
        """Return the token sequences in `bad_words`."""
        return [word for word in self.bad_words if not isinstance(word, str)]

    @property
    def needs_logits(self) -> bool:
        """Return whether sampling needs the logits on the host: a device can only draw or choose greedily."""
        return self.logprobs is not None or self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Return whether biases, penalties or forbidden tokens change the logits."""
        return bool(
            self.logit_bias
            or self.bad_words
            or self.min_tokens
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
        )


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


class Sampler:
    """Chooses one request's tokens, and remembers them for the penalties."""

    def __init__(
        self,
        sampling: Sampling = Sampling(),
        prompt: Sequence[int] | np.ndarray = (),
        stop_ids: frozenset[int] = frozenset(),
        choice: int = 0,
        num_prompt_tokens: int | None = None,
    ):
        """Start a request.

        Args:
            prompt: Token ids.
            stop_ids: End tokens, which `min_tokens` delays.
            choice: Number of the choice within its request.
            num_prompt_tokens: Tokens of `prompt`, if the others are the answer of a preempted request.
        """
        self.sampling = sampling
        self._choice = choice
        tokens = [int(token) for token in prompt] if sampling.changes_logits else []  # only processing needs them
        if num_prompt_tokens is None:
            num_prompt_tokens = len(tokens)
        self._prompt = np.unique(np.array(tokens[:num_prompt_tokens], np.int64))
        self._answer = tokens[num_prompt_tokens:]
        self._stop_ids = sorted(stop_ids)

    def __call__(
        self,
        logits: np.ndarray,
        position: int,
        allowed: np.ndarray | None = None,
        forbidden: Sequence[int] | np.ndarray = (),
    ) -> Sampled:
        """Choose the next token.

        If bad words and end tokens forbid all tokens that the grammar allows, they are ignored.

        Args:
            logits: [vocab_size] float32.
            position: Number of the request's tokens before this one.
            allowed: [vocab_size] bool, the grammar's mask, with at least one token.
            forbidden: Tokens that would complete a bad text.
        """
        sampling = self.sampling
        greedy_token = int(np.argmax(logits))  # NaN counts as the largest
        if not np.isfinite(logits[greedy_token]):
            return Sampled(-1)
        if allowed is not None and sampling.temperature == 0 and not sampling.changes_logits:
            allowed_ids = np.flatnonzero(allowed)
            token = int(allowed_ids[np.argmax(logits[allowed_ids])])
        else:
            adjusted = self._process(logits, allowed, forbidden)
            if sampling.temperature:
                token = draw(adjusted, sampling, self._choice, position)
            else:
                token = greedy_token if adjusted is logits else int(np.argmax(adjusted))
        self._answer.append(token)
        if sampling.logprobs is None:
            return Sampled(token)
        return Sampled(token, log_probabilities(logits, token, sampling.logprobs))

    def _process(
        self, logits: np.ndarray, allowed: np.ndarray | None, forbidden: Sequence[int] | np.ndarray
    ) -> np.ndarray:
        """Return the processed logits; `logits` itself if nothing changes them."""
        processed = _mask(logits, allowed)
        if self.sampling.changes_logits:
            processed = self._adjust(processed, forbidden)
        if processed is not logits and processed.max() == -np.inf:
            # All allowed tokens are forbidden. The bound keeps tokens whose own logit is -inf.
            processed = _mask(np.maximum(logits, np.float32(-_LARGEST)), allowed)
        return processed

    @np.errstate(over="ignore")
    def _adjust(self, logits: np.ndarray, forbidden: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the logits with biases, forbidden tokens and penalties."""
        sampling = self.sampling
        logits = logits.copy()
        for token, bias in sampling.logit_bias.items():
            logits[token] += bias
        for *before, last in sampling.bad_sequences:
            if not before or self._answer[-len(before) :] == before:
                logits[last] = -np.inf
        if len(forbidden):
            logits[forbidden] = -np.inf
        if len(self._answer) < sampling.min_tokens:
            logits[[token for token in self._stop_ids if 0 <= token < len(logits)]] = -np.inf
        if sampling.repetition_penalty != 1:
            previous = np.concatenate([self._prompt, np.array(self._answer, np.int64)])  # duplicates do no harm
            penalty = np.float32(max(sampling.repetition_penalty, _SMALLEST))
            penalized = logits[previous]
            logits[previous] = np.where(penalized > 0, penalized / penalty, penalized * penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            tokens, counts = np.unique(self._answer, return_counts=True)
            penalties = sampling.presence_penalty + sampling.frequency_penalty * counts
            logits[tokens.astype(np.int64)] -= penalties.astype(logits.dtype)
        return np.minimum(logits, np.float32(_LARGEST), out=logits)  # a bias or a tiny penalty may give infinity


def _mask(logits: np.ndarray, allowed: np.ndarray | None) -> np.ndarray:
    return logits if allowed is None else np.where(allowed, logits, np.float32(-np.inf))


def parameters(sampling: Sampling, choice: int) -> tuple[float, int, float, int, float, int, int]:
    """Return the fields of PARAMETERS for a request's choice."""
    temperature = float(_temperature(sampling)) if sampling.temperature else 0.0
    top_k = min(sampling.top_k, np.iinfo(np.int32).max)
    return temperature, top_k, sampling.min_p, 0, sampling.top_p, sampling.seed, choice


def _temperature(sampling: Sampling) -> np.float32:
    return np.float32(max(sampling.temperature, _SMALLEST))


def draw(logits: np.ndarray, sampling: Sampling, choice: int, position: int) -> int:
    """Draw a token from logits [vocab_size], at a temperature above 0."""
    weights = probabilities(logits, sampling)
    candidates = np.flatnonzero(weights)
    if len(candidates) == 1:
        return int(candidates[0])
    noise = exponential_noise(sampling.seed, choice, position, len(logits))
    if len(candidates) < len(weights):
        return int(candidates[np.argmax(weights[candidates] / noise[candidates])])
    return int(np.argmax(weights / noise))


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the unnormalized probabilities of a draw, [vocab_size] float32; 0 for tokens that are filtered out."""
    # Subtract the maximum before the division: a tiny temperature then gives exp(-inf) = 0 and no overflow.
    with np.errstate(over="ignore"):
        weights = np.exp((logits.astype(np.float32) - logits.max()) / _temperature(sampling))
    if sampling.min_p:
        weights[weights < np.float32(sampling.min_p)] = 0
    if 0 < sampling.top_k < len(weights):
        _keep_largest(weights, sampling.top_k, np.partition(weights, -sampling.top_k)[-sampling.top_k])
    if sampling.top_p < 1:
        count, edge = _nucleus(weights[weights > 0], sampling.top_p)
        _keep_largest(weights, count, edge)
    return weights


def _nucleus(weights: np.ndarray, top_p: float) -> tuple[int, np.float32]:
    """Return (count, smallest weight) of the smallest set of largest weights whose sum is `top_p` of the total."""
    target = top_p * float(weights.sum(dtype=np.float64))
    count = 512
    while True:  # a few tokens usually have most of the sum: sort only those
        count = min(count, len(weights))
        # Sort after `partition`, whose order of the elements depends on the CPU: the sums must not.
        ordered = np.sort(np.partition(weights, -count)[-count:])[::-1]
        sums = np.cumsum(ordered, dtype=np.float64)
        if count == len(weights) or sums[-1] >= target:
            break
        count *= 8
    number = int(np.searchsorted(sums - ordered, target))
    return number, ordered[number - 1]


def _keep_largest(weights: np.ndarray, count: int, edge: np.float32) -> None:
    """Zero all but the `count` largest weights, whose smallest is `edge`; of equal ones keep the lower ids."""
    equal = np.flatnonzero(weights == edge)
    num_larger = int((weights > edge).sum())
    weights[weights < edge] = 0
    weights[equal[count - num_larger :]] = 0


def exponential_noise(seed: int, choice: int, position: int, count: int) -> np.ndarray:
    """Return the exponential noise of tokens 0 to `count`-1, float32 above 0.

    Philox4x64-10 with key (seed, choice) and counter (block, position, 0, 0) gives 4 words of 64 bits per block. Token
    t uses 32 bits of block t // 8 + 1, word t % 8 // 2, low half first. The noise is -log(1 - v), with the bits as v in
    (0, 1).
    """
    key = np.array([seed, choice], np.uint64)
    counter = np.array([0, position, 0, 0], np.uint64)
    bits = np.random.Philox(key=key, counter=counter).random_raw(-(-count // 2))
    halves = bits.astype("<u8", copy=False).view("<u4")[:count]
    v = (halves.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    with np.errstate(divide="ignore"):  # v may round to 1: infinite noise, which never wins
        return -np.log1p(-v)


def log_probabilities(logits: np.ndarray, token: int, count: int) -> Logprobs:
    """Return the log-probabilities of `token` and of the `count` likeliest of logits [vocab_size], lower ids first."""
    largest = float(logits.max())
    total = largest + math.log(np.exp(logits - np.float32(largest)).sum(dtype=np.float64))
    top = np.arange(len(logits))
    if count < len(logits):
        top = np.flatnonzero(logits >= np.partition(logits, -count)[-count]) if count else top[:0]
    top = top[np.lexsort((top, -logits[top]))][:count]
    return Logprobs(float(logits[token]) - total, tuple((int(i), float(logits[i]) - total) for i in top))
