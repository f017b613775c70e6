"""Errors as reports have them, and the end of a check: a report, or a failing report and an error."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.artifacts.reports import FAIL, PASS, Report
from lockstep.errors import CheckError
from lockstep.manifests.manifest_files import failed_path


def largest(errors: Sequence[float | None]) -> float | None:
    """Return the largest of some errors; None, which is not finite, if it is among them."""
    if None in errors:
        return None
    return max(map(or_infinity, errors), default=0.0)


def smallest(cosines: Sequence[float | None]) -> float | None:
    """Return the smallest of some cosines; None, which is not finite, if it is among them."""
    if None in cosines:
        return None
    return min(cosine for cosine in cosines if cosine is not None)


def or_infinity(error: float | None) -> float:
    """Return an error to compare by: infinity for None, which reports have for errors that are not finite."""
    if error is None:
        return math.inf
    return error


def finite(error: float | None) -> float | None:
    """Return the error as reports have it: None where it is not finite."""
    if error is None or not math.isfinite(error):
        return None
    return error


def describe_error(error: float | None, bound: float) -> str:
    if error is None:
        return "expected finite logits, found NaN or infinity"
    return f"expected a logit error of at most {bound:.3g}, found {error:.3g}"


def finish(out: str | os.PathLike, report: Report, failure: str | None) -> Path:
    """Write a check's report to `out` where `failure` is None, and return `out`.

    Otherwise `out` is not touched, the report goes to `failed_path(out)`, and CheckError has `failure` and that path: a
    result that exists is always one that passed.
    """
    out = Path(out)
    if failure is None:
        replace(report, result=PASS).save(out)
        failed_path(out).unlink(missing_ok=True)
        return out
    replace(report, result=FAIL, failure=failure).save(failed_path(out))
    raise CheckError(f"{failure}; details in {failed_path(out)}")
