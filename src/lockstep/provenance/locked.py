"""Compare artefacts with the lock, before and after they are made.

The first difference is named with its cause, and no later artefact is made from it.

Differences that are known before the work stop it (`check_project`, `check_step`): the parameters of checks, the
checkpoint's files, the device of a backend, and every input file. A stage's artefact is compared as soon as it is made
(`reject`). Other code and other packages are no difference while the artefacts are the same.
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
    TERMS,
    Lock,
    LockEntry,
    changes,
    entries_at,
    lock_path,
    made_by,
    made_with,
    terms,
    terms_place,
    without_places,
)
from lockstep.stages import STAGES, Job
from lockstep.stages.build import engines_place
from lockstep.targets import Results, Target

if TYPE_CHECKING:
    from lockstep.config.schema import Config


def is_locked(config: Mapping[str, Any]) -> bool:
    """Return `locked` of Snakemake's config, a text on its command line. Raises InputError for other values."""
    value = config.get("locked", False)
    is_locked = {"true": True, "false": False}.get(str(value).lower())
    if is_locked is None:
        raise InputError(f"locked: expected true or false, found {value!r}; correct it")
    return is_locked


def find_lock(model: str, folders: Sequence[Path]) -> Path:
    """Return the lock of a model in `locks/` of the first of `folders` that has one. Raises InputError without one."""
    for folder in folders:
        path = lock_path(folder / "locks", model)
        if path.is_file():
            return path
    places = " or ".join(dict.fromkeys(str(folder / "locks") for folder in folders))
    raise InputError(
        f"locked: expected {model}.lock.json in {places}, found none; write it with `lockstep "
        f"lock`, or run without locked"
    )


def check_project(lock_file: Path, steps: Sequence[Job], checkpoint: Sequence[Path] | None) -> None:
    """Check before a run that no artefact differs, or will differ, from the lock.

    steps: of the targets of the lock's model. checkpoint: the model's files in a local folder, None where a job fetches
    or makes them. Raises CheckError for the first difference.
    """
    lock = Lock.load(lock_file)
    if checkpoint is not None:
        digests = {path.name: digest(path) for path in checkpoint}
        expected = {name: value for name, value in without_places(lock.checkpoint).items() if name != "commit"}
        for (name, *_), change in changes(expected, digests):
            refuse(f"resolve: {name} differs: {change}", lock_file)
    for step in steps:
        if other := _other_terms(lock, step):
            refuse(other, lock_file)
        if STAGES[step.stage].builds_engines and not lock.devices(step.names["precision"], step.names["backend"]):
            refuse(f"{step}: its engines are not in the lock", lock_file)
        if not (step.output.is_file() and statement_path(step.output).is_file()):
            continue
        entries = entries_at(step.output)
        for entry in entries:
            if entry.where not in lock.entries:  # to make it again would not help
                refuse(f"{step}: {entry.where} is not in the lock", lock_file)
        if other := _other_result(step, lock, entries):
            # Without the lock a fetch stays at its commit.
            advice = f"make it again without locked: lockstep run -- --forcerun {step.stage} -- {step.output}"
            if _is_source(step):
                advice = f"delete {step.output.parent} and run again"
            raise CheckError(f"{other}, which is not what {lock_file} says; {advice}")


def not_in_config(lock_file: Path, targets: Collection[Target]) -> list[str]:
    """Return `<precision>/<layers>/<backend>` of golden tokens in a lock that are of no target."""
    names = {f"{target.precision}/{target.layers}/{target.backend}" for target in targets}
    start = f"{TERMS}/golden/"
    locked = [where.removeprefix(start) for where in Lock.load(lock_file).entries if where.startswith(start)]
    return sorted(set(locked) - names)


def _other_result(step: Job, lock: Lock, entries: Sequence[LockEntry]) -> str | None:
    """Return the first difference between a job's artefact and the lock, or its own manifest: every file is hashed."""
    if _is_source(step) and (line := other_commit(lock, Fetched.load(step.output).commit)):
        return line
    if line := _first_difference(entries, lock):
        return line
    for file in named_files(step.output):
        if size_of(file.path) is None or digest(file.path) != file.sha256:
            return f"{file.path} has changed"
    return None


