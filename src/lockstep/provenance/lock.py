"""The lock of a model as a type: `locks/<model>.lock.json` in and out, and the one comparison with it.

A lock is flat: at each place the digests of one artefact, or the parameters of one check. `MadeWith` records the code
and packages that made them; it decides nothing, and names the cause where an artefact differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from lockstep.artifacts import formats
from lockstep.artifacts.document import Bound, JsonObject, Key, ValidationError, check_depth
from lockstep.artifacts.files import dump_json, read_json, write_bytes
from lockstep.errors import InputError
from lockstep.provenance.diff import changes
from lockstep.stages import STAGES

MADE = "made with"
LOCKED = "locked"
TERMS = "checks"
CHECKPOINT = "checkpoint"
ENGINES = "engines"
_ELSEWHERE = ("source",)  # the origin of a model, which is not compared: it may be another folder
Place = str  # such as engines/fp16/onnxruntime/x86_64
Items = Mapping[str, Any]
_COMMITTED = "take the lock as it was committed, or delete it; `lockstep lock` writes a new one"
_STAGE = Bound("a stage", lambda name: name.partition("/")[0] in STAGES)


@dataclass(frozen=True)
class MadeWith(JsonObject):
    """The code, packages, options and library that made a stage's artefacts.

    code: sha256 of the code's digests. packages: {name: version}. options: None for a check, whose options are locked.
    backend: version, revision and options of the library; None where no backend takes part.
    """

    code: str
    packages: Mapping[str, str]
    options: Items | None = None
    backend: Items | None = None


@dataclass(frozen=True)
class Published(JsonObject):
    """A bundle in a registry. digest: `sha256:...`, of its manifest."""

    reference: str
    digest: str


@dataclass(frozen=True)
class Comparison:
    """An artefact compared with a lock.

    is_locked: the lock has its place. changes: (name, "locked -> found") of what differs.
    """

    is_locked: bool
    changes: tuple[tuple[tuple[str, ...], str], ...] = ()


@dataclass(frozen=True)
class Lock(JsonObject):
    """The lock of a model.

    made_with: {stage/backend: code and packages}. entries: {place: {name: locked value}}: of the checkpoint its source,
    its commit where there is one, and the sha256 of its files; of weights, graphs and engines {file: sha256}; of
    references and golden checks {prompt: token ids}; of checks their parameters. published: {target: bundle in a
    registry}.
    """

    model: str
    made_with: Annotated[Mapping[Annotated[str, _STAGE], MadeWith], Key(MADE)]
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
        return {split(where)[-1]: items for where, items in self.entries.items() if kind_of(where) == kind}

    def compare(self, where: Place, items: Items) -> Comparison:
        """Compare an artefact with the entry of its place. Every comparison with a lock is this one."""
        locked = self.entries.get(where)
        if locked is None:
            return Comparison(False)
        return Comparison(True, tuple(changes(without_places(locked), without_places(items))))


def split(where: Place) -> list[str]:
    return where.split("/")


def kind_of(where: Place) -> str:
    """Return the place of engines without their device."""
    return where.rpartition("/")[0]


def is_absent(where: Place, not_run: Iterable[str]) -> bool:
    """Return whether a place has no artefact where engines are not run.

    not_run: backends, whose engines are still built, and `<precision>/<backend>`, whose engines are not.
    """
    kind, *parts = split(where)
    return any({*parts} >= {*split(name)} and (kind != ENGINES or "/" in name) for name in not_run)


def without_places(items: Items) -> dict[str, Any]:
    return {name: value for name, value in items.items() if name not in _ELSEWHERE}


def lock_path(folder: Path, model: str) -> Path:
    return folder / f"{model}.lock.json"
