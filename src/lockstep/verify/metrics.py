"""How a check ends. With a report where it passes, with a failing report and one line where it does not."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

from lockstep.artifacts.reports import FAIL, PASS, Report
from lockstep.errors import CheckError
from lockstep.manifests.manifest_files import failed_path


def largest(errors: list[float | None]) -> float | None:
    """Return the largest of some errors; None (not a finite number) beats all."""
    finite = [error for error in errors if error is not None]
    return max(finite, default=0.0) if len(finite) == len(errors) else None


def finite(error: float | None) -> float | None:
    """Return the error as reports have it: None where it is not finite."""
    return error if error is not None and math.isfinite(error) else None


def off(error: float | None, bound: float) -> str:
    """Say what is wrong with logits that are off by more than `bound`."""
    if error is None:
        return "expected finite logits, found NaN or infinity"
    return f"expected a logit error of at most {bound:.3g}, found {error:.3g}"


def finish(out: str | os.PathLike, report: Report, failure: str | None) -> Path:
    """Write a check's report to `out` where `failure` is None, and give `out`.

    Otherwise `out` is not touched, the report goes to `failed_path(out)`, and CheckError says `failure` and where the
    report lies: a result that exists is always one that passed.
    """
    out = Path(out)
    if failure is None:
        replace(report, result=PASS).save(out)
        failed_path(out).unlink(missing_ok=True)
        return out
    replace(report, result=FAIL, failure=failure).save(failed_path(out))
    raise CheckError(f"{failure}; details in {failed_path(out)}")