def _is_source(step: Job) -> bool:
    return STAGES[step.stage].output == Results.source.pattern


def fetch_terms(config: Config, model: str, lock_file: Path | None) -> dict[str, Any]:
    """Return the parameters of `hub.fetch` that make it follow a lock.

    check: called with a folder of small files and its commit, before weights are downloaded: does the model fit the
    config, and is its commit the locked one? commit: the locked one, where the lock is of this source: its branch may
    have moved.
    """
    lock = None
    if lock_file:
        lock = Lock.load(lock_file)

    def check(folder: Path, commit: str) -> None:
        config.check_model(model, folder)
        if lock and lock_file and (line := other_commit(lock, commit)):
            refuse(line, lock_file)

    commit = None
    if lock and lock.checkpoint["source"] == config.models[model].source:
        commit = lock.commit
    return {"check": check, "commit": commit}


def check_step(step: Job, key: BuildKey, lock_file: Path) -> None:
    """Check before a stage that its inputs, parameters and device are as locked.

    Raises CheckError for an input that is not locked, other parameters or another device; InputError when a file of a
    manifest has changed.
    """
    lock = Lock.load(lock_file)
    for path in step.inputs.values():
        if statement_path(path).is_file():
            for entry in entries_at(path):
                if line := difference(lock, entry):
                    refuse(line, lock_file)
            check_files(named_files(path), "make it again")
    if line := _other_terms(lock, step):
        refuse(line, lock_file)
    if STAGES[step.stage].builds_engines and key.backend:
        *_, device = engines_place(step.names, key.backend)
        devices = lock.devices(step.names["precision"], step.names["backend"])
        if device not in devices:
            locked = " or ".join(sorted(devices)) or "none"
            refuse(f"{step.stage}: expected the device {locked}, found {device}, which is not in the lock", lock_file)


def reject(output: Path, lock_file: Path) -> str | None:
    """Return the first difference of an artefact from the lock, and delete its manifest then; None when it is equal."""
    line = _first_difference(entries_at(output), Lock.load(lock_file))
    if line is not None:
        for path in (output, statement_path(output)):
            path.unlink(missing_ok=True)
    return line


def _first_difference(entries: Sequence[LockEntry], lock: Lock) -> str | None:
    return next((line for entry in entries if (line := difference(lock, entry))), None)


def _other_terms(lock: Lock, step: Job) -> str | None:
    """Return the first parameter of a check that differs between config and lock; None where they agree."""
    if not STAGES[step.stage].is_check:
        return None
    locked = lock.entries.get(terms_place(step.stage, step.names))
    if locked is None:
        return f"{step}: the terms of this check are not in the lock"
    return next(
        (f"{step}: {'.'.join(where)} differs: {change}" for where, change in changes(locked, terms(step.options))), None
    )


def difference(lock: Lock, entry: LockEntry) -> str | None:
    """Return the first difference of an artefact from the lock, with possible causes; None when it is the same."""
    comparison = lock.compare(entry.where, entry.items)
    if not comparison.is_locked:
        return f"{entry.stage}: {entry.where} is not in the lock"
    if not comparison.changes:
        return None
    graph = next((change for change in comparison.changes if change[0][-1].endswith(".onnx")), None)
    where, change = graph or comparison.changes[0]
    opening = f"{entry.stage}: {'.'.join(where)} differs: {change}"
    if entry.where.startswith(f"{TERMS}/"):  # no code and no package changes these
        return opening
    causes = _causes(lock, entry)
    return f"{opening}{causes and f', made with {causes}'}"


def other_commit(lock: Lock, commit: str | None) -> str | None:
    return next((f"fetch: commit differs: {change}" for _, change in changes(lock.commit, commit)), None)


def _causes(lock: Lock, entry: LockEntry) -> str:
    now = made_with(entry.key)
    locked = lock.made_with.get(made_by(entry.key), now)
    return ", ".join(f"{' '.join(where).removeprefix('packages ')} {change}" for where, change in changes(locked, now))


def refuse(line: str, lock_file: Path) -> None:
    raise CheckError(f"{line}; locked by {lock_file}: undo the change, or run without locked and `lockstep lock` again")
