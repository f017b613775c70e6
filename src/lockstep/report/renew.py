"""The summary made anew where the checks say something else than it does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.provenance.run import from_rule, run
from lockstep.report import summary
from lockstep.targets import Results, Target


def summarise(results: Results, targets: Sequence[Target]) -> Path:
    """Write the summary of what is there, as the rule does; gives its path."""
    made = results.summary()
    shown = [str(path) for target in targets for path in summary.sources(results, target) if path.is_file()]
    outputs = [str(path) for path in (made, made.with_suffix(".csv"), results.report("targets.html"))]
    step = from_rule("summary", {}, {"shown": shown}, {"targets": list(map(str, targets))}, outputs)
    run(step, lambda: summary.write(results, targets))
    return made


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
