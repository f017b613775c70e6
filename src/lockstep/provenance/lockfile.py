"""The lock of a finished results tree, and the artefacts of a tree as a lock holds them.

The file is sorted, and is committed. Its entries have the digests of each artefact, and the parameters with which each
check passed. An entry comes from the manifest of the artefact and from its statement. The lock also records for each
stage the code, packages and library: these decide nothing, and name the cause of a difference.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.artifacts.files import dump_json, read_json, sha256_json
from lockstep.artifacts.statement import SUFFIX, BuildKey, Statement, statement_path
from lockstep.errors import CheckError, InputError, LockstepError
from lockstep.manifests.manifest_files import manifest_entries
from lockstep.provenance.lock import TERMS, Comparison, Lock, MadeWith, Place
from lockstep.provenance.statements import read_statement, statements
from lockstep.stages import STAGES, jobs
from lockstep.targets import Results

if TYPE_CHECKING:
    from lockstep.config.schema import Config


@dataclass(frozen=True)
class LockEntry:
    """An artefact, or the parameters of a check, as an entry of a lock.

    where: its place in the lock. key: its build key. items: {name: locked value}.
    """

    where: Place
    key: BuildKey
    items: Mapping[str, Any]

    @property
    def stage(self) -> str:
        return self.key.stage


def collect(results: Path, model: str) -> Lock:
    """Return the lock of a results tree. Raises InputError for a model that is not finished."""
    tree = Results(results)
    config = config_of(results)
    # A machine has the engines of its own devices only.
    built = [
        target
        for target in config.targets()
        if target.model == model and tree.engines(model, target.precision, target.backend).is_file()
    ]
    if not built:
        raise InputError(
            f"{results / model}: expected a model of {tree.config()}, found no engines of one; run its config first"
        )
    pinned = list(lock_entries(results, model))
    pinned_stages = {entry.stage for entry in pinned}
    for stage in dict.fromkeys(job.stage for job in jobs(config, results, built)):
        if STAGES[stage].is_locked and stage not in pinned_stages:
            raise InputError(
                f"{results / model}: expected a finished model, found nothing of {stage}; run `lockstep run` first"
            )
    return lock_of(model, pinned)


def config_of(results: Path) -> Config:
    from lockstep.config.load import load  # loads pydantic, which verify must not need

    path = Results(results).config()
    return load(read_json(path), where=str(path))


def lock_of(model: str, pinned: Iterable[LockEntry]) -> Lock:
    pinned = list(pinned)
    causes = {made_by(entry.key): made_with(entry.key) for entry in pinned}
    return Lock(model, causes, {entry.where: entry.items for entry in pinned})


def made_by(key: BuildKey) -> str:
    """Return the key of an artefact in a lock's `made_with`: the stage, and the backend where it has one."""
    if "backend" not in key.names:
        return key.stage
    return f"{key.stage}/{key.names['backend']}"


def made_with(key: BuildKey) -> MadeWith:
    """Return the code, packages and library of a stage, as in a lock."""
    backend = {name: value for name, value in (key.backend or {}).items() if name not in ("name", "device", "portable")}
    options = None
    if not STAGES[key.stage].is_check:  # a check's options have an entry
        options = json.loads(dump_json(key.options))
    return MadeWith(sha256_json(key.code), key.environment, options, json.loads(dump_json(backend)) or None)


def terms_place(stage: str, names: Mapping[str, Any]) -> Place:
    """Return the place of a check's parameters in the lock of its model.

    names: precision, layers and backend, those that the stage has.
    """
    return "/".join([TERMS, stage, *(str(names[key]) for key in ("precision", "layers", "backend") if key in names)])


def terms(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a check's options as in a lock: tolerances, prompts, lengths, limits, expected texts."""
    return _numbered(json.loads(dump_json(options)))


def _numbered(value: Any) -> Any:
    """Return a value with its lists as mappings of numbers, so that a difference in them has a place too."""
    if isinstance(value, Mapping):
        return {name: _numbered(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return {f"{number:03d}": _numbered(item) for number, item in enumerate(value)}
    return value


def lock_entries(results: Path, model: str) -> Iterator[LockEntry]:
    for path in statements(results / model):
        yield from entries_of(path)


def readable_entries(folder: Path) -> dict[Place, LockEntry]:
    """Return {place: entry} below a model's folder, in order, without those that are damaged or being made."""
    entries: dict[Place, LockEntry] = {}
    for path in statements(folder):
        with contextlib.suppress(LockstepError, OSError):
            entries |= {entry.where: entry for entry in entries_of(path)}
    return dict(sorted(entries.items()))


def compared(folder: Path, lock: Lock) -> dict[Place, Comparison]:
    return {where: lock.compare(where, entry.items) for where, entry in readable_entries(folder).items()}


def entries_of(path: Path) -> list[LockEntry]:
    """Return the entries of the statement at `path`; none for artefacts that are not locked, such as a report.

    Raises InputError or CheckError when statement and manifest are damaged or do not belong together.
    """
    key = Statement.load(path).key
    manifest = path.with_name(f"{path.name.removesuffix(SUFFIX)}.json")
    stage = STAGES.get(key.stage)
    if stage is None or not stage.is_locked:
        return []
    if read_statement(manifest) is None:
        actual = "another" if manifest.is_file() else "none"
        raise CheckError(
            f"{manifest}: expected the file that {path.name} is of, found {actual}; delete it and run again"
        )
    pinned = []
    if stage.is_pinned:
        with manifest_entries(manifest):
            where, items = stage.pin(manifest, key)
        pinned.append(LockEntry("/".join(where), key, items))
    if stage.is_check:
        pinned.append(LockEntry(terms_place(key.stage, key.names), key, terms(key.options)))
    return pinned


def entries_at(output: Path) -> list[LockEntry]:
    return entries_of(statement_path(output))
