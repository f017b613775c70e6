"""Results that are there but cannot be trusted, which a run makes again.

Results in; those that cannot be trusted out, each with the reason. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from lockstep.artifacts.fetched import Fetched
from lockstep.manifests.digest_cache import digest, size_of
from lockstep.manifests.manifest_files import failed_path, lost_files, named_files
from lockstep.pipeline.step import JobSpec
from lockstep.provenance.lock import Lock
from lockstep.provenance.locked import first_difference, other_commit
from lockstep.provenance.record import record_path

FAILED = "the check has failed since"


def untrusted(recorded: Iterable[str], with_files: Collection[str]) -> dict[str, str]:
    """Return {manifest: why} of the manifests of `recorded` that cannot be trusted.

    They are there, and have no record, or are of a check that failed since, or, of those in `with_files`, lost a file.
    A manifest that is damaged itself is none: who reads it refuses it.
    """
    found = {}
    for manifest in filter(_is_there, recorded):
        if not record_path(manifest).is_file():
            found[manifest] = "no record says how it was made"
        elif failed_path(manifest).is_file():
            found[manifest] = FAILED
        elif manifest in with_files and (lost := lost_files(manifest)) and lost[0] != Path(manifest):
            found[manifest] = f"{lost[0]} is gone or not whole"
    return found


def not_as_locked(steps: Sequence[JobSpec], lock_file: Path) -> dict[str, str]:
    """Return {manifest: why} of the artefacts of `steps` that are not as locked.

    Of those that are there with their record. Every file that they name is hashed.
    """
    lock, found = Lock.load(lock_file), {}
    for step in steps:
        if _is_there(step.output) and record_path(step.output).is_file() and (line := _difference(step, lock)):
            found[str(step.output)] = f"{line}, which is not as locked"
    return found


def _difference(step: JobSpec, lock: Lock) -> str | None:
    if step.stage == "fetch" and (line := other_commit(lock, Fetched.load(step.output).commit)):
        return line
    return first_difference(step.output, lock) or next(
        (f"{file.path} has changed" for file in named_files(step.output) if _digest(file.path) != file.sha256), None
    )


def _is_there(path: str | Path) -> bool:
    return Path(path).is_file()


def _digest(path: Path) -> str | None:
    return None if size_of(path) is None else digest(path)
