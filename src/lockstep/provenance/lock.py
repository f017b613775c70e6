"""The lock of a model as a type: `locks/<model>.lock.json` in and out, and the one comparison with it.

A lock is flat: at each place what one artefact must be, by name, or the parameters of one check. `Maker` says what made
them; it decides nothing, and names the cause where an artefact differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from lockstep.artifacts import formats
from lockstep.artifacts.document import Bound, JsonObject, Key, ValidationError
from lockstep.artifacts.files import dump_json, read_json, write_bytes
from lockstep.errors import InputError
from lockstep.provenance.diff import changes, check_depth
from lockstep.stages import STAGES

MADE, LOCKED, TERMS = "made with", "locked", "checks"
CHECKPOINT, ENGINES = "checkpoint", "engines"
_ELSEWHERE = ("source",)  # recorded where a model comes from, and not compared: it may lie elsewhere
Place = tuple[str, ...]  # in the file joined by "/"
Items = Mapping[str, Any]
_COMMITTED = "take the lock as it was committed, or write it again with `lockstep lock`"
_STAGE = Bound("a stage", lambda name: name.partition("/")[0] in STAGES)


@dataclass(frozen=True)
class Maker(JsonObject):
    """The code, packages, options and library that made a stage's artefacts.

    code: sha256 of the code's digests. packages: versions by name. options: None for a check, whose options are terms.
    backend: version, revision and options of the library; None where no backend takes part. operators: of graphs, by
    precision and file, sha256 of all but their constants; None for other stages.
    """

    code: str
    packages: Mapping[str, str]
    options: Items | None = None
    backend: Items | None = None
    operators: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Published(JsonObject):
    """A bundle in a registry. digest: `sha256:...`, of its manifest."""

    reference: str
    digest: str


@dataclass(frozen=True)
class _File(JsonObject):
    """The content of a lock file."""

    model: str
    makers: Annotated[Mapping[Annotated[str, _STAGE], Maker], Key(MADE)]
    sections: Annotated[Mapping[str, Mapping[str, Any]], Key(LOCKED)]
    published: Mapping[str, Published] = field(default_factory=dict)

    def validate(self, stored: Mapping[str, Any]) -> None:
        checkpoint = self.sections.get(CHECKPOINT, {})
        if "source" not in checkpoint or not all(isinstance(value, str) for value in checkpoint.values()):
            raise ValidationError(f"{LOCKED}.{CHECKPOINT}", "texts, among them the source", checkpoint)


@dataclass(frozen=True)
class Comparison:
    """An artefact beside a lock.

    is_locked: the lock has its place. changes: (name, "locked -> found") of what differs. other_device: the lock has
    engines of this kind, of other devices alone.
    """

    is_locked: bool
    changes: tuple[tuple[Place, str], ...] = ()
    other_device: bool = False


@dataclass(frozen=True)
class Lock:
    """The lock of a model.

    makers: what made the artefacts, by stage and backend. sections: by place what is locked there, by name: of the
    checkpoint its source, its commit where there is one, and the sha256 of its files; of weights, graphs and engines
    the sha256 by file; of references and golden checks token ids by prompt; of checks their parameters.
    published: bundles in registries, by target.
    """

    model: str
    makers: Mapping[str, Maker]
    sections: Mapping[Place, Items]
    published: Mapping[str, Published] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Lock:
        """Read a lock. Raises InputError for a file that is absent or no lock."""
        value = read_json(path, formats.LOCK, absent="write one with `lockstep lock`", damaged=_COMMITTED)
        try:
            check_depth(value)
            file = _File.from_json(value)
        except ValidationError as error:
            raise InputError(f"{path}: {error}; {_COMMITTED}") from None
        sections = {tuple(name.split("/")): items for name, items in file.sections.items()}
        return cls(file.model, file.makers, sections, file.published)

    def save(self, path: Path) -> None:
        write_bytes(path, dump_json({"format": formats.LOCK, **self._json()}).encode())

    def _json(self) -> dict[str, Any]:
        sections = {"/".join(where): items for where, items in self.sections.items()}
        return _File(self.model, self.makers, sections, self.published).to_json()

    @property
    def checkpoint(self) -> Items:
        return self.sections[(CHECKPOINT,)]

    @property
    def commit(self) -> str | None:
        """Return the hub's commit that the checkpoint is of; None for a folder."""
        return self.checkpoint.get("commit")

    def devices(self, precision: str, backend: str) -> dict[str, Items]:
        kind = (ENGINES, precision, backend)
        return {where[-1]: items for where, items in self.sections.items() if where[:-1] == kind}

    def compare(self, where: Place, items: Items) -> Comparison:
        """Compare an artefact with what is locked at its place."""
        locked = self.sections.get(where)
        if locked is None:
            other = where[0] == ENGINES and any(place[:-1] == where[:-1] for place in self.sections)
            return Comparison(False, other_device=other)
        return Comparison(True, tuple(changes(without_places(locked), without_places(items))))


def without_places(items: Items) -> dict[str, Any]:
    return {name: value for name, value in items.items() if name not in _ELSEWHERE}


def diff(first: Path, second: Path) -> list[tuple[Place, str]]:
    """Return what differs between two lock files: where, and both values.

    Raises InputError for a file that is no lock.
    """
    files = [Lock.load(path)._json() for path in (first, second)]
    one, other = ({**file.pop(LOCKED), **file} for file in files)
    return list(changes(one, other))


def lock_path(folder: Path, model: str) -> Path:
    return folder / f"{model}.lock.json"
