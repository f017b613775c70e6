"""The record of how an artefact was made, a file next to its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from lockstep.artifacts import formats
from lockstep.artifacts.bounds import Digest, PlainPath
from lockstep.artifacts.document import Document, JsonObject, Mark, like
from lockstep.artifacts.files import sha256_json


@dataclass(frozen=True)
class _Backend:
    """What is read of a key's backend."""

    name: str
    device: Mapping[str, Any]


@dataclass(frozen=True)
class BuildKey(JsonObject):
    """The build key of a step: all that decides what it makes.

    names: the stage's wildcards. inputs: by name a value for each, mostly its sha256. options: plain JSON. code:
    digest of each module by its path. environment: version of each package. backend: its library and device, None of a
    stage without one.
    """

    stage: str
    names: Mapping[str, str]
    inputs: Mapping[str, str]
    options: Mapping[str, Any]
    code: Mapping[str, str]
    environment: Mapping[str, str]
    backend: Annotated[Mapping[str, Any], like(_Backend)] | None = None

    @property
    def sha256(self) -> str:
        """Return the hex digest of the key, which the record and the cache use."""
        return sha256_json(self.to_json())


@dataclass(frozen=True)
class BuildRecord(Document):
    """A build key, and the sha256 of each output file.

    outputs: by path relative to the manifest. The key is not held against its parts when it is read:
    `lockstep.provenance.record.checked_record` does that.
    """

    FORMAT: ClassVar[str] = formats.BUILD
    COMPUTED: ClassVar[Mapping[str, str]] = {"key": "key_sha256"}
    key: Annotated[BuildKey, Mark.INLINED]
    outputs: Mapping[PlainPath, Digest]

    @property
    def key_sha256(self) -> str:
        return self.key.sha256
