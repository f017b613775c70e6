"""The summary, written again where it is out of date.

That is where the checks say something else than it does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lockstep.artifacts.files import remove_leftovers
from lockstep.errors import InputError, LockstepError
from lockstep.report import summary
from lockstep.report.since_lock import since_lock
from lockstep.targets import Results, Target

_TRIES = 5  # a job beside this one may delete a report, which it is to make again, while its digest is taken


def summarise(results: Results, targets: Sequence[Target], not_run: Mapping[str, str] | None = None) -> Path:
    """Write the summary of what is there, as the rule does; return its path. not_run: see `summary.write`."""
    not_run = dict(summary.known_not_run(results) if not_run is None else not_run)
    for left in reversed(range(_TRIES)):
        try:
            write(results, targets, not_run=not_run)
            break
        except (InputError, FileNotFoundError):
            if not left:
                raise
    return results.summary()


def write(
    results: Results, targets: Sequence[Target], locks: Path = Path("locks"), not_run: Mapping[str, str] | None = None
) -> None:
    """Write the summary and its pages, with what differs from the locks in `locks`."""
    summary.write(results, targets, since_lock(results, [target.model for target in targets], locks), not_run)


def refresh(results: Results) -> None:
    """Write the summary again where it is there and out of date. In any case what a killed process left of it goes."""
    if summary.is_stale(results):
        summarise(results, summary.targets_of(results))
    with contextlib.suppress(InputError):  # none is there, or a damaged one, of which its reader is told
        for path in summary.outputs(results, summary.targets_of(results)):
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
