"""Compare artefacts with the lock, before and after they are made.

The first difference is named with its cause, and no later artefact is made from it.

Differences that are known before the work stop it (`check_project`, `check_job`): the parameters of checks, the
checkpoint's files, the device of a backend, and every input file. A stage's artefact is compared as soon as it is made
(`discard_different`). Other code and other packages are no difference while the artefacts are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.artifacts.fetched import Fetched
from lockstep.artifacts.statement import BuildKey, statement_path
from lockstep.errors import CheckError, InputError
from lockstep.manifests.digest_cache import check_files, digest, size_of
from lockstep.manifests.manifest_files import named_files
from lockstep.provenance.lock import (
    PARAMETERS,
    Lock,
    LockEntry,
    changes,
    entries_at,
    lock_path,
    locked_parameters,
    made_by,
    made_with,
    parameters_place,
    without_origin,
    words,
)
from lockstep.stages import STAGES, Job
from lockstep.stages.build import engines_place
from lockstep.targets import Results, Target

if TYPE_CHECKING:
    from lockstep.config.schema import Config


def is_locked(config: Mapping[str, Any]) -> bool:
    """Return `locked` of Snakemake's config, a text on its command line. Raises InputError for other values."""
    value = config.get("locked", False)
    text = str(value).lower()
    if text not in ("true", "false"):
        raise InputError(f"locked: expected true or false, found {value!r}; correct it")
    return text == "true"


def find_lock(model: str, folders: Sequence[Path]) -> Path:
    """Return the lock of a model in `locks/` of the first of `folders` that has one. Raises InputError without one."""
    for folder in folders:
        path = lock_path(folder / "locks", model)
        if path.is_file():
            return path
    places = " or ".join(dict.fromkeys(str(folder / "locks") for folder in folders))
    raise InputError(
        f"locked: expected {model}.lock.json in {places}, found none; write it with `lockstep lock`, or run without "
        "locked"
    )


def check_project(lock_file: Path, jobs: Sequence[Job], checkpoint: Sequence[Path] | None) -> None:
    """Check before a run that no artefact differs, or will differ, from the lock.

    jobs: of the targets of the lock's model. checkpoint: the model's files in a local folder, None where a job fetches
    or makes them. Raises CheckError for the first difference.
    """
    lock = Lock.load(lock_file)
    if checkpoint is not None:
        digests = {path.name: digest(path) for path in checkpoint}
        expected = {name: value for name, value in without_origin(lock.checkpoint).items() if name != "commit"}
        for (name, *_), change in changes(expected, digests):
            refuse(f"resolve: {name} differs: {change}", lock_file)
    for job in jobs:
        if line := _parameter_difference(lock, job):
            refuse(line, lock_file)
        if STAGES[job.stage].builds_engines and not lock.devices(job.names["precision"], job.names["backend"]):
            refuse(f"{job}: its engines are not in the lock", lock_file)
        if not (job.output.is_file() and statement_path(job.output).is_file()):
            continue
        entries = entries_at(job.output)
        for entry in entries:
            # Rebuilding it, which the message below advises, would not help here.
            if entry.where not in lock.entries:
                refuse(f"{job}: {entry.where} is not in the lock", lock_file)
        if line := _result_difference(job, lock, entries):
            advice = f"make it again without locked: lockstep run -- --forcerun {job.stage} -- {job.output}"
            # Without the lock, a new fetch would stay at the commit of its earlier output.
            if _is_source(job):
                advice = f"delete {job.output.parent} and run again"
            raise CheckError(f"{line}, which is not what {lock_file} says; {advice}")


def not_in_config(lock_file: Path, targets: Collection[Target]) -> list[str]:
    """Return `<precision>/<layers>/<backend>` of golden tokens in a lock that are of no target."""
    names = {f"{target.precision}/{target.layers}/{target.backend}" for target in targets}
    start = f"{PARAMETERS}/golden/"
    locked = [where.removeprefix(start) for where in Lock.load(lock_file).entries if where.startswith(start)]
    return sorted(set(locked) - names)


def _result_difference(job: Job, lock: Lock, entries: Sequence[LockEntry]) -> str | None:
    """Return the first difference of a job's artefact from the lock, or of its files from its manifest."""
    if _is_source(job) and (line := _commit_difference(lock, Fetched.load(job.output).commit)):
        return line
    if line := _first_difference(entries, lock):
        return line
    for file in named_files(job.output):
        if size_of(file.path) is None or digest(file.path) != file.sha256:
            return f"{file.path} has changed"
    return None


