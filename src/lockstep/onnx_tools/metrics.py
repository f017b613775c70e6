"""How far two arrays are apart: expected and found in, their differences out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Of a rewritten graph beside the one it was made of, by the dtype of its numbers, relative to `peak`: the same products
# in another order or blocking. fp16 anywhere rounds weights, and the last bits of what fp32 makes of them.
REWRITE_TOLERANCE = {"float32": 1e-5, "float16": 4e-3}


@dataclass(frozen=True)
class Difference:
    """Errors of an array against what is expected.

    max_abs_error: largest absolute difference; cosine: of the angle between the two, flattened. Both None where the
    array found holds NaN or infinity, which no tolerance allows. relative_error: largest |found - expected| / max(1,
    rms, |expected|).
    """

    max_abs_error: float | None
    relative_error: float | None
    cosine: float | None

    def within(self, tolerance: float) -> bool:
        return self.max_abs_error is not None and self.max_abs_error <= tolerance

    def within_scaled(self, tolerance: float) -> bool:
        """Return whether the error is at most `tolerance` times `error_scale`.

        Floating point carries digits, not decimals: a value of 1000 in fp16 is itself known to 0.25 only, and a
        product's error grows with the size of what is accumulated. Up to values of order one this is the absolute
        error.
        """
        return self.relative_error is not None and self.relative_error <= tolerance


def difference(expected: np.ndarray, found: np.ndarray) -> Difference:
    """Compare two arrays of one shape, in float64. Raises ValueError for another shape: nothing is broadcast."""
    if expected.shape != found.shape:
        raise ValueError(f"expected shape {expected.shape}, found {found.shape}")
    if not expected.size:
        return Difference(0.0, 0.0, 1.0)
    a, b = np.asarray(expected, np.float64).ravel(), np.asarray(found, np.float64).ravel()
    if not np.isfinite(b).all():
        return Difference(None, None, None)
    error = np.abs(a - b)
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    cosine = float(a @ b) / norms if norms else float(not error.any())
    return Difference(float(error.max()), float((error / error_scale(a)).max()), min(1.0, cosine))


def error_scale(expected: np.ndarray) -> np.ndarray:
    """Return what the error of each float64 number is relative to: max(1, rms of the array, |value|)."""
    return np.maximum(max(1.0, float(np.sqrt(np.mean(expected * expected)))), np.abs(expected))


def max_abs_error(expected: np.ndarray, found: np.ndarray) -> float:
    """Return the largest |found - expected|; 0 of empty arrays.

    It is computed in the common dtype of the two, and infinity where a difference is NaN or infinite. Raises ValueError
    for another shape.
    """
    if expected.shape != found.shape:
        raise ValueError(f"expected shape {expected.shape}, found {found.shape}")
    with np.errstate(invalid="ignore", over="ignore"):
        largest = float(np.abs(expected - found).max(initial=0))
    return largest if np.isfinite(largest) else float("inf")


def peak(expected: np.ndarray) -> float:
    """Return max(1, largest magnitude), which a rewritten graph's error is relative to."""
    return max(1.0, float(np.abs(expected).max(initial=0)))
