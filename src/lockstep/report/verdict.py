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
    return next((result for result in (FAIL, NOT_RUN) if result in found), PASS)


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
    words = {FAIL: ("fails", "fail"), NOT_RUN: ("has not run", "have not run"), PASS: ("passes", "pass")}
    parts = [
        f"{count[result]} {single if count[result] == 1 else several}"
        for result, (single, several) in words.items()
        if count[result]
    ]
    listed = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    return f"Of {total} target{'s' * (total != 1)}, {listed}."
