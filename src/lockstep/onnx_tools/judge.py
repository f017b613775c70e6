"""The one judge of errors: expected and found arrays and a bound in; the errors, and what is wrong, out.

Rounding errors are draws of one distribution, whose size the weights and the inputs decide. So most bounds are made of
the noise of the same numbers (`within`), in two ways: the largest error, which shows one wrong number, may be
`Tolerances.noise` times the largest noise; the rms over all numbers, which varies much less from draw to draw and shows
what is a little wrong everywhere, may be a third as many times the rms of the noise (1.3 times is seen).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.artifacts.reports import ComparedEngine, TensorError
from lockstep.tolerances import Tolerances

# Where nothing is rounded but the result, it is still off by half of the last bit of fp16: at most 2^-11 of its size,
# rms a quarter of that.
_FLOOR = 2.0**-11
_FLOOR_RMS = 2.0**-13
_MOST = 0.9  # of the rows, which are held to their rms
RMS = 1 / 3  # of `Tolerances.noise`: see above
Number = Any  # a float, or an array of floats [rows]


@dataclass(frozen=True)
class Spread:
    """The size of an error: its largest value, and its rms; numbers, or [rows]. NaN or infinite where the error is."""

    largest: Number
    rms: Number

    def __or__(self, other: Spread) -> Spread:
        return Spread(np.maximum(self.largest, other.largest), np.maximum(self.rms, other.rms))

    def __mul__(self, factor: float) -> Spread:
        return Spread(self.largest * factor, self.rms * factor)


NOTHING = Spread(0.0, 0.0)


@dataclass(frozen=True)
class Bound:
    """What passes: the largest error, and the rms of all numbers.

    Where they are [rows] each row is held to its own, the rms of nine of ten rows: an activation that is nearest to
    another integer than it should be spoils a row, and no more. noise: that the bound is made of, for reports.
    """

    largest: Number
    rms: Number = math.inf
    noise: Spread = NOTHING


def within(tolerances: Tolerances, noise: Spread, units: tuple[float, float] | None = None) -> Bound:
    """Return the bound of what is off by noise in fp16: a number of the config's, else so many times the noise.

    units: of that noise, of the largest error and of the rms; by default those of the precision.
    """
    largest, rms = units or (tolerances.rounding, tolerances.rounding)
    cost = Spread(noise.largest * largest, noise.rms * rms)
    if tolerances.block is not None:
        return Bound(tolerances.block, noise=cost)
    floor = Spread(np.maximum(noise.largest, _FLOOR) * largest, np.maximum(noise.rms, _FLOOR_RMS) * rms)
    return Bound(tolerances.noise * floor.largest, RMS * tolerances.noise * floor.rms, cost)


def beside_noise(
    name: str, expected: np.ndarray, found: np.ndarray, noise: Spread, tolerances: Tolerances
) -> TensorError:
    """Return the errors of an output beside what passes of it: see `within`. Logits are held to a number absolutely."""
    if name == "logits" and tolerances.logits is not None:
        return measure(expected, found, Bound(tolerances.logits, noise=noise * tolerances.rounding), 1.0)
    return measure(expected, found, within(tolerances, noise))


def row_scale(expected: np.ndarray) -> np.ndarray:
    """Return what the error of each number of [rows, ...] is relative to, [rows, numbers]: max(|it|, rms of its row).

    Floating point carries digits, not decimals; and a row (a token) of small numbers is held to its own size, whatever
    stands in others. 1 in a row of zeros.
    """
    rows = rows_of(expected)
    rms = np.sqrt(np.mean(rows * rows, axis=1, keepdims=True))
    return np.maximum(np.abs(rows), np.where(rms > 0, rms, 1.0))


def peak(expected: np.ndarray) -> float:
    """Return max(1, largest magnitude), which a rewritten graph's error is relative to."""
    return max(1.0, float(np.abs(expected).max(initial=0)))


def max_abs_error(expected: np.ndarray, found: np.ndarray) -> float:
    """Return the largest |found - expected|; 0 of empty arrays, infinity where a difference is NaN or infinite.

    Raises ValueError for another shape: nothing is broadcast.
    """
    if expected.shape != found.shape:
        raise ValueError(f"expected shape {expected.shape}, found {found.shape}")
    with np.errstate(invalid="ignore", over="ignore"):
        largest = float(np.abs(expected - found).max(initial=0))
    return largest if np.isfinite(largest) else float("inf")


def relative_errors(expected: np.ndarray, found: np.ndarray, scale: Number | None = None) -> np.ndarray:
    """Return the error of each number, [rows, numbers], relative to `scale` (default: `row_scale`)."""
    exact = rows_of(expected)
    other = rows_of(found)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.abs(other - exact)
        return np.where(error == 0, 0.0, error / (row_scale(exact) if scale is None else scale))


