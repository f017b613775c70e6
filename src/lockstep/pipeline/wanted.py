"""The files that Snakemake is asked for.

The jobs and the results that are there in; the files out.

The fewer files a rule names, the sooner Snakemake has planned it: what another job reads is made for that job, and need
not be asked for by name. One case is left. Snakemake does not miss a file that was deleted where all that is made from
it is there, so such a file is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.pipeline.stage import path_of
from lockstep.pipeline.stages import entry_of
from lockstep.pipeline.step import JobSpec
from lockstep.targets import Results

if TYPE_CHECKING:
    from lockstep.config.schema import Config


@dataclass(frozen=True)
class Made:
    """The files that one job makes, and those that it reads."""

    outputs: Sequence[str]
    inputs: Collection[str]


def all_jobs(config: Config, results: Results, steps: Sequence[JobSpec]) -> list[Made]:
    """Return all jobs that a run may have: of `steps`, and those of no one model."""
    jobs = jobs_of(config, results, steps)
    shown = [
        path for made, step in zip(jobs, steps, strict=True) if entry_of(step).is_summarised for path in made.outputs
    ]
    summary = [results.summary(), results.summary().with_suffix(".csv"), results.report_page(), results.target_pages()]
    plots = [results.report(f"{name}.svg") for name in ("error_by_layer", "speed")]
    plotted = [results.summary(), *(step.output for step in steps if step.stage == "validate")]
    return [
        Made([str(results.config())], []),
        *jobs,
        Made(list(map(str, summary)), shown),
        Made(list(map(str, plots)), list(map(str, plotted))),
    ]


def jobs_of(config: Config, results: Results, steps: Iterable[JobSpec]) -> list[Made]:
    """Return the jobs of `steps`."""
    jobs = []
    for step in steps:
        stage = entry_of(step)
        outputs = [step.output, *(path_of(name, results, step.names) for name in stage.beside)]
        waited_for = [made for made, is_brought in stage.waits_for.items() if is_brought(config, step.names["model"])]
        inputs = [*step.inputs.values(), *(path_of(made, results, step.names) for made in waited_for)]
        jobs.append(Made(list(map(str, outputs)), list(map(str, inputs))))
    return jobs


def wanted(jobs: Sequence[Made], is_there: Callable[[str], bool]) -> list[str]:
    """Return what a run is asked for, in the order of the jobs.

    That is the first output of each job of which no other job reads anything, and each file that is not there though
    another output of its job, or something made from it, is.
    """
    read = {path for job in jobs for path in job.inputs}
    there = {path for job in jobs for path in job.outputs if is_there(path)}
    begun = [job for job in jobs if not there.isdisjoint(job.outputs)]
    asked = {path for job in begun for path in (*job.outputs, *job.inputs)} - there
    asked |= {job.outputs[0] for job in jobs if read.isdisjoint(job.outputs)}
    return [path for job in jobs for path in job.outputs if path in asked]


def names_pattern(names: Iterable[str]) -> str:
    """Return a regular expression that fits `names` and nothing else.

    Without any name it fits nothing. What several names open with is tried once: Snakemake looks a thousand names up
    ten thousand times.
    """
    names = sorted(set(names))
    return _after(names, 0) if names else "(?!)"


def _after(names: Sequence[str], start: int) -> str:
    """Return the pattern of the rest of sorted names that agree up to `start`."""
    first, last = names[0], names[-1]
    common = start
    while common < min(len(first), len(last)) and first[common] == last[common]:
        common += 1
    text = re.escape(first[start:common])
    longer = names[1:] if len(first) == common else names
    if not longer:
        return text
    groups: dict[str, list[str]] = {}
    for name in longer:
        groups.setdefault(name[common], []).append(name)
    branches = "|".join(_after(group, common) for group in groups.values())
    return f"{text}(?:{branches}){'?' if longer is not names else ''}"
