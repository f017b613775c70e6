"""The lock of a model: `locks/<model>.lock.json` in and out, the artefacts of a tree as in it, and what differs.

A lock is flat, sorted and committed: at each place the digests of one artefact, or the parameters with which a check
passed. An entry comes from the manifest of the artefact and from its statement.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lockstep.artifacts import formats
from lockstep.artifacts.document import Bound, JsonObject, Key, ValidationError, check_depth
from lockstep.artifacts.files import dump_json, read_json, sha256_json, write_bytes
from lockstep.artifacts.statement import SUFFIX, BuildKey, Statement, statement_path
from lockstep.errors import CheckError, InputError, LockstepError
from lockstep.manifests.manifest_files import manifest_entries
from lockstep.provenance.statements import read_statement, statement_paths
from lockstep.stages import STAGES, jobs
from lockstep.targets import Results

if TYPE_CHECKING:
    from lockstep.config.schema import Config

MADE = "made with"
LOCKED = "locked"
# First parts of places: parameters of checks, the checkpoint, engines. Others are names of stages.
PARAMETERS = "checks"
CHECKPOINT = "checkpoint"
ENGINES = "engines"
_ORIGIN = "source"  # of the checkpoint; not compared, for the same files may be in another folder
Place = str  # such as engines/fp16/onnxruntime/x86_64
Items = Mapping[str, Any]
_COMMITTED = "take the lock as it was committed, or delete it; `lockstep lock` writes a new one"
_STAGE = Bound("a stage", lambda name: name.partition("/")[0] in STAGES)
_DEVICE = ("name", "device", "portable")  # keys of a backend that the place of its engines has already
ABSENT = object()  # a side of a difference that has no value, for None is a value
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Published(JsonObject):
    """A bundle in a registry. digest: `sha256:...`, of its manifest."""

    reference: str
    digest: str


@dataclass(frozen=True)
class Comparison:
    """Differences of an artefact, (name, "locked -> found"). is_locked: whether the lock has its place."""

    is_locked: bool
    changes: tuple[tuple[tuple[str, ...], str], ...] = ()


@dataclass(frozen=True)
class Lock(JsonObject):
    """The lock of a model.

    made_with: {stage/backend: code and packages}, which decides nothing, and names the cause where an artefact differs.
    entries: {place: {name: locked value}}: of the checkpoint its source, its commit where there is one, and the sha256
    of its files; of weights, graphs and engines {file: sha256}; of references and golden checks {prompt: token ids}; of
    checks their parameters. published: {target: bundle in a registry}.
    """

    model: str
    made_with: Annotated[Mapping[Annotated[str, _STAGE], Items], Key(MADE)]
    entries: Annotated[Mapping[Place, Items], Key(LOCKED)]
    published: Mapping[str, Published] = field(default_factory=dict)

    def validate(self, stored: Mapping[str, Any]) -> None:
        checkpoint = self.entries.get(CHECKPOINT, {})
        if "source" not in checkpoint or not all(isinstance(value, str) for value in checkpoint.values()):
            raise ValidationError(f"{LOCKED}.{CHECKPOINT}", "texts, among them the source", checkpoint)

    @classmethod
    def load(cls, path: Path, form: str = formats.LOCK) -> Lock:
        """Read a lock. Raises InputError for a file that is absent or no lock of this form."""
        value = read_json(path, form, absent="write one with `lockstep lock`", damaged=_COMMITTED)
        try:
            check_depth(value)
            return cls.from_json(value)
        except ValidationError as error:
            raise InputError(f"{path}: {error}; {_COMMITTED}") from None

    def save(self, path: Path) -> None:
        write_bytes(path, dump_json({"format": formats.LOCK, **self.to_json()}).encode())

    @property
    def checkpoint(self) -> Items:
        return self.entries[CHECKPOINT]

    @property
    def commit(self) -> str | None:
        """Return the hub's commit that the checkpoint is of; None for a folder."""
        return self.checkpoint.get("commit")

    def devices(self, precision: str, backend: str) -> dict[str, Items]:
        kind = f"{ENGINES}/{precision}/{backend}"
        return {where.split("/")[-1]: items for where, items in self.entries.items() if kind_of(where) == kind}

    def compare(self, where: Place, items: Items) -> Comparison:
        """Compare an artefact with the entry of its place. Every comparison with a lock is this one."""
        locked = self.entries.get(where)
        # An artefact that is not locked is no difference, but a locked run must refuse it.
        if locked is None:
            return Comparison(False)
        return Comparison(True, tuple(changes(without_origin(locked), without_origin(items))))


def kind_of(where: Place) -> str:
    """Return the place of engines without their device."""
    return where.rpartition("/")[0]


def is_absent(where: Place, not_run: Iterable[str]) -> bool:
    """Return whether a place has no artefact where engines are not run.

    not_run: backends, whose engines are still built, and `<precision>/<backend>`, whose engines are not.
    """
    kind, *parts = where.split("/")
    return any({*parts} >= {*name.split("/")} and (kind != ENGINES or "/" in name) for name in not_run)


