"""The jobs of a model: the config in; the state and the time of each job, by its files, out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.artifacts.files import read_json
from lockstep.artifacts.statement import Statement, statement_path
from lockstep.config.load import load
from lockstep.errors import InputError
from lockstep.manifests.manifest_files import failed_path
from lockstep.report.verdict import FAIL, NOT_RUN
from lockstep.stages import Job, jobs
from lockstep.targets import Results, Target

DONE = "done"
STATES = (DONE, FAIL, NOT_RUN)


@dataclass(frozen=True)
class JobState:
    """A job with its state, and the seconds and peak resident bytes of its last run by Snakemake, where it has one."""

    job: Job
    state: str
    seconds: float | None
    memory: float | None

    def is_for(self, target: Target) -> bool:
        return all(value == str(getattr(target, name)) for name, value in self.job.names.items())


def job_states(results: Results, targets: Sequence[Target], content: Callable[[Path], str]) -> list[JobState]:
    """Return the jobs of targets, each after those that it reads from; none where the config cannot be read."""
    try:
        config = load(read_json(results.config()))
        planned = jobs(config, results.root, targets)
    # A summary may list targets that the config no longer has: then there is no graph of jobs.
    except (InputError, LookupError):
        return []
    return [JobState(job, _state(job, content), *_measured(results, job)) for job in planned]


def changed_input(out: Path, inputs: Mapping[str, Path], content: Callable[[Path], str]) -> Path | None:
    """Return an input that has changed since the statement of `out`; None where all are the same."""
    before = Statement.load(statement_path(out)).key.inputs
    for name, path in inputs.items():
        if name in before and (not path.is_file() or content(path) != before[name]):
            return path
    return None


def _state(job: Job, content: Callable[[Path], str]) -> str:
    if failed_path(job.output).is_file():
        return FAIL
    # Errors: no statement, a damaged one, or another job is making it at this moment.
    with contextlib.suppress(InputError, FileNotFoundError):
        if job.output.is_file() and changed_input(job.output, job.inputs, content) is None:
            return DONE
    return NOT_RUN


def _measured(results: Results, job: Job) -> tuple[float | None, float | None]:
    """Return seconds and bytes of a job's benchmark file, as Snakemake writes it."""
    # The order of folders in the rules' `benchmark` paths.
    names = [job.names[name] for name in ("model", "precision", "backend", "layers") if name in job.names]
    path = results.root.joinpath("benchmarks", job.stage, *names[:-1], f"{names[-1]}.tsv")
    try:
        heading, line, *_ = path.read_text().splitlines()
        row = dict(zip(heading.split("\t"), line.split("\t")))
        return float(row["s"]), float(row["max_rss"]) * 2**20
    except (OSError, ValueError, KeyError):
        return None, None
