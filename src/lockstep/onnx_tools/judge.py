"""The one judge of errors: expected and actual arrays and a bound in; the errors, and the first excess, out.

Rounding errors are draws of one distribution, whose size the weights and the inputs decide. So most bounds are
multiples of the noise of the same numbers (`within`). The largest error shows one wrong number; it may be
`Tolerances.noise` times the largest noise. The rms over all numbers varies much less from draw to draw, and shows small
errors everywhere; it may be a third as many times the rms of the noise (1.3 times is measured).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.artifacts.reports import ComparedEngine, TensorError
from lockstep.tolerances import ENOUGH, FEW_ROWS, FLOOR, FLOOR_RMS, RMS, ROWS_WITHIN_RMS, Tolerances

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

    Bounds may be [rows], one for each row; then the rms of nine of ten rows must pass: an activation that is rounded to
    another integer spoils one row only. noise: from which the bound is derived, for reports.
    """

    largest: Number
    rms: Number = math.inf
    noise: Spread = NOTHING


def within(tolerances: Tolerances, noise: Spread, units: tuple[float, float] | None = None) -> Bound:
    """Return the bound of an error whose cause is noise in fp16: a multiple of the noise.

    units: of that noise, of the largest error and of the rms; by default those of the precision.
    """
    largest, rms = units or (tolerances.rounding, tolerances.rounding)
    cost = Spread(noise.largest * largest, noise.rms * rms)
    floor = Spread(np.maximum(noise.largest, FLOOR) * largest, np.maximum(noise.rms, FLOOR_RMS) * rms)
    return Bound(tolerances.noise * floor.largest, RMS * tolerances.noise * floor.rms, cost)


def beside_noise(tolerances: Tolerances, noise: Spread, num_rows: int) -> Bound:
    """Return the bound of a graph's output, see `within`. The rms of few rows depends on single roundings."""
    bound = within(tolerances, noise)
    if num_rows < ENOUGH:
        return replace(bound, rms=FEW_ROWS * bound.rms)
    return bound


def row_scale(expected: np.ndarray) -> np.ndarray:
    """Return the scale of each number's error, [rows, numbers]: the larger of its magnitude and the rms of its row.

    Floating point has relative precision; and each row (a token) is judged by its own magnitude, however large others
    are. 1 in a row of zeros.
    """
    rows = rows_of(expected)
    return np.maximum(np.abs(rows), _unit(rows))


def peak(expected: np.ndarray) -> float:
    """Return max(1, largest magnitude), which a rewritten graph's error is relative to."""
    return max(1.0, float(np.abs(expected).max(initial=0)))


def max_abs_error(expected: np.ndarray, actual: np.ndarray) -> float:
    """Return the largest |actual - expected|; 0 of empty arrays, infinity where a difference is NaN or infinite.

    Raises ValueError for another shape: nothing is broadcast.
    """
    if expected.shape != actual.shape:
        raise ValueError(f"expected shape {expected.shape}, found {actual.shape}")
    with np.errstate(invalid="ignore", over="ignore"):
        largest = float(np.abs(expected - actual).max(initial=0))
    return largest if np.isfinite(largest) else math.inf


def relative_errors(expected: np.ndarray, actual: np.ndarray, scale: Number | None = None) -> np.ndarray:
    """Return the error of each number, [rows, numbers], relative to `scale` (default: `row_scale`)."""
    exact = rows_of(expected)
    other = rows_of(actual)
    if scale is None:
        scale = row_scale(exact)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.abs(other - exact)
        return np.where(error == 0, 0.0, error / scale)


def spread(expected: np.ndarray, actual: np.ndarray) -> Spread:
    """Return the error of an array [rows, ...], each number relative to `row_scale`."""
    if not expected.size:
        return NOTHING
    relative = relative_errors(expected, actual)
    with np.errstate(over="ignore"):
        return Spread(float(relative.max()), float(np.sqrt(np.mean(relative * relative))))


