"""From logits to a token: one definition, of which a device's kernels are copies.

In order, as vLLM applies them: tokens that a grammar forbids, logit bias, tokens that must not come (bad words, the end
before `min_tokens`), penalties; then, at a temperature above 0, the temperature, min-p, top-k and top-p (nucleus
sampling, Holtzman et al. 2020), and a draw. Log-probabilities are of the logits as the model gave them.

The draw needs no state: token t wins whose p(t) / E(t) is the largest, where E(t) are exponential noise from the
counter-based generator Philox4x64-10 (Salmon et al. 2011) keyed by (seed, choice), its counter by (t, position). So a
request's tokens depend on its logits and its seed alone: not on batch, order, interruption or restart.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.errors import InputError

MAX_LOGPROBS = 20
_LEAST = 1e-30  # temperature or penalty above 0: fp32 can divide by it
# What a device draws with: `parameters` of a slot. temperature: 0 is greedy; top_k: 0 is all.
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
_LARGEST = float(np.finfo(np.float32).max)  # what logits are computed with


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, with vLLM's names and meanings.

    temperature: 0 is greedy. top_k: 0 leaves all tokens in. top_p: 1 leaves all in. min_p: tokens less likely than so
    much of the likeliest are out. repetition_penalty: divides positive logits of tokens in prompt or answer, multiplies
    negative ones. presence_penalty, frequency_penalty: taken off the logits of tokens in the answer, once, or as often
    as they came. logit_bias: added, by token. bad_words: texts that no answer may hold, in whichever tokens, and token
    sequences that must not come. min_tokens: end tokens and stop strings wait for so many. seed: 0 to 2**64-1.
    logprobs: of the chosen token and of so many of the likeliest; None: none.
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
        expect("logit_bias", "numbers by token id", all(_are_bias(*each) for each in self.logit_bias.items()))
        expect("logit_bias", "finite numbers by token id", all(abs(v) <= _LARGEST for v in self.logit_bias.values()))
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
        """Return those of bad_words that are texts."""
        return [word for word in self.bad_words if isinstance(word, str)]

    @property
    def bad_sequences(self) -> list[tuple[int, ...]]:
        """Return those of bad_words that are token sequences."""
        return [word for word in self.bad_words if not isinstance(word, str)]

    @property
    def needs_logits(self) -> bool:
        """Return whether the host must see the logits.

        So where neither `draw` nor the most likely token of the logits as they are is enough.
        """
        return self.logprobs is not None or self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Return whether earlier tokens or a list change the logits."""
        return bool(
            self.logit_bias
            or self.bad_words
            or self.min_tokens
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
        )


def _are_bias(token: object, bias: object) -> bool:
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
    """Natural logarithms of probabilities.

    Of the chosen token, and of the likeliest tokens, likeliest first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Sampled:
    """A chosen token; -1 where the largest logit is NaN or infinite."""

    token: int
    logprobs: Logprobs | None = None


class Sampler:
    """Chooses one request's tokens.

    It keeps what its penalties need: how often each token came.
    """

    def __init__(
        self,
        sampling: Sampling = Sampling(),
        prompt: Sequence[int] | np.ndarray = (),
        stop_ids: frozenset[int] = frozenset(),
        choice: int = 0,
        num_prompt_tokens: int | None = None,
    ):
        """Begin a request.

        prompt: token ids. stop_ids: what `min_tokens` holds back. choice: number of the request's choice.
        num_prompt_tokens: fewer than `prompt` has, where its last tokens are an answer that was interrupted.
        """
        self.sampling = sampling
        self._choice = choice
        tokens = [int(token) for token in prompt] if sampling.changes_logits else []  # else none is looked at
        cut = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
        self._prompt = np.unique(np.array(tokens[:cut], np.int64))
        self._answer = tokens[cut:]
        self._stop_ids = sorted(stop_ids)

    def __call__(
        self,
        logits: np.ndarray,
        position: int,
        allowed: np.ndarray | None = None,
        forbidden: Sequence[int] | np.ndarray = (),
    ) -> Sampled:
        """Choose the next token.

        logits: [vocab_size] float32. position: number of the request's tokens before the one that is chosen. allowed:
        [vocab_size] bool, what a grammar leaves, at least one; it comes before all else. forbidden: tokens that would
        complete a bad text. Where lists leave nothing of what a grammar leaves, or of all tokens, they are ignored.
        """
        sampling = self.sampling
        best = int(np.argmax(logits))  # NaN counts as the largest
        if not np.isfinite(logits[best]):
            return Sampled(-1)
        if allowed is not None and sampling.temperature == 0 and not sampling.changes_logits:
            left = np.flatnonzero(allowed)
            token = int(left[np.argmax(logits[left])])
        else:
            masked = logits if allowed is None else np.where(allowed, logits, np.float32(-np.inf))
            changed = self._changed(masked, forbidden) if sampling.changes_logits else masked
            if (allowed is not None or changed is not logits) and changed.max() == -np.inf:
                left_in = np.maximum(logits, np.float32(-_LARGEST))
                changed = left_in if allowed is None else np.where(allowed, left_in, np.float32(-np.inf))
            if sampling.temperature == 0:
                token = best if changed is logits else int(np.argmax(changed))
            else:
                token = draw(changed, sampling, self._choice, position)
        self._answer.append(token)
        if sampling.logprobs is None:
            return Sampled(token)
        return Sampled(token, log_probabilities(logits, token, sampling.logprobs))

    @np.errstate(over="ignore")
    def _changed(self, logits: np.ndarray, forbidden: Sequence[int] | np.ndarray) -> np.ndarray:
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
            seen = np.concatenate([self._prompt, np.array(self._answer, np.int64)])  # some of them twice
            penalty = np.float32(max(sampling.repetition_penalty, _LEAST))
            penalized = logits[seen]
            logits[seen] = np.where(penalized > 0, penalized / penalty, penalized * penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            came, often = np.unique(self._answer, return_counts=True)
            came = came.astype(np.int64)
            logits[came] -= (sampling.presence_penalty + sampling.frequency_penalty * often).astype(logits.dtype)
        return np.minimum(logits, np.float32(_LARGEST), out=logits)  # a bias or a tiny penalty may give infinity


def parameters(sampling: Sampling, choice: int) -> tuple[float, int, float, int, float, int, int]:
    """Return the fields of PARAMETERS, for the draws of a request's choice."""
    temperature = float(_temperature(sampling)) if sampling.temperature else 0.0
    top_k = min(sampling.top_k, np.iinfo(np.int32).max)
    return temperature, top_k, sampling.min_p, 0, sampling.top_p, sampling.seed, choice


