"""The verdict: results of checks in, one word for a target, or one sentence for all targets, out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from lockstep.artifacts.reports import FAIL, PASS
from lockstep.artifacts.summary import Summary, SummaryRow
from lockstep.targets import Target, is_quantized

NOT_RUN = "not run"
# By how much quantized weights may raise the perplexity to be advised; fp16 and bf16 raise it by a tenth of that.
_MAX_PERPLEXITY = 0.01
_WORDS = {FAIL: ("fails", "fail"), NOT_RUN: ("has not run", "have not run")}


def verdict(results: Iterable[str]) -> str:
    """Return FAIL if a check has failed, else NOT_RUN if one has not run, else PASS."""
    distinct = set(results)
    return next((result for result in (FAIL, NOT_RUN) if result in distinct), PASS)


def why_not_here(summary: Summary, row: SummaryRow) -> str | None:
    """Return why a target that has not run cannot run here; None if it can, or failed."""
    if row.verdict != NOT_RUN:
        return None
    return summary.not_run.get(f"{row.precision}/{row.backend}") or summary.not_run.get(row.backend)


def overall(summary: Summary) -> str:
    """Return the verdict on all targets that can run here; NOT_RUN if none can."""
    verdicts = [row.verdict for row in summary.targets if not why_not_here(summary, row)]
    return verdict(verdicts or [NOT_RUN])


def headline(summary: Summary) -> str:
    """Return the verdict on all targets: "10 of 10 targets that can run here pass; 8 need an NVIDIA GPU."."""
    runnable: Counter[str] = Counter()
    needs: Counter[tuple[str, str]] = Counter()
    for row in summary.targets:
        reason = why_not_here(summary, row)
        if reason:
            needs[_need(reason)] += 1
        else:
            runnable[row.verdict] += 1
    clauses = [_runnable_clause(runnable, bool(needs))]
    if needs:
        clauses.append(", ".join(f"{count} {_inflect(words, count)}" for words, count in sorted(needs.items())))
    return f"{'; '.join(clauses)}."


def advice(summary: Summary) -> list[str]:
    """Return lines for the end of a run: which target of each model to serve, and which faster one is not advised.

    To serve is the fastest with all layers that passes and loses no quality. Where none is so good, one that passes.
    """
    lines = []
    if any(is_quantized(row.precision) and row.verdict == PASS for row in summary.targets):
        lines.append("Pass: engines compute what their weights say. The column quality shows what quantizing costs.")
    for model in dict.fromkeys(row.model for row in summary.targets):
        rows = [row for row in summary.targets if row.model == model]
        # The first layers of a model alone answer nonsense, however fast.
        rows = [row for row in rows if row.layers == "all"] or rows
        passed = [row for row in rows if row.verdict == PASS]
        good = [row for row in passed if not _why_not_taken(row)] or passed
        if not good:
            continue
        best = max(good, key=_speed)
        fastest = max(rows, key=_speed)
        lines.append(f"Serve: lockstep serve {best.target}")
        if _speed(fastest) > _speed(best):
            times = _speed(fastest) / _speed(best)
            lines.append(f"Faster, not taken: {fastest.target}, {times:.2f} times, {_why_not_taken(fastest)}")
        elif len(rows) > 1:
            lines.append("Faster: no other target that was measured")
    return lines


def _speed(row: SummaryRow) -> float:
    return row.decode_tokens_per_s or 0.0


def _why_not_taken(row: SummaryRow) -> str:
    """Return in words why a row is not taken: no pass, or a loss of quality above what the config allows; else ""."""
    if row.verdict != PASS:
        return "which fails" if row.verdict == FAIL else "whose checks have not all run"
    if not is_quantized(row.precision) or row.quality == PASS:
        return ""
    if row.quantization_perplexity is None:
        return "whose perplexity was not measured"
    if row.quantization_perplexity <= _MAX_PERPLEXITY:
        return ""
    return f"whose perplexity is {row.quantization_perplexity:+.1%} (at most {_MAX_PERPLEXITY:+.0%})"


def _runnable_clause(verdicts: Counter[str], some_cannot_run: bool) -> str:
    total = verdicts.total()
    passed = verdicts[PASS]
    targets = _inflect(("target", "targets"), total)
    if some_cannot_run:
        targets += " that can run here"
    if not total:
        return "No target can run here"
    if verdicts[NOT_RUN] == total:
        return f"None of {total} {targets} has been checked yet"
    if passed == total and not some_cannot_run:
        return _inflect(("The only target passes", f"All {total} targets pass"), total)
    parts = [f"{passed} of {total} {targets} {_inflect(('passes', 'pass'), passed)}"]
    for result, words in _WORDS.items():
        if verdicts[result]:
            parts.append(f"{verdicts[result]} {_inflect(words, verdicts[result])}")
    return ", ".join(parts)


def _inflect(words: tuple[str, str], count: int) -> str:
    """Return the first of two words for one thing, else the second."""
    return words[0] if count == 1 else words[1]


def _need(reason: str) -> tuple[str, str]:
    """Return the headline's clause for one target and for several: "needs WHAT", else the whole reason."""
    match = re.match(r"needs (.+?)(?: of |, found | \()", reason)
    if not match:
        return f"cannot: {reason}", f"cannot: {reason}"
    requirement = match[1]
    if ", found one of" in reason:  # there is one, of another kind
        requirement = requirement.replace("an ", "another ", 1)
    return f"needs {requirement}", f"need {requirement}"


def reasons(rows: Iterable[SummaryRow]) -> list[tuple[str, str, str]]:
    """Return (verdict, targets in words, reason) for each distinct reason why targets do not pass, failures first."""
    grouped: dict[tuple[str, str], list[Target]] = {}
    for row in rows:
        if row.reason:
            grouped.setdefault((row.verdict, row.reason), []).append(row.target)
    # "fail" sorts before "not run".
    return sorted((result, _in_words(targets), reason) for (result, reason), targets in grouped.items())


def _in_words(targets: Sequence[Target]) -> str:
    """Return the name of a single target, or the number of targets with their precisions and backends."""
    if len(targets) == 1:
        return str(targets[0])
    precisions = ", ".join(dict.fromkeys(target.precision for target in targets))
    backends = ", ".join(dict.fromkeys(target.backend for target in targets))
    return f"{len(targets)} targets ({precisions} on {backends})"