def measure(expected: np.ndarray, actual: np.ndarray, bound: Bound, scale: Number | None = None) -> TensorError:
    """Return the errors of an array [rows, ...] and their bounds.

    scale: errors are divided by it; by default `row_scale`. Errors are None where the array has NaN or infinity, which
    no bound allows. Raises ValueError for another shape.
    """
    exact = np.asarray(expected, np.float64)
    other = np.asarray(actual, np.float64)
    largest = max_abs_error(exact, other)
    relative = np.zeros((1, 1))
    if exact.size:
        relative = relative_errors(exact, other, scale)

    def per_row(numbers: Number) -> np.ndarray:
        if not exact.size:
            numbers = np.max(numbers, initial=0.0)
        return np.full(len(relative), numbers)

    bounds = per_row(bound.largest)
    rms_bounds = per_row(bound.rms)
    noise = per_row(bound.noise.largest)
    rms_noise = per_row(bound.noise.rms)
    if not math.isfinite(largest):
        row = int(np.argmin(np.isfinite(relative).all(1)))  # the first that is not finite
        limits = float(noise[row]), _rms(rms_noise), float(bounds[row]), _finite(_rms(rms_bounds))
        return TensorError(None, None, None, None, *limits)
    with np.errstate(divide="ignore", invalid="ignore"):
        row = int(np.argmax(np.nan_to_num(relative.max(1) / bounds)))  # the worst relative to its bound
        rms_bound = _rms(rms_bounds)
        rms = _rms(relative)
        if math.isfinite(rms_bound) and np.ndim(bound.rms):  # a bound for each row, of which some may fail
            shares = np.nan_to_num(_row_rms(relative)[:, 0] / rms_bounds)
            rms = float(np.quantile(shares, ROWS_WITHIN_RMS)) * rms_bound
    errors = largest, _finite(float(relative.max(1)[row])), _finite(rms), cosine(exact, other)
    return TensorError(*errors, float(noise[row]), _rms(rms_noise), float(bounds[row]), _finite(rms_bound))


def cosine(expected: np.ndarray, actual: np.ndarray) -> float:
    """Return the cosine of the angle between two arrays, flattened, each row in units of its rms."""
    if not expected.size:
        return 1.0
    rows = rows_of(expected)
    unit = _unit(rows)
    a = rows / unit
    b = rows_of(actual) / unit
    norms = float(np.sqrt((a * a).sum() * (b * b).sum()))  # not by BLAS, whose threads cost more than these sums
    if not norms:
        return float(np.array_equal(a, b))
    return min(1.0, float((a * b).sum()) / norms)


def share(error: TensorError | ComparedEngine) -> float:
    """Return the largest error as a share of its bound; infinite where it is not finite."""
    if error.relative_error is None:
        return math.inf
    if error.relative_error == 0:
        return 0.0
    return error.relative_error / error.tolerance


def wrong(name: str, error: TensorError, of: str = "") -> str | None:
    """Return the fault of an output; None if its error passes. of: what errors are relative to, for the message."""
    if error.max_abs_error is None:
        return f"{name}: expected finite numbers, found NaN or infinity"
    largest = _or_infinite(error.relative_error)
    rms = _or_infinite(error.rms_error)
    if largest > error.tolerance:
        details = f"largest absolute error {error.max_abs_error:.3g}, cosine {error.cosine:.6f}"
        return f"{name}: expected an error of at most {error.tolerance:.3g}{of}, found {largest:.3g} ({details})"
    if error.rms_tolerance is not None and rms > error.rms_tolerance:
        details = f"largest {largest:.3g}, cosine {error.cosine:.6f}"
        return f"{name}: expected an rms error of at most {error.rms_tolerance:.3g}{of}, found {rms:.3g} ({details})"
    return None


def rows_of(array: np.ndarray) -> np.ndarray:
    numbers = np.atleast_1d(np.asarray(array, np.float64))
    return numbers.reshape(len(numbers), math.prod(numbers.shape[1:]))


def _unit(rows: np.ndarray) -> np.ndarray:
    """Return the rms of each row, 1 of a row of zeros, [rows, 1]."""
    rms = _row_rms(rows)
    return np.where(rms > 0, rms, 1.0)


def _row_rms(rows: np.ndarray) -> np.ndarray:
    return np.sqrt((rows * rows).sum(axis=1, keepdims=True) / rows.shape[1])  # np.mean takes twice the time


def _rms(array: np.ndarray) -> float:
    return math.sqrt((array * array).sum() / array.size)


def _or_infinite(number: float | None) -> float:
    return math.inf if number is None else number


def _finite(number: float) -> float | None:
    """Return a number as reports have it: None where it is not finite."""
    return number if math.isfinite(number) else None
