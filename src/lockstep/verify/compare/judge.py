"""The error of an engine's output: expected and found arrays in, an error that is small enough or not out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lockstep.artifacts.reports import OutputError
from lockstep.onnx_tools.overflow import LARGEST


class NotFiniteError(Exception):
    """What is expected has NaN or infinity: no engine is at fault."""


@dataclass(frozen=True)
class Error:
    """The error of one output of an engine; true where it is small enough.

    of.magnitude: rms of the row of what is expected that is worst. of.max_abs_error: largest |found - expected|.
    of.relative_error: largest |found - expected| / max(rms of its row, |expected|). All None but the magnitude where
    the engine gives NaN or infinity. peak: the largest magnitude of what is expected.
    """

    of: OutputError
    tolerance: float
    peak: float

    def __bool__(self) -> bool:
        return self.of.relative_error is not None and self.of.relative_error <= self.tolerance

    def __str__(self) -> str:
        if self.of.relative_error is None:
            beyond = f"; the graph gives up to {self.peak:,.0f}, and float16 ends at {LARGEST:.0f}"
            return "expected finite numbers, found NaN or infinity" + (beyond if self.peak > LARGEST else "")
        largest = f"largest absolute error {self.of.max_abs_error:.3g}, cosine {self.of.cosine:.6f}"
        return (
            f"expected an error of at most {self.tolerance:g} of the output's magnitude "
            f"({self.of.magnitude:.3g}), found {self.of.relative_error:.3g} ({largest})"
        )


def judge(expected: np.ndarray, found: np.ndarray, tolerance: float, beyond: np.ndarray | None = None) -> Error:
    """Return the error of an output, in units of the rms of each row.

    Then nothing is let through because its numbers are small, or because another row's are large. beyond: rows whose
    inputs go to the end of the precision, where the graph itself may overflow; such rows say nothing. Raises
    NotFiniteError where the graph gives NaN or infinity elsewhere.
    """
    count = len(expected)
    exact, other = (array.astype(np.float64).reshape(count, math.prod(array.shape[1:])) for array in (expected, found))
    finite = np.isfinite(exact).all(1)
    if not finite.all():
        if beyond is None or not beyond[~finite].all():
            raise NotFiniteError
        exact, other = exact[finite], other[finite]
    if not exact.size:
        return Error(OutputError(0.0, 0.0, 0.0, 1.0), tolerance, 0.0)
    peak = float(np.abs(exact).max())
    rms = np.sqrt(np.mean(exact * exact, axis=1, keepdims=True))
    unit = np.where(rms > 0, rms, 1.0)
    if not np.isfinite(other).all():
        row = int(np.argmin(np.isfinite(other).all(1)))
        return Error(OutputError(float(rms[row, 0]), None, None, None), tolerance, peak)
    difference = np.abs(exact - other)
    relative = difference / np.maximum(unit, np.abs(exact))
    worst = int(relative.max(1).argmax())
    a, b = exact / unit, other / unit
    norms = float(np.sqrt((a * a).sum() * (b * b).sum()))  # not by BLAS, whose threads cost more than these sums
    cosine = float((a * b).sum()) / norms if norms else float(not difference.any())
    return Error(
        OutputError(float(rms[worst, 0]), float(difference.max()), float(relative.max()), min(1.0, cosine)),
        tolerance,
        peak,
    )
