"""The arithmetic of MXFP4: codes of 4 bits, a shared exponent for each group of 32.

A number is that of its code (e2m1), times two to the power of its group's byte less 127 (e8m0). Both are exact in
float32, and so is their product unless it overflows.
"""

from __future__ import annotations

from functools import cache

import numpy as np

_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
NO_NUMBER = 255  # as a shared exponent


@cache
def e2m1_pairs() -> np.ndarray:
    """Return the two numbers of each byte, float32 [256, 2], that of the low half first."""
    numbers = np.concatenate([_E2M1, -_E2M1])
    byte = np.arange(256)
    return np.stack([numbers[byte & 15], numbers[byte >> 4]], axis=-1)


@cache
def e8m0() -> np.ndarray:
    """Return the number of each shared exponent, float32 [256]."""
    return np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)


def mxfp4_numbers(codes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Return the numbers of codes, float32 [..., in_features].

    codes: uint8 [..., num_groups, 16]. exponents: uint8 [..., num_groups].
    """
    with np.errstate(over="ignore", invalid="ignore"):  # the reader rejects non-finite numbers
        groups = e2m1_pairs()[codes].reshape(*exponents.shape, -1) * e8m0()[exponents][..., None]
    return groups.reshape(*exponents.shape[:-1], -1)
