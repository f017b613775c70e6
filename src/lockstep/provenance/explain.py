"""Explain: what a run would make again of a target, and why.

The build keys that are recorded are compared with what they would be now.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.artifacts.build_record import BuildKey
from lockstep.errors import LockstepError
from lockstep.manifests.manifest_files import failed_path, lost_files
from lockstep.pipeline.stages import REPORTS, STAGES, steps
from lockstep.pipeline.step import JobSpec
from lockstep.pipeline.wanted import Made
from lockstep.provenance import code_identity
from lockstep.provenance.again import FAILED
from lockstep.provenance.diff import cause
from lockstep.provenance.record import backend_identity, content, environment, input_content, read_record, record_path
from lockstep.provenance.sources import Sources, changed_files
from lockstep.targets import Results, Target

if TYPE_CHECKING:
    from lockstep.config.schema import Config


@dataclass(frozen=True)
class Explained:
    """A step, and why a run would make its artefact again.

    There are no reasons where it would not. `unknown`: there is no record to tell by.
    """

    step: JobSpec
    reasons: tuple[str, ...]
    unknown: bool = False

    @property
    def rebuilt(self) -> bool:
        return bool(self.reasons)

    def __str__(self) -> str:
        return "\n".join([f"{self.step}:", *(f"  {reason}" for reason in self.reasons)])


def explain(config: Config, results: Results, target: Target, sources: Sources = Sources()) -> list[Explained]:
    """Return all steps of `target` with their reasons, in order.

    sources: the places of its model's files.
    """
    found: list[Explained] = []
    again: dict[Path, str] = {}
    for step in steps(config, results, target):
        explained = _explain(step, again, sources)
        found.append(explained)
        if explained.rebuilt:
            again[step.output] = step.stage
    return found


def has_changed(step: JobSpec, sources: Sources) -> bool | None:
    """Return whether the output of `step` would be made of something else now.

    Inputs, the user's files, options and code are compared; of packages and the device Snakemake's `params` and the
    stage itself tell. None where nothing says what made it.
    """
    try:
        record = read_record(step.output)
        if record is None or not all(path.is_file() for path in step.inputs.values()):
            return None
        return bool(changed_files(step, sources) or cause(record.key, _key_now(step, record.key, {})))
    except (LockstepError, OSError):
        return None


def report_has_changed(rule: str, made: Made) -> bool | None:
    """Return whether a report shows other results than those that are there now."""
    try:
        record = read_record(Path(made.outputs[0]))
        if record is None:
            return None
        code = code_identity.code_files(REPORTS[rule])
        content_of = lambda path: input_content(rule, Path(path))
        # By hand it also shows what only `lockstep reproduce` makes.
        shown, recorded = (Counter(values) for values in (map(content_of, made.inputs), record.key.inputs.values()))
        return not shown <= recorded or code != record.key.code
    except (LockstepError, OSError):
        return None


def _explain(step: JobSpec, again: Mapping[Path, str], sources: Sources) -> Explained:
    if not step.output.is_file():
        return Explained(step, (f"{step.output} is not there",))
    reasons = [f"{path} is gone or cut short" for path in lost_files(step.output)]
    reasons += [FAILED] if failed_path(step.output).is_file() else []
    reasons += [f"reads {path.name}, which {again[path]} makes again" for path in step.inputs.values() if path in again]
    try:
        reasons += changed_files(step, sources)
        record = read_record(step.output)
    except LockstepError as error:
        return Explained(step, (*reasons, str(error)))
    if record is None:
        what = "is of another file" if record_path(step.output).is_file() else "is not there"
        return (
            Explained(step, tuple(reasons), unknown=True)
            if reasons
            else Explained(step, (f"the record of how {step.output.name} was made {what}",), unknown=True)
        )
    key = _with_libraries(_key_now(step, record.key, again), step)
    return Explained(step, tuple(reasons + cause(record.key, key)))


def _key_now(step: JobSpec, recorded: BuildKey, again: Mapping[Path, str]) -> BuildKey:
    """Return the build key as a run would have it now.

    Packages and backend stay as recorded, and inputs that are made again first.
    """
    inputs = {name: content(path) for name, path in step.inputs.items() if path not in again and path.is_file()}
    kept = {name: value for name, value in recorded.inputs.items() if step.inputs.get(name) in again}
    code = code_identity.code_files(STAGES[step.stage].code, step.backend)
    return replace(recorded, inputs={**kept, **inputs}, options=dict(step.options), code=code)


def _with_libraries(key: BuildKey, step: JobSpec) -> BuildKey:
    """Return `key` with the packages and the backend that are pinned, or there, now.

    They stay where the library or its device is not here, and nothing can be said.
    """
    with contextlib.suppress(LockstepError):
        key = replace(key, environment=environment(step, STAGES[step.stage].code, code_identity.pinned_packages))
        if key.backend is not None:
            key = replace(key, backend=backend_identity(step))
    return key
