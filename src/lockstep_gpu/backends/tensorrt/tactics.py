"""The tactics of an engine set: chosen freely, recorded, or compared with a record.

A record is two files next to the engines: `timing.cache`, from which TensorRT chooses, and `tactics.json`, the choice
for each layer. TensorRT does not promise that equal caches give equal engines, so the choices are compared after the
build.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lockstep.artifacts import formats
from lockstep.artifacts.document import Document
from lockstep.artifacts.files import sha256_file, sha256_json, write_bytes
from lockstep.errors import CheckError, InputError
from lockstep_gpu.backends.tensorrt.layers import ChosenLayer, differences

MODES = ("free", "record", "verified")
CACHE = "timing.cache"
RECORD = "tactics.json"
_AGAIN = "build with tactics: record"


@dataclass(frozen=True)
class RecordedEngine:
    """The layers of an engine as they were chosen, and the digest of its graph."""

    graph_sha256: str
    layers: tuple[ChosenLayer, ...]

    @property
    def digest(self) -> str:
        return sha256_json([layer.to_json() for layer in self.layers])


@dataclass(frozen=True)
class TacticsRecord(Document):
    """The choices for a set of engines.

    made_by: JSON of all else that decides them. cached: of the timing cache of this digest, {entry: tactic}.
    """

    FORMAT: ClassVar[str] = formats.TACTICS
    made_by: Mapping[str, Any]
    cache_sha256: str
    engines: Mapping[str, RecordedEngine]
    cached: Mapping[str, str]


class Tactics:
    """The tactics of one engine set in `folder`; made_by: JSON of all else that decides them."""

    def __init__(self, mode: str, folder: Path, made_by: Mapping[str, Any]):
        """Read the record, unless free. Raises InputError for a mode; CheckError (`verified`) for a bad record."""
        if mode not in MODES:
            raise InputError(f"tactics: expected one of {', '.join(MODES)}, found {mode!r}")
        self.mode = mode
        self.folder = folder
        self.made_by = made_by
        self.engines: dict[str, RecordedEngine] = {}
        self.cached: dict[str, str] = {}
        self.cache = b""
        if mode == "free":
            return
        problem = self._read()
        if problem and mode == "verified":
            raise CheckError(f"{problem}; {_AGAIN}")

    def keeps(self, name: str, digest: str) -> bool:
        """Return whether an engine's digest of tactics is the recorded one; mode `free` keeps every engine."""
        return self.mode == "free" or name in self.engines and self.engines[name].digest == digest

    def _read(self) -> str | None:
        """Read the record into this object; return the reason why it cannot be used, or None."""
        path = self.folder / RECORD
        cache = self.folder / CACHE
        try:
            record = TacticsRecord.load(path)
        except InputError as error:
            return str(error).partition(";")[0]
        for key in sorted({*record.made_by, *self.made_by}):
            recorded = record.made_by.get(key)
            current = self.made_by.get(key)
            if recorded != current:
                return f"{path}: {key}: expected {_text(current, recorded)}, found {_text(recorded, current)}"
        if not cache.is_file():
            return f"{cache}: expected sha256 {record.cache_sha256}, found no file"
        if sha256_file(cache) != record.cache_sha256:
            return f"{cache}: expected sha256 {record.cache_sha256}, found other bytes"
        self.engines = dict(record.engines)
        self.cached = dict(record.cached)
        self.cache = cache.read_bytes()
        return None

    def take(self, name: str, graph_sha256: str, layers: Sequence[ChosenLayer], where: str) -> str:
        """Record an engine's choices, or compare them (`verified`: CheckError for a difference); return a digest."""
        if self.mode == "verified":
            expected = f"{self.folder / RECORD}: expected the tactics of {name}, found"
            recorded = self.engines.get(name)
            if recorded is None:
                raise CheckError(f"{expected} none of this engine; {_AGAIN}")
            if recorded.graph_sha256 != graph_sha256:
                raise CheckError(f"{expected} those of another graph; {_AGAIN}")
            if line := next(differences(recorded.layers, layers, where), None):
                raise CheckError(line)
        self.engines[name] = RecordedEngine(graph_sha256, tuple(layers))
        return self.engines[name].digest

    def take_cache(self, cache: bytes, cached: Mapping[str, str], where: str) -> None:
        """Record the cache after each engine, or check it (`verified`: CheckError for another entry).

        A build that is to fail at an entry that the cache lacks may add one all the same: then the cache is another.
        Versions whose entries cannot be read keep its bytes where they add none.
        """
        if self.mode == "verified":
            if not cached and cache != self.cache:
                raise CheckError(f"{where}: timing cache: expected the recorded bytes after the build, found others")
            for key, tactic in cached.items():
                if self.cached.get(key) != tactic:
                    raise CheckError(
                        f"{where}: timing cache, {key}: expected tactic "
                        f"{self.cached.get(key, 'none')} as recorded, found {tactic}"
                    )
        elif self.mode == "record":
            write_bytes(self.folder / CACHE, cache)
            self.cached = dict(cached)
            self._write()

    def finish(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the manifest's entry: the mode and the record's files; drop engines not in `names` from it."""
        if self.mode == "free":
            return {"mode": self.mode}
        if self.mode == "record" and set(self.engines) != set(names):
            self.engines = {name: self.engines[name] for name in names}
            self._write()
        files = [{"file": name, "sha256": sha256_file(self.folder / name)} for name in (CACHE, RECORD)]
        return {"mode": self.mode, "files": files}

    def _write(self) -> None:
        record = TacticsRecord(self.made_by, sha256_file(self.folder / CACHE), self.engines, self.cached)
        record.save(self.folder / RECORD)


def _text(value: object, other: object) -> str:
    """Return a value for a message; of a mapping only what differs from the other one."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        differing = [f"{key} {item}" for key, item in value.items() if key not in other or other[key] != item]
        return ", ".join(differing + [f"no {key}" for key in other if key not in value])
    return str(value)
