"""From logits to a token: greedy, or drawn by temperature, top-k and top-p. Seeded, in float64.

Top-p is nucleus sampling (Holtzman et al. 2020): the smallest set of most likely tokens whose probability reaches p.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.errors import CheckError, InputError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 leave all tokens in."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature: expected 0 or more, found {self.temperature}")
        if self.top_k < 0:
            raise InputError(f"top_k: expected 0 (all) or more, found {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p: expected above 0 and up to 1, found {self.top_p}")
        if self.seed < 0:
            raise InputError(f"seed: expected 0 or more, found {self.seed}")


class Sampler:
    """Chooses one request's tokens. `index` is the request's number: what it draws does not depend on the others in its
    batch."""

    def __init__(self, sampling: Sampling = Sampling(), index: int = 0):
        self._sampling = sampling
        self._random = np.random.default_rng([sampling.seed, index])

    def __call__(self, logits: np.ndarray) -> int:
        """A token for logits [vocab_size]. Raises CheckError when they hold NaN or infinity at the top."""
        best = greedy(logits)
        if self._sampling.temperature == 0:
            return best
        cumulative = np.cumsum(probabilities(logits, self._sampling))
        return int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))


def greedy(logits: np.ndarray) -> int:
    """The most likely token, the lowest of equals. Raises CheckError when it is NaN or infinite."""
    best = int(np.argmax(logits))  # NaN counts as the largest
    if not np.isfinite(logits[best]):
        raise CheckError(
            f"logits: expected finite numbers, found {logits[best]} for token {best}; the "
            f"weights or the precision do not fit the model"
        )
    return best


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Probabilities [vocab_size] float64 of logits at a temperature above 0, cut by top-k, then by top-p, and made to
    sum to 1."""
    logits = logits.astype(np.float64)
    # The largest is taken off before the division: a tiny temperature then gives exp(-inf) = 0, not an overflow.
    with np.errstate(over="ignore"):
        weights = np.exp((logits - logits.max()) / sampling.temperature)
    if sampling.top_k or sampling.top_p < 1:
        order = np.argsort(-logits, kind="stable")
        if sampling.top_k:
            weights[order[sampling.top_k :]] = 0
        if sampling.top_p < 1:
            before = np.cumsum(weights[order]) - weights[order]
            weights[order[before >= sampling.top_p * weights.sum()]] = 0
    return weights / weights.sum()
