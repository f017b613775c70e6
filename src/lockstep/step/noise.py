"""The exponential noise of draws: seed, choice, position and tokens in, float32 numbers above 0 out.

Philox4x64-10 (Salmon et al. 2011) with key (seed, choice) and counter (block, position, 0, 0) gives 4 words of 64 bits
per block. Token t uses 32 bits of block t // 8 + 1, word t % 8 // 2, low half first. The noise is -log(1 - v), with the
bits as v in (0, 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_MULTIPLIERS = np.array([[0xCA5A826395121157], [0xD2E7470EE14C6C93]], np.uint64)
_WEYL = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
# NumPy's generator computes all tokens of a vocabulary in the time that `_philox` takes for one in so many of them.
_SPARSE = 16


class Draw(NamedTuple):
    """One draw. size: of the vocabulary. token_ids: [num_candidates] int64; None for the whole vocabulary."""

    seed: int
    choice: int
    position: int
    size: int
    token_ids: np.ndarray | None = None

    @property
    def is_sparse(self) -> bool:
        return self.token_ids is not None and len(self.token_ids) * _SPARSE < self.size


def exponential_noise(draws: Sequence[Draw]) -> list[np.ndarray]:
    """Return the noise of each draw's tokens, float32 [num_candidates], in their order."""
    # All sparse draws of a step in one call.
    sparse_noise = iter(_noise_of_tokens([draw for draw in draws if draw.is_sparse]))
    noise = []
    for draw in draws:
        if draw.is_sparse:
            noise.append(next(sparse_noise))
        else:
            noise.append(_noise_of_all(draw))
    return noise


def _noise_of_all(draw: Draw) -> np.ndarray:
    """Return the noise of a draw by NumPy's generator, which computes that of all tokens of the vocabulary."""
    key = np.array([draw.seed, draw.choice], np.uint64)
    counter = np.array([0, draw.position, 0, 0], np.uint64)
    bits = np.random.Philox(key=key, counter=counter).random_raw(-(-draw.size // 2))
    halves = bits.astype("<u8", copy=False).view("<u4")[: draw.size]
    if draw.token_ids is not None:
        halves = halves[draw.token_ids]
    return _noise(halves)


def _noise_of_tokens(draws: Sequence[Draw]) -> list[np.ndarray]:
    """Return the noise of draws by `_philox`, which computes that of the draws' own tokens alone."""
    if not draws:
        return []
    ids_of_draws = [draw.token_ids for draw in draws if draw.token_ids is not None]
    counts = [len(ids) for ids in ids_of_draws]
    # The tokens of all draws in one array, each with the seed, choice and position of its draw.
    tokens = np.concatenate(ids_of_draws).astype(np.uint64)
    keys = np.array([[draw.seed, draw.choice, draw.position] for draw in draws], np.uint64)
    seeds, choices, positions = keys.repeat(counts, axis=0).T
    # A block has 4 words of 64 bits, for 8 tokens: see the module's docstring.
    blocks = _philox(tokens // 8 + 1, positions, seeds, choices)
    word_in_block = (tokens % 8 // 2).astype(np.int64)
    words = blocks[word_in_block, np.arange(len(tokens))]
    is_high_half = tokens % 2 == 1
    halves = np.where(is_high_half, words >> _32, words & _LOW).astype(np.uint32)
    return np.split(_noise(halves), np.cumsum(counts)[:-1])


def _philox(blocks: np.ndarray, positions: np.ndarray, seeds: np.ndarray, choices: np.ndarray) -> np.ndarray:
    """Return the words [4, num_blocks] uint64 of blocks; all arguments: [num_blocks] uint64."""
    even = np.stack([blocks, np.zeros_like(blocks)])  # words 0 and 2
    odd = np.stack([positions, np.zeros_like(positions)])  # words 1 and 3
    key = np.stack([seeds, choices])
    multiplier_low = _MULTIPLIERS & _LOW
    multiplier_high = _MULTIPLIERS >> _32
    for _ in range(10):
        factor = even[::-1]
        factor_low = factor & _LOW
        factor_high = factor >> _32
        middle = factor_high * multiplier_low + (factor_low * multiplier_low >> _32)
        carried = factor_low * multiplier_high + (middle & _LOW)
        high = factor_high * multiplier_high + (middle >> _32) + (carried >> _32)
        even = high ^ odd ^ key
        odd = factor * _MULTIPLIERS
        key = key + _WEYL
    return np.stack([even[0], odd[0], even[1], odd[1]])


def _noise(bits: np.ndarray) -> np.ndarray:
    v = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    with np.errstate(divide="ignore"):  # v may round to 1: infinite noise, which never wins
        return -np.log1p(-v)
