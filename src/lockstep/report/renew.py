"""Keep the summary up to date with the checks."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.artifacts.files import remove_leftovers
from lockstep.artifacts.summary import Summary
from lockstep.errors import InputError
from lockstep.report import summary
from lockstep.report.since_lock import since_lock
from lockstep.targets import Results, Target


def summarise(results: Results, targets: Sequence[Target], not_run: Mapping[str, str] | None = None) -> Path:
    """Write the summary and its pages, with the differences from the locks here; return the summary's path."""
    changes = since_lock(results, [target.model for target in targets], Path("locks"))
    summary.write(results, targets, changes, not_run)
    return results.summary()


def refresh(results: Results) -> None:
    """Rewrite an existing summary that is out of date, and remove what a killed process left of it."""
    with contextlib.suppress(InputError):  # no summary yet, or a damaged one, which `lockstep summary` reports
        existing = Summary.load(results.summary())
        targets = [row.target for row in existing.targets]
        paths = summary.outputs(results, targets)
        is_complete = all(path.is_file() for path in paths)
        if not is_complete or summary.collect(results, targets, existing.not_run) != existing:
            summarise(results, targets, existing.not_run)
        for path in paths:
            remove_leftovers(path)
