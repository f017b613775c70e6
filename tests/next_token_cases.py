"""Rows of logits for the kernel that chooses tokens.

On them it is held against the host's definition: on a GPU, and compiled for the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.step.logits_pipeline import Sampler, candidates
from lockstep.step.noise import Draw, exponential_noise
from lockstep.step.sampling import PARAMETERS as SAMPLING
from lockstep.step.sampling import Sampling, parameters

__all__ = ["CASES", "SAMPLING", "Case", "check_draws", "noise_of", "probabilities", "record", "rows_of"]

# How far the kernel's ratio of weight and noise may be from NumPy's: expf and log1pf have 2 units in the last place
# each on the device, NumPy's 3 and 1; a product, a quotient and a sum half a one each: 10 units of 2^-23 and less.
RATIO = 2.0**-19


@dataclass(frozen=True)
class Case:
    """A case: a kind of logits, and how tokens are chosen.

    logits: "normal" (standard deviation 2), "rounded" (to fp16: many equals), "equal", "peaked", "masked" (all but
    two of each 100 are minus infinity).
    """

    name: str
    size: int
    logits: str
    sampling: Sampling


CASES = [
    Case("temperature", 32000, "rounded", Sampling(0.8)),
    Case("nucleus", 32000, "rounded", Sampling(0.8, top_p=0.95)),
    Case("nucleus-large", 128256, "rounded", Sampling(0.8, top_p=0.95)),
    Case("nucleus-peaked", 128256, "peaked", Sampling(0.8, top_p=0.95)),
    Case("top-k", 50257, "normal", Sampling(1.3, top_k=50)),
    Case("top-k-of-equals", 50257, "rounded", Sampling(5.0, top_k=777)),
    Case("top-k-all-but-one", 50257, "rounded", Sampling(5.0, top_k=50256)),
    Case("top-k-more", 7, "normal", Sampling(1.0, top_k=8)),
    Case("all-rules", 32000, "rounded", Sampling(1.5, top_k=4000, top_p=0.9, min_p=0.01)),
    Case("min-p", 50257, "normal", Sampling(2.0, min_p=0.2)),
    Case("min-p-1", 1000, "rounded", Sampling(2.0, min_p=1.0)),
    Case("equal", 32000, "equal", Sampling(1.0, top_k=1234)),
    Case("equal-nucleus", 32000, "equal", Sampling(1.0, top_p=0.3)),
    Case("equal-few", 10, "equal", Sampling(1.0, top_p=0.25)),  # of 2.5 tokens: three
    Case("equal-one", 2049, "equal", Sampling(1.0, top_k=1)),
    Case("masked", 50257, "masked", Sampling(1.0, top_k=2000, top_p=0.99)),
    Case("tiny-temperature", 32000, "normal", Sampling(1e-6, top_p=0.9)),
    Case("least-temperature", 1025, "rounded", Sampling(1e-300)),
    Case("tiny-nucleus", 32000, "normal", Sampling(1.0, top_p=1e-6)),
    Case("nearly-all", 50257, "normal", Sampling(1.0, top_p=1 - 1e-6)),
    Case("few", 7, "normal", Sampling(1.0, top_k=3, top_p=0.8)),
    Case("one", 1, "normal", Sampling(1.0, top_p=0.5)),
]


def rows_of(case: Case, count: int) -> tuple[np.ndarray, list[Sampling], list[int], np.ndarray]:
    """Return logits, sampling, choices and positions of the rows.

    (logits [count, size] float32, sampling of each row, its choice, its position): seeds of 64 bits.
    """
    random = np.random.default_rng(case.size + count)
    shape = (count, case.size)
    logits = 2 * random.standard_normal(shape)
    if case.logits == "rounded":
        logits = logits.astype(np.float16)
    elif case.logits == "equal":
        logits[:] = 1.5
    elif case.logits == "peaked":
        logits = (3 * random.standard_exponential(shape) - 12).astype(np.float16)
    elif case.logits == "masked":
        logits[:, random.permutation(case.size)[: case.size * 98 // 100]] = -np.inf
    terms = {name: getattr(case.sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    samplings = [Sampling(**terms, seed=int(seed)) for seed in random.integers(0, 2**64, count, np.uint64)]
    return logits.astype(np.float32), samplings, [row % 3 for row in range(count)], 1 + 317 * np.arange(count)


def noise_of(seed: int, choice: int, position: int, size: int) -> np.ndarray:
    """Return the noise of all tokens of one draw."""
    return exponential_noise([Draw(seed, choice, position, size)])[0]


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the unnormalized probabilities of all tokens; 0 for those that are filtered out."""
    ids, weights = candidates(logits, sampling)
    whole = np.zeros(len(logits), np.float32)
    whole[slice(None) if ids is None else ids] = weights
    return whole


def record(samplings: list[Sampling], choices: list[int]) -> np.ndarray:
    """Return what the device holds of the slots, [count] of dtype SAMPLING."""
    return np.array([parameters(sampling, choice) for sampling, choice in zip(samplings, choices)], SAMPLING)


def check_draws(
    found: np.ndarray, logits: np.ndarray, samplings: list[Sampling], choices: list[int], positions: np.ndarray
) -> None:
    """Each token is the definition's, or one that the last bits chose instead.

    Another token is right where its ratio is within RATIO of the best, or where it, or the definition's, is at the edge
    of what top-p keeps. The first comes once in 2^19 draws or so; the second where a token as likely as the error of
    the mass (2^-20) wins, or one in that many draws. So more than one in a case of up to some thousands is a fault.
    """
    others = 0
    for token, row, sampling, choice, position in zip(found.tolist(), logits, samplings, choices, positions.tolist()):
        expected = Sampler(sampling, choice=choice)(row, position).token
        if token == expected:
            continue
        others += 1
        weights = probabilities(row, sampling)
        ratios = weights / noise_of(sampling.seed, choice, position, len(row))
        least = weights[weights > 0].min()
        whole = probabilities(row, Sampling(sampling.temperature))
        at_edge = [abs(float(whole[item]) / float(least) - 1) < 1e-5 for item in (token, expected)]
        near = ratios[token] >= ratios[expected] * (1 - RATIO)
        assert near or (sampling.top_p < 1 and any(at_edge)), (
            f"{token}, expected {expected}: {ratios[token]}, {sampling}"
        )
    assert others <= 1, f"{others} of {len(found)} tokens are others"
