"""The verdict: results of checks in, one word or one sentence out.

One word for a target, one sentence for all targets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lockstep.artifacts.reports import FAIL, PASS

NOT_RUN = "not run"


def verdict(results: Iterable[str]) -> str:
    """Return FAIL where one has failed, else NOT_RUN where one has not, else PASS."""
    found = set(results)
    return FAIL if FAIL in found else NOT_RUN if NOT_RUN in found else PASS


def sentence(verdicts: Iterable[str]) -> str:
    """Say how many targets pass, fail and have not run.

    verdicts: one of each target.
    """
    count = Counter(verdicts)
    total = count.total()
    if count[PASS] == total:
        return "The only target passes." if total == 1 else f"All {total} targets pass."
    if count[NOT_RUN] == total:
        return "No target has been checked yet."
    one = lambda number, single, several: f"{number} {single if number == 1 else several}"
    parts = [
        one(count[FAIL], "fails", "fail") if count[FAIL] else "",
        one(count[NOT_RUN], "has not run", "have not run") if count[NOT_RUN] else "",
        one(count[PASS], "passes", "pass") if count[PASS] else "",
    ]
    parts = [part for part in parts if part]
    listed = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    return f"Of {total} target{'s' * (total != 1)}, {listed}."