def _temperature(sampling: Sampling) -> np.float32:
    return np.float32(max(sampling.temperature, _LEAST))


def draw(logits: np.ndarray, sampling: Sampling, choice: int, position: int) -> int:
    """Draw a token from logits [vocab_size], at a temperature above 0."""
    weights = probabilities(logits, sampling)
    kept = np.flatnonzero(weights)
    if len(kept) == 1:
        return int(kept[0])
    noise = exponential_noise(sampling.seed, choice, position, len(logits))
    if len(kept) < len(weights):
        return int(kept[np.argmax(weights[kept] / noise[kept])])
    return int(np.argmax(weights / noise))


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the weights of tokens in the draw, [vocab_size] float32.

    They are probabilities at a temperature above 0, up to a common factor; 0 for those that min-p, top-k or top-p leave
    out.
    """
    # The largest is taken off before the division: a tiny temperature then gives exp(-inf) = 0, not an overflow.
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
    """Return the smallest set of largest weights that holds `top_p` of their sum.

    As (number, least).
    """
    wanted = top_p * float(weights.sum(dtype=np.float64))
    count = 512
    while True:  # most of the sum lies in few tokens: sort these only
        count = min(count, len(weights))
        ordered = np.sort(np.partition(weights, -count)[-count:])[::-1]
        # In one order, whatever order this CPU's `partition` leaves.
        sums = np.cumsum(ordered, dtype=np.float64)
        if count == len(weights) or sums[-1] >= wanted:
            break
        count *= 8
    number = int(np.searchsorted(sums - ordered, wanted))
    return number, ordered[number - 1]


def _keep_largest(weights: np.ndarray, count: int, edge: np.float32) -> None:
    """Zero all but the `count` largest weights, of which `edge` is the least.

    Of those that equal it the lower ids stay.
    """
    equal = np.flatnonzero(weights == edge)
    more = int((weights > edge).sum())
    weights[weights < edge] = 0
    weights[equal[count - more :]] = 0


def exponential_noise(seed: int, choice: int, position: int, count: int) -> np.ndarray:
    """Return the exponential noise of tokens 0 to `count`-1, float32 above 0.

    Philox4x64-10 with key (seed, choice) and counter (block, position, 0, 0) gives 4 words of 64 bits a block; token t
    takes 32 bits of block t // 8 + 1, word t % 8 // 2, the low half first. With those bits as v in (0, 1): -log(1 - v).
    """
    key = np.array([seed, choice], np.uint64)
    counter = np.array([0, position, 0, 0], np.uint64)
    bits = np.random.Philox(key=key, counter=counter).random_raw(-(-count // 2))
    halves = bits.astype("<u8", copy=False).view("<u4")[:count]
    v = (halves.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    with np.errstate(divide="ignore"):  # v that rounds to 1: infinite, which never wins
        return -np.log1p(-v)


def log_probabilities(logits: np.ndarray, token: int, count: int) -> Logprobs:
    """Return the log probabilities of `token` and of the `count` likeliest.

    logits: [vocab_size]. Of equal ones the lower ids come first.
    """
    largest = float(logits.max())
    total = largest + math.log(np.exp(logits - np.float32(largest)).sum(dtype=np.float64))
    top = np.arange(len(logits))
    if count < len(logits):
        top = np.flatnonzero(logits >= np.partition(logits, -count)[-count]) if count else top[:0]
    top = top[np.lexsort((top, -logits[top]))][:count]
    return Logprobs(float(logits[token]) - total, tuple((int(i), float(logits[i]) - total) for i in top))