def spread(expected: np.ndarray, found: np.ndarray) -> Spread:
    """Return the error of an array [rows, ...], each number relative to `row_scale`."""
    if not expected.size:
        return NOTHING
    relative = relative_errors(expected, found)
    with np.errstate(over="ignore"):
        return Spread(float(relative.max()), float(np.sqrt(np.mean(relative * relative))))


def measure(expected: np.ndarray, found: np.ndarray, bound: Bound, scale: Number | None = None) -> TensorError:
    """Return the errors of an array [rows, ...] beside what passes of it.

    scale: what they are relative to; by default `row_scale`. Errors are None where the array has NaN or infinity, which
    no bound allows. Raises ValueError for another shape.
    """
    exact = np.asarray(expected, np.float64)
    other = np.asarray(found, np.float64)
    largest = max_abs_error(exact, other)
    relative = relative_errors(exact, other, scale) if exact.size else np.zeros((1, 1))
    count = len(relative)
    bounds, rms_bounds, noise, rms_noise = (
        np.broadcast_to(number if exact.size else np.max(number, initial=0.0), count)
        for number in (bound.largest, bound.rms, bound.noise.largest, bound.noise.rms)
    )
    if not math.isfinite(largest):
        row = int(np.argmin(np.isfinite(relative).all(1)))
        missing = float(noise[row]), _rms(rms_noise), float(bounds[row]), _finite(_rms(rms_bounds))
        return TensorError(None, None, None, None, *missing)
    with np.errstate(divide="ignore", invalid="ignore"):
        row = int(np.argmax(np.nan_to_num(relative.max(1) / bounds)))  # the worst beside what passes of it
        shares = np.nan_to_num(np.sqrt(np.mean(relative * relative, axis=1)) / rms_bounds)
    rms_bound = _rms(rms_bounds)
    rms = _rms(relative)
    if math.isfinite(rms_bound) and np.ndim(bound.rms):
        rms = float(np.quantile(shares, _MOST)) * rms_bound
    errors = largest, _finite(float(relative.max(1)[row])), _finite(rms), cosine(exact, other)
    return TensorError(*errors, float(noise[row]), _rms(rms_noise), float(bounds[row]), _finite(rms_bound))


def cosine(expected: np.ndarray, found: np.ndarray) -> float:
    """Return the cosine of the angle between two arrays, flattened, each row in units of its rms."""
    if not expected.size:
        return 1.0
    rows = rows_of(expected)
    rms = np.sqrt(np.mean(rows * rows, axis=1, keepdims=True))
    unit = np.where(rms > 0, rms, 1.0)
    a = rows / unit
    b = rows_of(found) / unit
    norms = float(np.sqrt((a * a).sum() * (b * b).sum()))  # not by BLAS, whose threads cost more than these sums
    return min(1.0, float((a * b).sum()) / norms) if norms else float(np.array_equal(a, b))


def share(error: TensorError | ComparedEngine) -> float:
    """Return the largest error as a share of what passes; infinite where it is not finite."""
    if error.relative_error is None:
        return math.inf
    return error.relative_error / error.tolerance if error.relative_error else 0.0


def wrong(name: str, error: TensorError, of: str = "") -> str | None:
    """Say what is wrong with an output; None where its error passes. of: what errors are relative to, for the line."""
    if error.max_abs_error is None:
        return f"{name}: expected finite numbers, found NaN or infinity"
    largest, rms = (math.inf if number is None else number for number in (error.relative_error, error.rms_error))
    if largest > error.tolerance:
        more = f"largest absolute error {error.max_abs_error:.3g}, cosine {error.cosine:.6f}"
        return f"{name}: expected an error of at most {error.tolerance:.3g}{of}, found {largest:.3g} ({more})"
    if error.rms_tolerance is not None and rms > error.rms_tolerance:
        more = f"largest {largest:.3g}, cosine {error.cosine:.6f}"
        return f"{name}: expected an rms error of at most {error.rms_tolerance:.3g}{of}, found {rms:.3g} ({more})"
    return None


def rows_of(array: np.ndarray) -> np.ndarray:
    """Return an array [rows, ...] as [rows, numbers] in float64."""
    numbers = np.asarray(array, np.float64)
    return numbers.reshape(len(numbers), math.prod(numbers.shape[1:])) if numbers.ndim else numbers.reshape(1, 1)


def _rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(array * array)))


def _finite(number: float) -> float | None:
    """Return a number as reports have it: None where it is not finite."""
    return number if math.isfinite(number) else None
