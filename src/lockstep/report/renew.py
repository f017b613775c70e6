"""The summary made anew where the checks say something else than it does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.provenance.run import from_rule, run
from lockstep.report import summary
from lockstep.report.since_lock import since_lock
from lockstep.targets import Results, Target


def summarise(results: Results, targets: Sequence[Target]) -> Path:
    """Write the summary of what is there, as the rule does; gives its path."""
    made = results.summary()
    shown = [str(path) for target in targets for path in summary.sources(results, target) if path.is_file()]
    outputs = [str(path) for path in summary.outputs(results, targets)]
    step = from_rule("summary", {}, {"shown": shown}, {"targets": list(map(str, targets))}, outputs)
    run(step, lambda: write(results, targets))
    return made


def write(results: Results, targets: Sequence[Target], locks: Path = Path("locks")) -> None:
    """Write the summary and its pages, with what differs from the locks in `locks`."""
    summary.write(results, targets, since_lock(results, [target.model for target in targets], locks))


def refresh(results: Results) -> None:
    """Write the summary anew where it is there and does not say what the checks say now."""
    if summary.is_stale(results):
        summarise(results, summary.targets_of(results))


@contextlib.contextmanager
def refreshed(results: Results) -> Iterator[None]:
    """Have the summary say what the checks say, also behind a stage that fails."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError, LockstepError):  # what was raised is what is to be said
            refresh(results)
        raise
    refresh(results)
