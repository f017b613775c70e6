"""How far two arrays are apart, and how a check ends.

A check ends with a report where it passes, with a failing report and one line where it does not.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lockstep.artifacts.manifest_files import failed_path
from lockstep.artifacts.reports import FAIL, PASS, Report
from lockstep.errors import CheckError


@dataclass(frozen=True)
class Difference:
    """How far an array is from what is expected.

    max_abs_error: largest absolute difference; cosine: of the angle between the two, flattened. Both None where the
    array found holds NaN or infinity, which no tolerance allows. relative_error: largest |found - expected| / max(1,
    rms, |expected|).
    """

    max_abs_error: float | None
    relative_error: float | None
    cosine: float | None

    def within(self, tolerance: float) -> bool:
        """Return whether the plain absolute error is at most `tolerance`."""
        return self.max_abs_error is not None and self.max_abs_error <= tolerance

    def within_scaled(self, tolerance: float) -> bool:
        """Return whether the error is at most `tolerance`, scaled.

        Scaled by max(1, rms of the array, |value|). Floating point carries digits, not decimals: a value of 1000 in
        fp16 is itself known to 0.25 only, and a product's error grows with the size of what is accumulated. Up to
        values of order one this is the absolute error.
        """
        return self.relative_error is not None and self.relative_error <= tolerance


def difference(expected: np.ndarray, found: np.ndarray) -> Difference:
    """Compare two arrays of one shape, in float64.

    Raises ValueError for another shape: nothing is broadcast.
    """
    if expected.shape != found.shape:
        raise ValueError(f"expected shape {expected.shape}, found {found.shape}")
    if not expected.size:
        return Difference(0.0, 0.0, 1.0)
    a, b = np.asarray(expected, np.float64).ravel(), np.asarray(found, np.float64).ravel()
    if not np.isfinite(b).all():
        return Difference(None, None, None)
    error = np.abs(a - b)
    scale = np.maximum(max(1.0, float(np.sqrt(np.mean(a * a)))), np.abs(a))
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    cosine = float(a @ b) / norms if norms else float(not error.any())
    return Difference(float(error.max()), float((error / scale).max()), min(1.0, cosine))


def largest(errors: list[float | None]) -> float | None:
    """Return the largest of some errors; 0 of an empty list.

    None (not a finite number) beats all.
    """
    finite = [error for error in errors if error is not None]
    return max(finite, default=0.0) if len(finite) == len(errors) else None


def finite(error: float | None) -> float | None:
    """Return the error as reports have it: None where it is not finite."""
    return error if error is not None and math.isfinite(error) else None


def finish(out: str | os.PathLike, report: Report, failure: str | None) -> Path:
    """Write a check's report to `out` where `failure` is None, and give `out`.

    Otherwise `out` is left alone, the report goes to `failed_path(out)`, and CheckError says `failure` and where the
    report lies: a result that exists is always one that passed.
    """
    out = Path(out)
    if failure is None:
        replace(report, result=PASS).save(out)
        failed_path(out).unlink(missing_ok=True)
        return out
    replace(report, result=FAIL, failure=failure).save(failed_path(out))
    raise CheckError(f"{failure}; details in {failed_path(out)}")
