"""When results count as made, for Snakemake, which judges by the dates of files.

Jobs with the files that they read in; {path: date} out, of results that count as made at another time than their files
say. Nothing is changed.

Dates are no content. Where what a job reads, or its script, is younger than what it made (touched, copied, restored),
its record tells: what was made of the same content counts as made after it, what was not as older than anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lockstep.pipeline.wanted import Made

_TIMESTAMP = ".snakemake_timestamp"  # in a folder that is an output, whose date it is
_LONG_AGO = 1.0  # the date of what has to be made again; Snakemake takes 0 for none
_LATER = 0.001  # seconds by which a result is younger than its job's script


@dataclass(frozen=True)
class Dated:
    """A job whose output is there.

    files: of the user, that it reads beside results. has_changed: whether it would be made of something else now; None
    where nothing tells.
    """

    made: Made
    files: Sequence[str]
    has_changed: Callable[[], bool | None]


def dates(jobs: Iterable[Dated], scripts: Iterable[str], is_there: Callable[[str], bool]) -> dict[str, float]:
    """Return {path: seconds since 1970} of results that count as of another date.

    jobs: each after those that it reads from. scripts: of all jobs. is_there: whether a result counts as there.
    """
    script = max((max(_times(path)) for path in scripts), default=0.0) + _LATER
    found: dict[str, float] = {}
    beside: dict[str, Sequence[str]] = {}  # what is made together, by each of its files
    real: dict[str, tuple[float, float]] = {}

    def times(path: str) -> tuple[float, float]:
        if path not in real:
            real[path] = _times(path)
        return real[path]

    for job in jobs:
        outputs = [path for path in job.made.outputs if is_there(path)]
        beside.update(dict.fromkeys(job.made.outputs, job.made.outputs))
        if not outputs:
            continue
        read = {other for path in job.made.inputs for other in beside.get(path, (path,)) if is_there(other)}
        read.update(path for path in job.files if os.path.exists(path))
        oldest = min(times(path)[0] for path in outputs)
        after = max([found.get(path, times(path)[0]) for path in read] + [script])
        if after <= oldest and all(times(path)[1] <= oldest for path in read):
            continue
        changed = job.has_changed()
        if changed is None:
            continue
        for path in outputs:
            if changed:
                found[path] = _LONG_AGO
            elif times(path)[0] < after:
                found[path] = after
    return found


def _times(path: str) -> tuple[float, float]:
    """Return when a file, or the link to it, was modified and was changed at all."""
    stamp = os.path.join(path, _TIMESTAMP)
    path = stamp if os.path.isfile(stamp) else path
    about = (os.stat(path), os.lstat(path))
    modified = max(found.st_mtime for found in about)
    return modified, max(modified, *(found.st_ctime for found in about))
