"""The lock of a model as a type: `locks/<model>.lock.json` in and out.

A lock is made of sections, each at its place: what one artefact must be, by name, or the terms of one check. `Maker`
says what made them; it decides nothing, and names the cause where an artefact differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.artifacts import formats
from lockstep.artifacts.files import dump_json, read_json, write_bytes
from lockstep.errors import InputError
from lockstep.pipeline.stages import STAGES
from lockstep.provenance.shapes import LOCK, misfit

MADE, TERMS, RESULTS = "made with", "checks", "results"
Place = tuple[str, ...]
Items = Mapping[str, Any]


@dataclass(frozen=True)
class Maker:
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

    @classmethod
    def from_json(cls, value: Items) -> Maker:
        optional = (value.get(name) for name in ("options", "backend", "operators"))
        return cls(value["code"], value["packages"], *optional)

    def to_json(self) -> dict[str, Any]:
        return _present(
            code=self.code, packages=self.packages, options=self.options, backend=self.backend, operators=self.operators
        )


@dataclass(frozen=True)
class LockedPrecision:
    """The locked artefacts of a model in one precision.

    weights, graphs: sha256 by file. engines: {backend: {device: {file: sha256}}}. golden: {backend: {layers: {prompt:
    token ids}}}. None where nothing of that kind is locked.
    """

    weights: Mapping[str, str] | None = None
    graphs: Mapping[str, str] | None = None
    engines: Mapping[str, Mapping[str, Items]] | None = None
    golden: Mapping[str, Mapping[str, Mapping[str, str]]] | None = None

    @classmethod
    def from_json(cls, value: Items) -> LockedPrecision:
        return cls(value.get("weights"), value.get("graphs"), value.get("engines"), value.get("golden"))

    def to_json(self) -> dict[str, Any]:
        return _present(weights=self.weights, graphs=self.graphs, engines=self.engines, golden=self.golden)

    def section(self, where: Place) -> Items | None:
        """Return the section at a place below the precision; None where there is none."""
        if where == ("weights",):
            return self.weights
        if where == ("graphs",):
            return self.graphs
        kind, backend, name = where
        return ((self.engines if kind == "engines" else self.golden) or {}).get(backend, {}).get(name)

    def places(self) -> Iterator[Place]:
        """Yield the places of the sections, below the precision."""
        yield from ((name,) for name in ("weights", "graphs") if getattr(self, name) is not None)
        for kind, found in (("engines", self.engines), ("golden", self.golden)):
            yield from ((kind, backend, name) for backend, names in (found or {}).items() for name in names)


@dataclass(frozen=True)
class Lock:
    """The lock of a model.

    makers: what made the artefacts, by stage and backend. checkpoint: source, commit where there is one, sha256 by
    file. reference: {layers: {prompt: token ids}}. checks: the terms, {stage: {name: terms}}. results: of stages
    without a place of their own, {stage: {name: {file or prompt: sha256 or token ids}}}; None where there is none.
    """

    model: str
    makers: Mapping[str, Maker]
    checkpoint: Mapping[str, str]
    reference: Mapping[str, Mapping[str, str]]
    precisions: Mapping[str, LockedPrecision] = field(default_factory=dict)
    checks: Mapping[str, Mapping[str, Items]] = field(default_factory=dict)
    results: Mapping[str, Mapping[str, Mapping[str, str]]] | None = None

    @classmethod
    def load(cls, path: Path) -> Lock:
        """Read a lock. Raises InputError for a file that is absent or no lock."""
        return cls.from_json(read_document(path))

    def save(self, path: Path) -> None:
        write_bytes(path, dump_json(self.to_json()).encode())

    @classmethod
    def from_json(cls, value: Items) -> Lock:
        """Take the content of a lock file that is known to be one."""
        return cls(
            model=value["model"],
            makers={name: Maker.from_json(entry) for name, entry in value[MADE].items()},
            checkpoint=value["checkpoint"],
            reference=value["reference"],
            precisions={name: LockedPrecision.from_json(entry) for name, entry in value["precisions"].items()},
            checks=value[TERMS],
            results=value.get(RESULTS),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "format": formats.LOCK,
            "model": self.model,
            MADE: {name: maker.to_json() for name, maker in self.makers.items()},
            "checkpoint": self.checkpoint,
            "reference": self.reference,
            "precisions": {name: locked.to_json() for name, locked in self.precisions.items()},
            TERMS: self.checks,
            **_present(results=self.results),
        }

    @property
    def commit(self) -> str | None:
        """Return the hub's commit that the checkpoint is of; None for a folder."""
        return self.checkpoint.get("commit")

    def section(self, where: Place) -> Items | None:
        """Return the section at a place; None where there is none."""
        part, *names = where
        if part == "checkpoint":
            return self.checkpoint
        if part == "reference":
            return self.reference.get(names[0])
        if part == "precisions":
            locked = self.precisions.get(names[0])
            return None if locked is None else locked.section(tuple(names[1:]))
        stage, name = names
        return (self.checks if part == TERMS else self.results or {}).get(stage, {}).get(name)

    def devices(self, precision: str, backend: str) -> Mapping[str, Items] | None:
        """Return what is locked of a backend's engines, by device; None where nothing is."""
        locked = self.precisions.get(precision, LockedPrecision())
        return (locked.engines or {}).get(backend)

    def places(self) -> Iterator[Place]:
        """Yield the places of all sections."""
        yield ("checkpoint",)
        yield from (("reference", layers) for layers in self.reference)
        for part, found in ((TERMS, self.checks), (RESULTS, self.results or {})):
            yield from ((part, stage, name) for stage, names in found.items() for name in names)
        for precision, locked in self.precisions.items():
            yield from (("precisions", precision, *place) for place in locked.places())


def _present(**entries: Any) -> dict[str, Any]:
    return {name: value for name, value in entries.items() if value is not None}


_COMMITTED = "take the lock as it was committed, or write it again with `lockstep lock`"


def lock_path(folder: Path, model: str) -> Path:
    return folder / f"{model}.lock.json"


def read_document(path: Path) -> dict[str, Any]:
    """Read the JSON of a lock. Raises InputError for a file that is absent or no lock."""
    document = read_json(path, formats.LOCK, absent="write one with `lockstep lock`", damaged=_COMMITTED)
    wrong = misfit(document, LOCK) or next(
        (
            f"{MADE}: expected stages, found {name!r}"
            for name in sorted(document[MADE])
            if name.split("/")[0] not in STAGES
        ),
        None,
    )
    if wrong:
        raise InputError(f"{path}: {wrong}; {_COMMITTED}")
    return document
