"""Rows of logits for the kernel that chooses tokens.

On them it is held against the host's definition: on a GPU, and compiled for the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.step.logits_pipeline import Masks, Row, Sampler, candidates, choose
from lockstep.step.noise import Draw, exponential_noise
from lockstep.step.sampling import Logprobs, Sampled, Sampling
from lockstep_gpu.logits_tables import PARAMETERS as SAMPLING
from lockstep_gpu.logits_tables import parameters

__all__ = [
    "CASES",
    "SAMPLING",
    "Case",
    "ProcessedMix",
    "ProcessedMix",
    "check_draws",
    "logits_of_ranks",
    "noise_of",
    "probabilities",
    "record",
    "rows_of",
]

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


def logits_of_ranks(ranks: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return logits [9, ranks * columns], float32, with ties, NaN and infinities, and the slots of the rows."""
    logits = np.random.default_rng(ranks).uniform(-5, 5, (9, ranks * columns)).astype(np.float32)
    logits[0, [3, columns + 1]] = 9  # of two ranks
    logits[1, [-1, -3]] = 9  # of one
    logits[2] = -3
    logits[3, -2] = np.nan
    logits[4, 1] = np.inf
    logits[5] = -np.inf
    logits[6, columns:] = -np.inf
    return logits, np.array([8, 0, 1, 2, 3, 4, 5, -1, 6], np.int32)


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
    full = np.zeros(len(logits), np.float32)
    full[slice(None) if ids is None else ids] = weights
    return full


def record(samplings: list[Sampling], choices: list[int]) -> np.ndarray:
    """Return what the device holds of the slots, [count] of dtype SAMPLING."""
    pairs = zip(samplings, choices)
    return np.array([parameters(Sampler(sampling, choice=choice)) for sampling, choice in pairs], SAMPLING)


def check_draws(
    tokens: np.ndarray, logits: np.ndarray, samplings: list[Sampling], choices: list[int], positions: np.ndarray
) -> None:
    """Each token is the definition's, or one that the last bits chose instead.

    Another token is right where its ratio is within RATIO of the best, or where it, or the definition's, is at the edge
    of what top-p keeps. The first comes once in 2^19 draws or so; the second where a token as likely as the error of
    the mass (2^-20) wins, or one in that many draws. So more than one in a case of up to some thousands is a fault.
    """
    num_other = 0
    for token, row, sampling, choice, position in zip(tokens.tolist(), logits, samplings, choices, positions.tolist()):
        expected = Sampler(sampling, choice=choice)(row, position).token
        if token == expected:
            continue
        num_other += 1
        weights = probabilities(row, sampling)
        ratios = weights / noise_of(sampling.seed, choice, position, len(row))
        smallest = weights[weights > 0].min()
        unfiltered = probabilities(row, Sampling(sampling.temperature))
        at_edge = [abs(float(unfiltered[item]) / float(smallest) - 1) < 1e-5 for item in (token, expected)]
        near = ratios[token] >= ratios[expected] * (1 - RATIO)
        assert near or (sampling.top_p < 1 and any(at_edge)), (
            f"{token}, expected {expected}: {ratios[token]}, {sampling}"
        )
    assert num_other <= 1, f"{num_other} of {len(tokens)} tokens are others"


@dataclass(frozen=True)
class ProcessedStep:
    """One step of a `ProcessedMix`, by row: what the kernel is given, and what the host finds.

    masks: None for a row whose choice masks nothing. inputs: the tokens at `positions` - 1.
    """

    logits: np.ndarray
    positions: np.ndarray
    inputs: np.ndarray
    masks: list[Masks | None]
    processed: np.ndarray
    sampled: list[Sampled]

    def check(self, tokens: np.ndarray, all_logprobs: list[Logprobs]) -> None:
        """Tokens are the host's; log-probabilities within the last bits of expf, and the same likeliest tokens."""
        assert tokens.tolist() == [sampled.token for sampled in self.sampled]
        for sampled, logprobs in zip(self.sampled, all_logprobs):
            if sampled.logprobs is not None:
                assert [token for token, _ in logprobs.top] == [token for token, _ in sampled.logprobs.top]
                for actual, expected in zip(logprobs.top, sampled.logprobs.top):
                    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)
                np.testing.assert_allclose(logprobs.chosen, sampled.logprobs.chosen, rtol=1e-6, atol=1e-6)


class ProcessedMix:
    """Choices of all parameters, each in half of them, that go on from a step to the next."""

    def __init__(self, count: int, size: int):
        self._random = np.random.default_rng(count + size)
        self._size = size
        self.samplers = []
        self._answers = []
        for number in range(count):
            prompt = self._random.integers(0, size, self._random.integers(1, 40))
            length = int(self._random.integers(1, len(prompt) + 1))
            self.samplers.append(Sampler(self._sampling(), prompt, frozenset([3, 5]), number % 3, length))
            self._answers.append(prompt.tolist())

    def _sampling(self) -> Sampling:
        random = self._random
        tokens = random.integers(0, self._size, 5).tolist()
        fields: dict[str, Any] = {
            "temperature": float(random.choice([0.5, 1.0])),
            "top_k": int(random.integers(1, 100)),
            "top_p": float(random.uniform(0.3, 1)),
            "min_p": float(random.choice([0.01, 0.2])),
            "repetition_penalty": float(random.uniform(0.5, 2)),
            "presence_penalty": float(random.uniform(-2, 2)),
            "frequency_penalty": float(random.uniform(-2, 2)),
            "logit_bias": {token: float(random.normal(0, 5)) for token in tokens},
            "bad_words": ((tokens[0],), (tokens[1], tokens[2])),
            "min_tokens": int(random.integers(0, 8)),
            "logprobs": int(random.integers(0, 21)),
        }
        return Sampling(
            seed=int(random.integers(1 << 62)), **{k: v for k, v in fields.items() if random.random() < 0.5}
        )

    def records(self) -> np.ndarray:
        """Return what the device holds of the slots, row i of slot i."""
        return np.array([parameters(sampler) for sampler in self.samplers], SAMPLING)

    def step(self) -> ProcessedStep:
        """Choose the next token of each row. One of five has a grammar; all tokens of the last are forbidden."""
        random = self._random
        count = len(self.samplers)
        logits = (random.standard_normal((count, self._size)) * 3).astype(np.float16).astype(np.float32)
        masks: list[Masks | None] = []
        rows = []
        processed = logits.copy()
        for number, (sampler, answer) in enumerate(zip(self.samplers, self._answers)):
            allowed = random.random(self._size) < 0.3 if number % 5 == 4 else None
            changes = sampler.sampling.changes_logits
            forbidden = np.arange(self._size) if number == count - 1 else random.integers(0, self._size, 7)
            forbidden = forbidden if changes else forbidden[:0]
            masks.append(sampler.masks(self._size, allowed, forbidden) if changes or allowed is not None else None)
            rows.append(Row(sampler, logits[number], len(answer), allowed, forbidden))
            processed[number] = sampler.process(logits[number], allowed, forbidden)
        positions = np.array([len(answer) for answer in self._answers])
        inputs = np.array([answer[-1] for answer in self._answers])
        sampled = choose(rows)
        for choice, answer in zip(sampled, self._answers):
            answer.append(choice.token)
        return ProcessedStep(logits, positions, inputs, masks, processed, sampled)