def without_origin(items: Items) -> dict[str, Any]:
    return {name: value for name, value in items.items() if name != _ORIGIN}


def lock_path(folder: Path, model: str) -> Path:
    return folder / f"{model}.lock.json"


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
    # A machine has engines only of its devices.
    built = [
        target
        for target in config.targets()
        if target.model == model and tree.engines(model, target.precision, target.backend).is_file()
    ]
    if not built:
        raise InputError(
            f"{results / model}: expected a model of {tree.config()}, found no engines of one; run its config first"
        )
    entries = list(lock_entries(results, model))
    finished_stages = {entry.stage for entry in entries}
    for job in jobs(config, results, built):
        if STAGES[job.stage].is_locked and job.stage not in finished_stages:
            raise InputError(
                f"{results / model}: expected a finished model, found nothing of {job.stage}; run `lockstep run` first"
            )
    return lock_of(model, entries)


def config_of(results: Path) -> Config:
    # This loads pydantic, which `lockstep verify` must not need.
    from lockstep.config.load import load

    path = Results(results).config()
    return load(read_json(path), where=str(path))


def lock_of(model: str, entries: Iterable[LockEntry]) -> Lock:
    entries = list(entries)
    causes = {made_by(entry.key): made_with(entry.key) for entry in entries}
    return Lock(model, causes, {entry.where: entry.items for entry in entries})


def made_by(key: BuildKey) -> str:
    """Return the key of an artefact in a lock's `made_with`: the stage, and the backend where it has one."""
    if "backend" not in key.names:
        return key.stage
    return f"{key.stage}/{key.names['backend']}"


def made_with(key: BuildKey) -> Items:
    """Return the code, packages, options and library of a stage, as in a lock. A check's options have an entry."""
    causes = {"code": sha256_json(key.code), "packages": key.environment}
    if not STAGES[key.stage].is_check:
        causes["options"] = key.options
    if backend := {name: value for name, value in (key.backend or {}).items() if name not in _DEVICE}:
        causes["backend"] = backend
    # The round trip gives the types of a lock read from a file: a tuple would differ from its list.
    return json.loads(dump_json(causes))


def parameters_place(stage: str, names: Mapping[str, Any]) -> Place:
    """Return the place of a check's parameters in a lock. names: precision, layers, backend, where it has them."""
    values = [str(names[key]) for key in ("precision", "layers", "backend") if key in names]
    return "/".join([PARAMETERS, stage, *values])


def locked_parameters(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a check's options as in a lock: tolerances, prompts, lengths, limits, expected texts."""
    return _numbered(json.loads(dump_json(options)))


def _numbered(value: Any) -> Any:
    """Return a value with its lists as mappings of numbers, so that a difference in them has a place too."""
    if isinstance(value, Mapping):
        return {name: _numbered(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        # Zero-padded: keys sort as text, and must keep the order of the list.
        return {f"{number:03d}": _numbered(item) for number, item in enumerate(value)}
    return value


def lock_entries(results: Path, model: str) -> Iterator[LockEntry]:
    for path in statement_paths(results / model):
        yield from entries_of(path)


def readable_entries(folder: Path) -> dict[Place, LockEntry]:
    """Return {place: entry} below a model's folder, in order, without those that are damaged or being made."""
    entries: dict[Place, LockEntry] = {}
    for path in statement_paths(folder):
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
            f"{manifest}: expected the file that {path.name} describes, found {actual}; delete it and run again"
        )
    entries = []
    if stage.is_pinned:
        with manifest_entries(manifest):
            where, items = stage.pin(manifest, key)
        entries.append(LockEntry("/".join(where), key, items))
    if stage.is_check:
        entries.append(LockEntry(parameters_place(key.stage, key.names), key, locked_parameters(key.options)))
    return entries


def entries_at(output: Path) -> list[LockEntry]:
    return entries_of(statement_path(output))


def changes(before: Any, after: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (place, "before -> after") of each value that differs, in order of names."""
    for where, old, new in differences(before, after):
        yield where, change(old, new)


def differences(before: Any, after: Any, where: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield (place, before, after) of each value that differs, in order of names. A missing value is ABSENT."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in sorted({*before, *after}):
            yield from differences(before.get(name, ABSENT), after.get(name, ABSENT), (*where, str(name)))
    elif before != after:
        yield where, before, after


def change(before: Any, after: Any) -> str:
    if before is ABSENT:
        return f"new, {words(after)}"
    if after is ABSENT:
        return f"gone, was {words(before)}"
    return f"{words(before)} -> {words(after)}"


def words(value: Any) -> str:
    """Return a value as part of a line: the first 12 digits of a digest, the number of entries of a mapping."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return f"{len(value)} entries"
    if isinstance(value, (list, tuple)):
        return " ".join(map(words, value))
    text = str(value)
    if _DIGEST.fullmatch(text):
        return text[:12]
    return text
