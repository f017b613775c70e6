"""Explain: what a run would make again of a target, and why.

The build keys that are recorded are compared with what they would be now.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.artifacts.build_record import BuildKey
from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.artifacts.digest_cache import digest
from lockstep.artifacts.manifest_files import failed_path, lost_files
from lockstep.checkpoint.resolve import side_files, weight_files
from lockstep.checkpoint.tensors import find_tensors
from lockstep.errors import LockstepError
from lockstep.pipeline.stages import STAGES, steps
from lockstep.pipeline.step import JobSpec
from lockstep.provenance import code_identity
from lockstep.provenance.again import FAILED
from lockstep.provenance.diff import cause, words
from lockstep.provenance.record import backend_identity, content, read_record, record_path
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


def explain(config: Config, results: Results, target: Target, source: Path | None = None) -> list[Explained]:
    """Return all steps of `target` with their reasons, in order.

    `source`: the folder that the model's checkpoint lies in now; None where it is not there yet.
    """
    found: list[Explained] = []
    again: dict[Path, str] = {}
    for step in steps(config, results, target):
        explained = _explain(step, again, source)
        found.append(explained)
        if explained.rebuilt:
            again[step.output] = step.stage
    return found


def _explain(step: JobSpec, again: Mapping[Path, str], source: Path | None) -> Explained:
    if not step.output.is_file():
        return Explained(step, (f"{step.output} is not there",))
    reasons = [f"{path} is gone or cut short" for path in lost_files(step.output)]
    reasons += [FAILED] if failed_path(step.output).is_file() else []
    reasons += [f"reads {path.name}, which {again[path]} makes again" for path in step.inputs.values() if path in again]
    if step.stage in ("resolve", "architecture") and source is not None:
        reasons += _changed_files(step, source)
    try:
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
    return Explained(step, tuple(reasons + cause(record.key, _key_now(step, record.key, again))))


def _key_now(step: JobSpec, recorded: BuildKey, again: Mapping[Path, str]) -> BuildKey:
    """Return the build key as a run would have it now, as far as that can be told.

    With the pinned packages, and inputs that are not made again first.
    """
    entry, backend = STAGES[step.stage].code, step.backend
    inputs = {name: content(path) for name, path in step.inputs.items() if path not in again and path.is_file()}
    kept = {name: value for name, value in recorded.inputs.items() if step.inputs.get(name) in again}
    identity = recorded.backend
    if identity is not None:
        with contextlib.suppress(LockstepError):  # its library or its device is not here: nothing can be said
            identity = backend_identity(step)
    return replace(
        recorded,
        inputs={**kept, **inputs},
        options=dict(step.options),
        code=code_identity.code_files(entry, backend),
        environment=code_identity.pinned_packages(entry, backend),
        backend=identity,
    )


def _changed_files(step: JobSpec, source: Path) -> list[str]:
    """Return files of the checkpoint that are not those that its manifest lists."""
    try:
        recorded = {file.path: file.sha256 for file in CheckpointManifest.load(step.output).files}
        weights = weight_files(source, find_tensors(source)) if step.stage == "resolve" else []
        there = {path.name: path for path in [*side_files(source), *weights]}
    except LockstepError as error:
        return [str(error)]
    lines = [f"{source / name} is gone" for name in sorted(recorded.keys() - there.keys())]
    lines += [f"{path} is new" for name, path in sorted(there.items()) if name not in recorded]
    for name, path in sorted(there.items()):
        if name in recorded and (found := digest(path)) != recorded[name]:
            lines.append(f"{path} changed: sha256 {words(recorded[name])} -> {words(found)}")
    return lines
