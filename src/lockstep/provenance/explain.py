"""Explain which artefacts of a target a run would rebuild, and why.

The build keys of the statements are compared with those of a run now.
"""

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
    """A step, and why a run would rebuild its artefact; without reasons it would not. unknown: it has no statement."""

    step: Job
    reasons: tuple[str, ...]
    unknown: bool = False

    @property
    def rebuilt(self) -> bool:
        return bool(self.reasons)

    def __str__(self) -> str:
        return "\n".join([f"{self.step}:", *(f"  {reason}" for reason in self.reasons)])


def explain(config: Config, results: Results, target: Target, sources: Sources = Sources()) -> list[Explained]:
    """Return all steps of `target` with their reasons, in order. sources: the places of its model's files."""
    steps: list[Explained] = []
    again: dict[Path, str] = {}
    for step in jobs(config, results.root, [target]):
        steps.append(explain_job(step, again, sources))
        if steps[-1].rebuilt:
            again[step.output] = step.stage
    return steps


def explain_job(step: Job, again: Mapping[Path, str], sources: Sources) -> Explained:
    if not step.output.is_file():
        return Explained(step, (f"{step.output} is not there",))
    reasons = [f"{path} is gone or cut short" for path in lost_files(step.output)]
    if failed_path(step.output).is_file():
        reasons.append("the check has failed since")
    reasons += [f"reads {path.name}, which {again[path]} makes again" for path in step.inputs.values() if path in again]
    try:
        reasons += changed_files(step, sources)
        statement = read_statement(step.output)
    except LockstepError as error:
        return Explained(step, (*reasons, str(error)))
    if statement is None:
        problem = "is of another file" if statement_path(step.output).is_file() else "is not there"
        reasons = reasons or [f"the statement of how {step.output.name} was made {problem}"]
        return Explained(step, tuple(reasons), unknown=True)
    return Explained(step, tuple(reasons + cause(statement.key, _key_now(step, statement.key, again))))


def _key_now(step: Job, recorded: BuildKey, again: Mapping[Path, str]) -> BuildKey:
    """Return the build key of a run now.

    Inputs that would be rebuilt first stay as recorded. So do packages and the backend where the library or its device
    is missing on this machine.
    """
    inputs = {name: content(path) for name, path in step.inputs.items() if path not in again and path.is_file()}
    recorded_inputs = {name: value for name, value in recorded.inputs.items() if step.inputs.get(name) in again}
    module = STAGES[step.stage].module
    code = code_identity.code_digests(module, step.backend)
    key = replace(recorded, inputs={**recorded_inputs, **inputs}, options=dict(step.options), code=code)
    with contextlib.suppress(LockstepError):
        key = replace(key, environment=code_identity.pinned_packages(module, step.backend))
        if key.backend is not None:
            key = replace(key, backend=backend_identity(step))
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
