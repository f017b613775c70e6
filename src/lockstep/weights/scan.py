"""Scan floating-point numbers by their bits: whether all are finite, and the largest. No torch, one pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.artifacts.dtypes import DTYPE_BITS, INFINITY_BITS

# Unsigned type of the same width, mask of all bits but the sign, and the first bit pattern that is not finite.
_LAYOUT = {
    dtype: (np.dtype(f"u{DTYPE_BITS[dtype] // 8}").type, (1 << DTYPE_BITS[dtype] - 1) - 1, infinity)
    for dtype, infinity in INFINITY_BITS.items()
}


@dataclass(frozen=True)
class NonFinite:
    """The number of NaNs and infinities in an array. first: flat index of the first of them."""

    first: int
    nans: int
    infinities: int


def largest_bits(dtype: str, raw: np.ndarray) -> int:
    """Return the bits of the largest magnitude in `raw`; 0 when empty.

    raw: uint8, 1-D, the bytes of `dtype` numbers. Without their sign, IEEE numbers order as their bits do, with
    infinity above all finite numbers and NaN above infinity.
    """
    unsigned, mask, _ = _LAYOUT[dtype]
    bits = raw.view(unsigned)
    return int((bits & unsigned(mask)).max()) if bits.size else 0


def is_finite(dtype: str, bits: int) -> bool:
    """Return whether a magnitude, given as its bits, is a finite number."""
    return bits < _LAYOUT[dtype][2]


def from_bits(dtype: str, bits: int, number: np.dtype) -> np.ndarray:
    """Return the magnitude as an array of one `number`, the NumPy dtype of `dtype`."""
    return np.array([bits], _LAYOUT[dtype][0]).view(number)


def count_non_finite(dtype: str, raw: np.ndarray) -> NonFinite | None:
    """Count the numbers in `raw` that are not finite; None when all are."""
    unsigned, mask, infinity = _LAYOUT[dtype]
    bits = raw.view(unsigned) & unsigned(mask)
    positions = np.flatnonzero(bits >= unsigned(infinity))
    if not positions.size:
        return None
    infinities = int((bits[positions] == unsigned(infinity)).sum())
    return NonFinite(int(positions[0]), int(positions.size) - infinities, infinities)
