"""The summary, written again where the checks say something else than it does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lockstep.artifacts.files import remove_leftovers
from lockstep.artifacts.summary import Summary
from lockstep.errors import InputError, LockstepError
from lockstep.report import summary
from lockstep.report.since_lock import since_lock
from lockstep.targets import Results, Target


def summarise(
    results: Results, targets: Sequence[Target], not_run: Mapping[str, str] | None = None, locks: Path = Path("locks")
) -> Path:
    """Write the summary and its pages, with what differs from the locks in `locks`; return the summary's path."""
    changes = since_lock(results, [target.model for target in targets], locks)
    summary.write(results, targets, changes, not_run)
    return results.summary()


def refresh(results: Results) -> None:
    """Write the summary again where it is there and out of date. In any case what a killed process left of it goes."""
    with contextlib.suppress(InputError):  # none is there, or a damaged one, of which its reader is told
        known = Summary.load(results.summary())
        targets = [row.target for row in known.targets]
        paths = summary.outputs(results, targets)
        if not all(path.is_file() for path in paths) or summary.collect(results, targets, known.not_run) != known:
            summarise(results, targets, known.not_run)
        for path in paths:
            remove_leftovers(path)


@contextlib.contextmanager
def refreshed(results: Results) -> Iterator[None]:
    """Have the summary say what the checks say, also after a stage that fails."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError, LockstepError):  # what was raised is what is to be said
            refresh(results)
        raise
    refresh(results)
