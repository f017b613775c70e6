"""Explain what a run would rebuild of a target: build keys of statements compared with those of a run now."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.artifacts.statement import BuildKey, statement_path
from lockstep.errors import LockstepError
from lockstep.manifests.manifest_files import content, failed_path, lost_files
from lockstep.provenance import code_identity
from lockstep.provenance.lock import changes
from lockstep.provenance.sources import Sources, changed_files
from lockstep.provenance.statements import backend_identity, read_statement
from lockstep.stages import STAGES, Job, jobs
from lockstep.targets import Results, Target

if TYPE_CHECKING:
    from lockstep.config.schema import Config


@dataclass(frozen=True)
class Explained:
    """A job, and why a run would rebuild its artefact. unknown: whether it has changed, for it has no statement."""

    job: Job
    reasons: tuple[str, ...]
    unknown: bool = False

    @property
    def rebuilt(self) -> bool:
        return bool(self.reasons)

    def __str__(self) -> str:
        return "\n".join([f"{self.job}:", *(f"  {reason}" for reason in self.reasons)])


def explain(config: Config, results: Results, target: Target, sources: Sources = Sources()) -> list[Explained]:
    """Return all jobs of `target` with their reasons, in order. sources: the places of its model's files."""
    explanations: list[Explained] = []
    rebuilt: dict[Path, str] = {}
    for job in jobs(config, results.root, [target]):
        explanations.append(explain_job(job, rebuilt, sources))
        if explanations[-1].rebuilt:
            rebuilt[job.output] = job.stage
    return explanations


def explain_job(job: Job, rebuilt: Mapping[Path, str], sources: Sources) -> Explained:
    """Explain a job. rebuilt: {output: stage} of the jobs before it that would run."""
    if not job.output.is_file():
        return Explained(job, (f"{job.output} is not there",))
    reasons = [f"{path} is gone or cut short" for path in lost_files(job.output)]
    if failed_path(job.output).is_file():
        reasons.append("the check has failed since")
    for path in job.inputs.values():
        if path in rebuilt:
            reasons.append(f"reads {path.name}, which {rebuilt[path]} makes again")
    try:
        reasons += changed_files(job, sources)
        statement = read_statement(job.output)
    except LockstepError as error:
        return Explained(job, (*reasons, str(error)))
    if statement is None:
        problem = "is of another file" if statement_path(job.output).is_file() else "is not there"
        # A missing statement follows from the other reasons, if there are any.
        reasons = reasons or [f"the statement of how {job.output.name} was made {problem}"]
        return Explained(job, tuple(reasons), unknown=True)
    return Explained(job, tuple(reasons + cause(statement.key, _key_now(job, statement.key, rebuilt))))


def _key_now(job: Job, recorded: BuildKey, rebuilt: Mapping[Path, str]) -> BuildKey:
    """Return the build key of a run now.

    Inputs that would be rebuilt first stay as recorded: their content is not known yet. So do packages and the
    backend where the library or its device is missing on this machine.
    """
    inputs = {name: content(path) for name, path in job.inputs.items() if path not in rebuilt and path.is_file()}
    recorded_inputs = {name: value for name, value in recorded.inputs.items() if job.inputs.get(name) in rebuilt}
    module = STAGES[job.stage].module
    code = code_identity.code_digests(module, job.backend)
    key = replace(recorded, inputs={**recorded_inputs, **inputs}, options=dict(job.options), code=code)
    with contextlib.suppress(LockstepError):
        key = replace(key, environment=code_identity.pinned_packages(module, job.backend))
        if key.backend is not None:
            key = replace(key, backend=backend_identity(job))
    return key


def cause(recorded: BuildKey, now: BuildKey) -> list[str]:
    """Return a line for each difference between two build keys of one stage, in order of likely causes."""
    texts: list[str] = []
    for kind, before, after in (
        ("", recorded.names, now.names),
        ("input ", recorded.inputs, now.inputs),
        ("option ", recorded.options, now.options),
        ("backend ", recorded.backend or {}, now.backend or {}),
        ("", recorded.environment, now.environment),
        ("code ", recorded.code, now.code),
    ):
        texts += [f"{kind}{'.'.join(where)} {change}" for where, change in changes(before, after)]
    return texts
