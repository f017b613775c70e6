"""The logits pipeline on the host: rows of logits in, tokens and log-probabilities out. The device kernel matches it.

Logits are processed in vLLM's order: grammar mask, logit bias, forbidden tokens (bad words, and end tokens before
`min_tokens`), penalties; then, at a temperature above 0: temperature, min-p, top-k, top-p (nucleus sampling, Holtzman
et al. 2020) and a draw. Log-probabilities are of the model's unprocessed logits.

The draw is stateless: it takes the token t with the largest p(t) / E(t), where E(t) is the exponential noise of
`step/noise.py`. So a request's tokens depend only on its logits and seed, not on batch, order, preemption or restart.

Work on a whole vocabulary is done row by row, since a row stays in the CPU's cache; the candidates that min-p, top-k
and top-p leave are drawn for all rows together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lockstep.step.noise import Draw, exponential_noise
from lockstep.step.sampling import LARGEST, SMALLEST, Logprobs, Sampled, Sampling, scaled_temperature

_NUCLEUS = 512  # tokens that are sorted at first: a few usually have most of the mass
_GROUP = 64


class Sampler:
    """What the pipeline knows of one choice of a request: its parameters and its tokens."""

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
        self.choice = choice
        self._changes_logits = sampling.changes_logits
        if not self._changes_logits:
            prompt = ()  # only processing needs it
        tokens = np.asarray(prompt, np.int64)
        if num_prompt_tokens is None:
            num_prompt_tokens = len(tokens)
        self.num_prompt_tokens = num_prompt_tokens
        self.prompt_ids = np.flatnonzero(np.bincount(tokens[:num_prompt_tokens]))
        self.answer = tokens[num_prompt_tokens:].tolist()
        self.counts = Counter(self.answer)
        self._stop_ids = sorted(stop_ids)

    def push(self, token: int) -> None:
        if self._changes_logits:
            self.answer.append(token)
            self.counts[token] += 1

    def __call__(
        self,
        logits: np.ndarray,
        position: int,
        allowed: np.ndarray | None = None,
        forbidden: Sequence[int] | np.ndarray = (),
    ) -> Sampled:
        """Choose the next token from one row: see `Row`."""
        return choose([Row(self, logits, position, allowed, forbidden)])[0]

    def process(
        self, logits: np.ndarray, allowed: np.ndarray | None, forbidden: Sequence[int] | np.ndarray
    ) -> np.ndarray:
        """Return the processed logits; `logits` itself if nothing changes them."""
        processed = _mask(logits, allowed)
        if self._changes_logits:
            processed = self._adjust(processed, forbidden)
        if processed is not logits and processed.max() == -np.inf:
            # All allowed tokens are forbidden: the grammar goes first. The bound keeps tokens whose own logit is -inf.
            processed = _mask(np.maximum(logits, np.float32(-LARGEST)), allowed)
        return processed

    @np.errstate(over="ignore")
    def _adjust(self, logits: np.ndarray, forbidden: Sequence[int] | np.ndarray) -> np.ndarray:
        sampling = self.sampling
        logits = logits.copy()
        for token, bias in sampling.logit_bias.items():
            logits[token] += np.float32(bias)
        logits[self._forbidden(len(logits), forbidden)] = -np.inf
        answer_ids = np.fromiter(self.counts, np.int64, len(self.counts))
        if sampling.repetition_penalty != 1:
            previous = np.concatenate([self.prompt_ids, answer_ids])  # duplicates do no harm
            penalty = np.float32(max(sampling.repetition_penalty, SMALLEST))
            penalized = logits[previous]
            logits[previous] = np.where(penalized > 0, penalized / penalty, penalized * penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            counts = np.fromiter(self.counts.values(), np.int64, len(answer_ids))
            penalties = sampling.presence_penalty + sampling.frequency_penalty * counts
            logits[answer_ids] -= penalties.astype(logits.dtype)
        return np.minimum(logits, np.float32(LARGEST), out=logits)  # a bias or a tiny penalty may give infinity

    def masks(
        self, vocab_size: int, allowed: np.ndarray | None, forbidden: Sequence[int] | np.ndarray, num_unknown: int = 0
    ) -> Masks:
        """Return what a device needs instead of `allowed` and `forbidden` of a `Row`.

        num_unknown: tokens of the answer that were not pushed yet.
        """
        allowed = np.ones(vocab_size, bool) if allowed is None else allowed
        unforbidden = allowed.copy()
        unforbidden[self._forbidden(vocab_size, forbidden, num_unknown)] = False
        return Masks(allowed, unforbidden)

    def _forbidden(self, vocab_size: int, forbidden: Sequence[int] | np.ndarray, num_unknown: int = 0) -> np.ndarray:
        """Return the forbidden tokens, int64: `forbidden`, last ones of bad sequences, early end tokens."""
        tokens = np.array(forbidden, np.int64).tolist()
        for *before, last in self.sampling.bad_sequences:
            if not before or self.answer[-len(before) :] == before:
                tokens.append(last)
        if len(self.answer) + num_unknown < self.sampling.min_tokens:
            tokens += [token for token in self._stop_ids if 0 <= token < vocab_size]
        return np.array(tokens, np.int64)


class Masks(NamedTuple):
    """The tokens that a grammar allows, and those of them that nothing forbids: [vocab_size] bool."""

    allowed: np.ndarray
    unforbidden: np.ndarray


class Row(NamedTuple):
    """The logits after one token of a choice.

    Attributes:
        logits: [vocab_size] float32.
        position: Number of the request's tokens before the one that is chosen.
        allowed: [vocab_size] bool, the grammar's mask, with at least one token.
        forbidden: Tokens that would complete a bad text.
    """

    sampler: Sampler
    logits: np.ndarray
    position: int
    allowed: np.ndarray | None = None
    forbidden: Sequence[int] | np.ndarray = ()


def choose(rows: Sequence[Row]) -> list[Sampled]:
    """Choose the token that follows each row, and append it to its choice's answer.

    A token is -1 if the largest logit is NaN or infinite. If bad words and end tokens forbid all tokens that the
    grammar allows, they are ignored.
    """
    if not rows:  # of a step whose tokens the model chose
        return []
    tokens = [-1] * len(rows)
    draws: list[Draw] = []
    drawn: list[tuple[int, np.ndarray]] = []
    for number, (sampler, logits, position, allowed, forbidden) in enumerate(rows):
        sampling = sampler.sampling
        greedy_token = int(np.argmax(logits))  # NaN counts as the largest
        if not np.isfinite(logits[greedy_token]):
            continue
        # A grammar alone, greedy: the largest of the allowed logits, without a copy of all.
        if allowed is not None and sampling.temperature == 0 and not sampling.changes_logits:
            allowed_ids = np.flatnonzero(allowed)
            tokens[number] = int(allowed_ids[np.argmax(logits[allowed_ids])])
            continue
        processed = sampler.process(logits, allowed, forbidden)
        if not sampling.temperature:
            tokens[number] = greedy_token if processed is logits else int(np.argmax(processed))
            continue
        ids, weights = candidates(processed, sampling)
        if ids is not None and len(ids) == 1:
            tokens[number] = int(ids[0])
        else:
            draws.append(Draw(sampling.seed, sampler.choice, position, len(logits), ids))
            drawn.append((number, weights))
    for (number, weights), draw, noise in zip(drawn, draws, exponential_noise(draws)):
        first = int(np.argmax(weights / noise))
        tokens[number] = first if draw.token_ids is None else int(draw.token_ids[first])
    sampled = []
    for row, token in zip(rows, tokens):
        logprobs = None
        if token >= 0:
            row.sampler.push(token)
            if row.sampler.sampling.logprobs is not None:
                logprobs = log_probabilities(row.logits, token, row.sampler.sampling.logprobs)
        sampled.append(Sampled(token, logprobs))
    return sampled


def _mask(logits: np.ndarray, allowed: np.ndarray | None) -> np.ndarray:
    return logits if allowed is None else np.where(allowed, logits, np.float32(-np.inf))


def candidates(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray | None, np.ndarray]:
    """Return the tokens that temperature, min-p, top-k and top-p leave, and their unnormalized probabilities.

    Returns ids [num_candidates] int64, ascending, None for the whole vocabulary, and weights [num_candidates] float32,
    which are above 0 where there are ids.
    """
    # Subtract the maximum before the division: a tiny temperature then gives exp(-inf) = 0 and no overflow.
    with np.errstate(over="ignore"):
        weights = np.exp((logits.astype(np.float32) - logits.max()) / scaled_temperature(sampling))
    ids = None
    floor = np.float32(sampling.min_p)
    if floor or np.count_nonzero(weights) < len(weights):
        ids = np.flatnonzero(weights >= floor if floor else weights)
        weights = weights[ids]
    if 0 < sampling.top_k < len(weights):
        ids, weights = _take(ids, weights, np.sort(largest(weights, sampling.top_k)))
    if sampling.top_p < 1:
        ids, weights = _take(ids, weights, _nucleus(weights, sampling.top_p))
    return ids, weights


def _take(ids: np.ndarray | None, weights: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return indices if ids is None else ids[indices], weights[indices]


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the `count` largest of values [num_values], in descending order, of equals the lower first.

    Sorts only values that are at least the `count`-th largest of the maxima of some groups.
    """
    if count == 0:
        return np.zeros(0, np.int64)
    # At least `count` values are not below the `count`-th largest maximum, so none of the `count` largest is.
    group = min(len(values) // (4 * count), _GROUP)
    if group > 1:
        maxima = values[: len(values) // group * group].reshape(group, -1).max(axis=0)
        indices = np.flatnonzero(values >= np.partition(maxima, -count)[-count])
        return indices[np.argsort(-values[indices], kind="stable")[:count]]
    return np.argsort(-values, kind="stable")[:count]


def _nucleus(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Return the indices, ascending, of the smallest set of largest weights whose sum is `top_p` of the total.

    weights: above 0. Of equal ones the lower indices are taken.
    """
    target = top_p * float(weights.sum(dtype=np.float64))
    indices = largest(weights, min(_NUCLEUS, len(weights)))
    if len(indices) < len(weights) and weights[indices].sum(dtype=np.float64) < target:
        return _large_nucleus(weights, target)
    return np.sort(indices[: _count_for(weights[indices], 0.0, target)])


def _large_nucleus(weights: np.ndarray, target: float) -> np.ndarray:
    """Do the same as `_nucleus`, but sort only weights near the smallest one of the set."""
    # The upper 16 bits of a positive float are in its order: bins of weights that differ by less than 1 %.
    bins = weights.view(np.uint32) >> 16
    masses = np.cumsum(np.bincount(bins, weights)[::-1])  # the largest first
    number = min(int(np.searchsorted(masses, target)), len(masses) - 1)
    edge = len(masses) - 1 - number
    is_in = bins > edge
    near = np.flatnonzero(bins == edge)
    near = near[np.argsort(-weights[near], kind="stable")]
    above = float(masses[number - 1]) if number else 0.0
    is_in[near[: _count_for(weights[near], above, target)]] = True
    return np.flatnonzero(is_in)


def _count_for(ordered: np.ndarray, above: float, target: float) -> int:
    """Return how many of descending weights, whose sum begins at `above`, a sum of `target` takes."""
    sums = above + np.cumsum(ordered, dtype=np.float64)
    return int(np.searchsorted(sums - ordered, target))


def log_probabilities(logits: np.ndarray, token: int, count: int) -> Logprobs:
    """Return the log-probabilities of `token` and of the `count` likeliest of logits [vocab_size], lower ids first."""
    maximum = float(logits.max())
    total = maximum + math.log(np.exp(logits - np.float32(maximum)).sum(dtype=np.float64))
    top = largest(logits, count)
    return Logprobs(float(logits[token]) - total, tuple((int(i), float(logits[i]) - total) for i in top))


def most_likely(logits: np.ndarray) -> np.ndarray:
    """Return the argmax of each row of logits [rows, vocab_size], int64; -1 if the maximum is NaN or infinite."""
    return np.where(np.isfinite(logits.max(axis=1)), logits.argmax(axis=1), -1)


def most_likely_of_shard(part: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (token ids [rows] int32, logits [rows] float32) of the argmax of each row of a rank's shard.

    part: logits [rows, columns] of tokens `first` on. NaN counts as infinity.
    """
    values = np.where(np.isnan(part), np.inf, part.astype(np.float32))
    tokens = values.argmax(axis=1)
    return (first + tokens).astype(np.int32), values[np.arange(len(values)), tokens].astype(np.float32)


def most_likely_of_ranks(by_rank: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return `most_likely` of all ranks' logits; by_rank: `most_likely_of_shard` of each, in order."""
    logits = np.stack([values for _, values in by_rank], axis=1)
    tokens = np.stack([ids for ids, _ in by_rank], axis=1).astype(np.int64)
    chosen = logits.argmax(axis=1)[:, None]
    best = np.take_along_axis(logits, chosen, axis=1)
    return np.where(np.isfinite(best), np.take_along_axis(tokens, chosen, axis=1), -1)[:, 0]
