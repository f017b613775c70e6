"""The manifest of an engine set: its files, their sources and the device.

`engines.json` in and out. Types and ranges are checked. `details` of an engine or of the whole set are for the backend
that wrote them: nothing else reads them. Some engines read each expert of a stack `[num_experts, ...]` by itself.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from lockstep.artifacts import formats
from lockstep.artifacts.bounds import REMEDY, Count, Digest, FileName, Name, Names, Precision, Size
from lockstep.artifacts.document import Document, Mark, length, like
from lockstep.artifacts.files import sha256_json
from lockstep.artifacts.signature import IO, check_slot_shapes


@dataclass(frozen=True)
class _Device:
    """The keys of a device that other code than its backend reads."""

    architecture: Name | None = None
    isa: Annotated[tuple[Name, ...], length(1000)] = ()


@dataclass(frozen=True)
class _Options:
    """The keys of a backend's options that other code reads."""

    max_batch_size: Size | None = None
    max_seq_len: Size | None = None
    max_num_tokens: Size | None = None


@dataclass(frozen=True)
class EngineFile:
    """An engine of a set: its file in the folder of engines.json, with digests.

    sha256: of the file. graph_sha256: of its graph. slots, parts: the weight slots and {slot: slots of the graph} where
    the build made others than the graph's, else None. details: JSON of what the backend says of the engine besides.
    """

    file: FileName
    sha256: Digest
    graph_sha256: Digest
    slots: Annotated[tuple[IO, ...], length(10_000)] | None = None
    parts: Mapping[Name, Names] | None = None
    details: Annotated[Mapping[str, Any], Mark.OTHERS] = field(default_factory=dict)

    def validate(self, stored: Mapping[str, Any]) -> None:
        check_slot_shapes(self.slots or ())


@dataclass(frozen=True)
class EngineSetManifest(Document):
    """The engines of one assembly on one backend.

    device, options: JSON, as the backend describes and takes them. digest: `digest_for` the device, None before it is
    known. details: JSON of what the backend says of the set besides.
    """

    FORMAT: ClassVar[str] = formats.ENGINES
    REMEDY: ClassVar[str] = REMEDY
    backend: Name
    backend_version: Name
    precision: Precision
    device: Annotated[Mapping[str, Any], like(_Device)]
    options: Annotated[Mapping[str, Any], like(_Options)]
    engines: Annotated[Mapping[FileName, EngineFile], Mark.ALWAYS] = field(default_factory=dict)
    builder_revision: Count | None = None
    digest: Digest | None = None
    details: Annotated[Mapping[str, Any], Mark.OTHERS] = field(default_factory=dict)

    def digest_for(self, device_key: Any) -> str:
        """Return the sha256 of what runs, on a device with this key."""
        value = self.to_json()
        # `details` of the set and the builder's revision are left out: they do not change what an engine computes.
        keys = ("backend", "backend_version", "options", "engines", "precision")
        return sha256_json({**{key: value[key] for key in keys}, "device": device_key})


def expert_slot(stack: str, number: int) -> str:
    """Return the weight input of one expert, of engines that read each expert of a stack by itself."""
    return f"{stack}[{number}]"


def expert_slots(stack: str, inputs: Container[str]) -> list[str]:
    """Return the inputs of a stack's experts, in order; none where the stack is one input."""
    # Count up to the first missing number: the inputs do not say how many experts there are.
    slots: list[str] = []
    while (slot := expert_slot(stack, len(slots))) in inputs:
        slots.append(slot)
    return slots
