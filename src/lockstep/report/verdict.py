"""The verdict: results of checks in, one word for a target, or one sentence for all targets, out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from lockstep.artifacts.reports import FAIL, PASS
from lockstep.artifacts.summary import Summary, SummaryRow
from lockstep.targets import Target

NOT_RUN = "not run"
_WORDS = {FAIL: ("fails", "fail"), NOT_RUN: ("has not run", "have not run")}


def verdict(results: Iterable[str]) -> str:
    """Return FAIL where one has failed, else NOT_RUN where one has not, else PASS."""
    found = set(results)
    return next((result for result in (FAIL, NOT_RUN) if result in found), PASS)


def why_not_here(summary: Summary, row: SummaryRow) -> str | None:
    """Return what this machine lacks for a target that has not run; None where it could run, or failed."""
    if row.verdict != NOT_RUN:
        return None
    return summary.not_run.get(f"{row.precision}/{row.backend}") or summary.not_run.get(row.backend)


def overall(summary: Summary) -> str:
    """Return the verdict on all targets that can run here; NOT_RUN where none can."""
    verdicts = [row.verdict for row in summary.targets if not why_not_here(summary, row)]
    return verdict(verdicts) if verdicts else NOT_RUN


def headline(summary: Summary) -> str:
    """Return the verdict on all targets in one sentence.

    Such as "10 of 10 targets that can run here pass; 8 need an NVIDIA GPU."
    """
    here = Counter(row.verdict for row in summary.targets if not why_not_here(summary, row))
    needs = Counter(_need(reason) for row in summary.targets if (reason := why_not_here(summary, row)))
    passed = here[PASS]
    total = here.total()
    which = f"target{'s' * (total != 1)}{' that can run here' * bool(needs)}"
    others = [f"{here[result]} {words[here[result] != 1]}" for result, words in _WORDS.items() if here[result]]
    if not total:
        said = "No target can run here"
    elif here[NOT_RUN] == total:
        said = f"None of {total} {which} has been checked yet"
    elif passed == total and not needs:
        said = "The only target passes" if total == 1 else f"All {total} targets pass"
    else:
        said = ", ".join([f"{passed} of {total} {which} {'passes' if passed == 1 else 'pass'}", *others])
    missing = ", ".join(f"{number} {what[number != 1]}" for what, number in sorted(needs.items()))
    return f"{'; '.join(filter(None, [said, missing]))}."


def _need(reason: str) -> tuple[str, str]:
    """Return what one target, and what several, need.

    It is WHAT of "needs WHAT of which kind, found what", as backends say it; the whole of another reason.
    """
    found = re.match(r"needs (.+?)(?: of |, found | \()", reason)
    if not found:
        return f"cannot: {reason}", f"cannot: {reason}"
    what = found[1].replace("an ", "another ", 1) if ", found one of" in reason else found[1]
    return f"needs {what}", f"need {what}"


def reasons(rows: Iterable[SummaryRow]) -> list[tuple[str, str, str]]:
    """Return why targets do not pass, failures first: the verdict, the targets of a reason in words, the reason."""
    grouped: dict[tuple[str, str], list[Target]] = {}
    for row in rows:
        if row.reason:
            grouped.setdefault((row.verdict, row.reason), []).append(row.target)
    return sorted((result, _named(targets), reason) for (result, reason), targets in grouped.items())


def _named(targets: Sequence[Target]) -> str:
    """Return the only target's name, or how many there are of which precisions and backends."""
    if len(targets) == 1:
        return str(targets[0])
    names = zip(*((target.precision, target.backend) for target in targets))
    precisions, backends = (", ".join(dict.fromkeys(name)) for name in names)
    return f"{len(targets)} targets ({precisions} on {backends})"
