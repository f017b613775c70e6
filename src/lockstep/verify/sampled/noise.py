"""The noise that tokens are drawn with, as docs/scheduling.md defines it.

Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") is written out here, so that neither
NumPy's generator nor a device's is asked about itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_KEY_STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_ROUNDS = 10
_WORD = 1 << 64
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_TOKENS_OF_BLOCK = 8  # 4 words of 64 bits


def exponential_noise(seed: int, choice: int, positions: Sequence[int], count: int) -> np.ndarray:
    """Return the noise of tokens 0 to `count`-1 at each position, [len(positions), count] float64 above 0."""
    num_blocks = -(-count // _TOKENS_OF_BLOCK)
    block_numbers = np.tile(np.arange(1, num_blocks + 1, dtype=np.uint64), len(positions))
    block_positions = np.repeat(np.array(positions, np.uint64), num_blocks)
    zeros = np.zeros_like(block_numbers)
    words = philox([block_numbers, block_positions, zeros, zeros], (seed, choice))
    halves = list(itertools.chain.from_iterable((word & _LOW, word >> _HALF) for word in words))
    bits = np.stack(halves, axis=1).reshape(len(positions), -1)[:, :count]
    uniform = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    with np.errstate(divide="ignore"):  # bits that round to 1: infinite noise, with which no token wins
        return -np.log1p(-uniform.astype(np.float64))


def philox(counter: list[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """Return the 4 words of each block. counter: 4 arrays uint64 [num_blocks], the lowest word first."""
    x0, x1, x2, x3 = counter
    for number in range(_ROUNDS):
        k0, k1 = (np.uint64((word + number * step) % _WORD) for word, step in zip(key, _KEY_STEPS))
        high0, low0 = _product(x0, _MULTIPLIERS[0])
        high1, low1 = _product(x2, _MULTIPLIERS[1])
        x0 = high1 ^ x1 ^ k0
        x1 = low1
        x2 = high0 ^ x3 ^ k1
        x3 = low0
    return [x0, x1, x2, x3]


def _product(x: np.ndarray, factor: int) -> tuple[np.ndarray, np.ndarray]:
    factor_low = np.uint64(factor % (1 << 32))
    factor_high = np.uint64(factor >> 32)
    low = x & _LOW
    high = x >> _HALF
    middle = high * factor_low + (low * factor_low >> _HALF)
    other = low * factor_high + (middle & _LOW)
    return high * factor_high + (middle >> _HALF) + (other >> _HALF), x * np.uint64(factor)
