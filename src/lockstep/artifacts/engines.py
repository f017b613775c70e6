"""The manifest of an engine set: its files, their sources and the device.

`engines.json` in and out. Types and ranges are checked. What a backend says of an engine or of the whole set
(`details`) is its own: nothing else reads it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.artifacts import formats
from lockstep.artifacts.files import sha256_json, write_json
from lockstep.artifacts.manifests import DIGEST, FILE, LARGEST, NAME, PRECISION, SIZE, SLOTS, TENSORS, read_checked
from lockstep.artifacts.schema import integer, items, mapping, optional, record
from lockstep.artifacts.signature import IO

_LIMITS = ("max_batch_size", "max_seq_len", "max_num_tokens")
_ENGINE = record(
    {"file": FILE, "sha256": DIGEST, "graph_sha256": DIGEST}, {"slots": SLOTS, "parts": mapping(TENSORS, NAME)}
)
_SCHEMA = record(
    {
        "backend": NAME,
        "backend_version": NAME,
        "precision": PRECISION,
        "device": record({}, {"architecture": NAME, "isa": items(NAME, 1000)}),
        "engines": mapping(_ENGINE, FILE),
        "options": record({}, {name: optional(SIZE) for name in _LIMITS}),
    },
    {"builder_revision": integer(0, LARGEST), "digest": DIGEST},
)


@dataclass(frozen=True)
class EngineFile:
    """An engine of a set: its file beside engines.json, with digests.

    sha256: of the file. graph_sha256: of its graph. slots, parts: the weight slots and {slot: slots of the graph} where
    the build made others than the graph's, else None. details: JSON of what the backend says of the engine besides.
    """

    file: str
    sha256: str
    graph_sha256: str
    slots: tuple[IO, ...] | None = None
    parts: Mapping[str, Sequence[str]] | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EngineFile:
        own = ("file", "sha256", "graph_sha256", "slots", "parts")
        slots = tuple(map(IO.from_json, value["slots"])) if "slots" in value else None
        details = {key: item for key, item in value.items() if key not in own}
        return cls(value["file"], value["sha256"], value["graph_sha256"], slots, value.get("parts"), details)

    def to_json(self) -> dict[str, Any]:
        slots = {"slots": [slot.to_json() for slot in self.slots]} if self.slots is not None else {}
        parts = {"parts": self.parts} if self.parts is not None else {}
        named = {"file": self.file, "sha256": self.sha256, "graph_sha256": self.graph_sha256}
        return {**self.details, **named, **slots, **parts}


@dataclass(frozen=True)
class EngineSetManifest:
    """The engines of one assembly on one backend.

    device, options: JSON, as the backend describes and takes them. digest: `digest_for` the device, None before it is
    known. details: JSON of what the backend says of the set besides.
    """

    backend: str
    backend_version: str
    builder_revision: int | None
    precision: str
    device: Mapping[str, Any]
    options: Mapping[str, Any]
    engines: Mapping[str, EngineFile] = field(default_factory=dict)
    digest: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | os.PathLike) -> EngineSetManifest:
        """Read engines.json. Raises InputError for a file that is no manifest of engines."""
        value = read_checked(path, formats.ENGINES, _SCHEMA)
        own = ("format", "backend", "backend_version", "builder_revision", "precision", "device", "options", "engines")
        return cls(
            backend=value["backend"],
            backend_version=value["backend_version"],
            builder_revision=value.get("builder_revision"),
            precision=value["precision"],
            device=value["device"],
            options=value["options"],
            engines={name: EngineFile.from_json(entry) for name, entry in value["engines"].items()},
            digest=value.get("digest"),
            details={key: item for key, item in value.items() if key not in (*own, "digest")},
        )

    def save(self, path: str | os.PathLike) -> None:
        write_json(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the content of engines.json, without its seal."""
        known = {"builder_revision": self.builder_revision, "digest": self.digest}
        return {
            **self.details,
            "format": formats.ENGINES,
            "backend": self.backend,
            "backend_version": self.backend_version,
            "precision": self.precision,
            "device": self.device,
            "options": self.options,
            "engines": {name: engine.to_json() for name, engine in self.engines.items()},
            **{key: value for key, value in known.items() if value is not None},
        }

    def digest_for(self, device_key: Any) -> str:
        """Return the hex sha256 of what runs.

        Backend, version, options, precision, engines, and the device's key.
        """
        value = self.to_json()
        keys = ("backend", "backend_version", "options", "engines", "precision")
        return sha256_json({**{key: value[key] for key in keys}, "device": device_key})