def _is_source(job: Job) -> bool:
    return STAGES[job.stage].output == Results.source.pattern


def fetch_parameters(config: Config, model: str, lock_file: Path | None) -> dict[str, Any]:
    """Return the parameters of `hub.fetch` that make it follow the config, and a lock.

    check: called with the folder of the small files and their commit, before weights are downloaded. commit: the locked
    one, where the lock is of this source: its branch may have moved since.
    """
    if lock_file is None:
        return {"check": lambda folder, commit: config.check_model(model, folder), "commit": None}
    lock = Lock.load(lock_file)

    def check(folder: Path, commit: str) -> None:
        config.check_model(model, folder)
        if line := _commit_difference(lock, commit):
            refuse(line, lock_file)

    is_same_source = lock.checkpoint["source"] == config.models[model].source
    return {"check": check, "commit": lock.commit if is_same_source else None}


def check_job(job: Job, key: BuildKey, lock_file: Path) -> None:
    """Check before a stage that its inputs, parameters and device are as locked.

    Raises CheckError for an input that is not locked, other parameters or another device; InputError when a file of a
    manifest has changed.
    """
    lock = Lock.load(lock_file)
    for path in job.inputs.values():
        if statement_path(path).is_file():
            for entry in entries_at(path):
                if line := difference(lock, entry):
                    refuse(line, lock_file)
            check_files(named_files(path), "make it again")
    if line := _parameter_difference(lock, job):
        refuse(line, lock_file)
    if STAGES[job.stage].builds_engines and key.backend:
        *_, device = engines_place(job.names, key.backend)
        devices = lock.devices(job.names["precision"], job.names["backend"])
        if device not in devices:
            locked = " or ".join(sorted(devices)) or "none"
            refuse(f"{job.stage}: expected the device {locked}, found {device}, which is not in the lock", lock_file)


def discard_different(output: Path, lock_file: Path) -> str | None:
    """Delete the manifest of an artefact that differs from the lock, and return the difference; None if it is equal."""
    line = _first_difference(entries_at(output), Lock.load(lock_file))
    if line is not None:
        for path in (output, statement_path(output)):
            path.unlink(missing_ok=True)
    return line


def _first_difference(entries: Sequence[LockEntry], lock: Lock) -> str | None:
    return next(filter(None, (difference(lock, entry) for entry in entries)), None)


def _parameter_difference(lock: Lock, job: Job) -> str | None:
    """Return the first parameter of a check that differs between config and lock; None where they agree."""
    if not STAGES[job.stage].is_check:
        return None
    locked = lock.entries.get(parameters_place(job.stage, job.names))
    if locked is None:
        return f"{job}: the parameters of this check are not in the lock"
    for where, change in changes(locked, locked_parameters(job.options)):
        return f"{job}: {'.'.join(where)} differs: {change}"
    return None


def difference(lock: Lock, entry: LockEntry) -> str | None:
    """Return the first difference of an artefact from the lock, with possible causes; None when it is the same."""
    comparison = lock.compare(entry.where, entry.items)
    if not comparison.is_locked:
        return f"{entry.stage}: {entry.where} is not in the lock"
    if not comparison.changes:
        return None
    # A graph says more than the assembly that holds its digest.
    graph = next((change for change in comparison.changes if change[0][-1].endswith(".onnx")), None)
    where, change = graph or comparison.changes[0]
    line = f"{entry.stage}: {'.'.join(where)} differs: {change}"
    now = made_with(entry.key)
    locked = lock.made_with.get(made_by(entry.key), now)
    causes = [f"{' '.join(where).removeprefix('packages ')} {change}" for where, change in changes(locked, now)]
    # No code and no package changes the parameters of a check.
    if causes and not entry.where.startswith(f"{PARAMETERS}/"):
        line += f", made with {', '.join(causes)}"
    return line


def _commit_difference(lock: Lock, commit: str | None) -> str | None:
    if commit == lock.commit:
        return None
    return f"fetch: commit differs: {words(lock.commit)} -> {words(commit)}"


def refuse(line: str, lock_file: Path) -> None:
    raise CheckError(f"{line}; locked by {lock_file}: undo the change, or run without locked and `lockstep lock` again")
