"""The record of how an artefact was made, which lies beside its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.artifacts import formats
from lockstep.artifacts.files import sha256_json


@dataclass(frozen=True)
class BuildKey:
    """The build key of a step: all that decides what it makes.

    names: the stage's wildcards. inputs: by name what stands for each, mostly its sha256. options: plain JSON. code:
    digest of each module by its path. environment: version of each package. backend: its library and device, None of a
    stage without one.
    """

    stage: str
    names: Mapping[str, str]
    inputs: Mapping[str, str]
    options: Mapping[str, Any]
    code: Mapping[str, str]
    environment: Mapping[str, str]
    backend: Mapping[str, Any] | None = None

    @property
    def sha256(self) -> str:
        """Return the hex digest of the key, which the record and the cache use."""
        return sha256_json(self.to_json())

    def to_json(self) -> dict[str, Any]:
        value = {
            "stage": self.stage,
            "names": dict(self.names),
            "inputs": dict(self.inputs),
            "options": dict(self.options),
            "code": dict(self.code),
            "environment": dict(self.environment),
        }
        return value if self.backend is None else {**value, "backend": dict(self.backend)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> BuildKey:
        return cls(
            stage=value["stage"],
            names=value["names"],
            inputs=value["inputs"],
            options=value["options"],
            code=value["code"],
            environment=value["environment"],
            backend=value.get("backend"),
        )


@dataclass(frozen=True)
class BuildRecord:
    """A build key, and the sha256 of each output file.

    outputs: by path relative to the manifest.
    """

    key: BuildKey
    outputs: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return {"format": formats.BUILD, **self.key.to_json(), "key": self.key.sha256, "outputs": dict(self.outputs)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> BuildRecord:
        """Take the content of a build record, whose key is not held against its parts.

        `lockstep.provenance.record.checked_record` does that.
        """
        return cls(BuildKey.from_json(value), value["outputs"])
