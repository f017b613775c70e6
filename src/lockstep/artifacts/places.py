"""Places of bytes: a file with its size and digest, and a tensor within a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.artifacts.dtypes import DTYPE_BITS
from lockstep.artifacts.manifests import DIGEST, NAME
from lockstep.artifacts.schema import Check, integer, items, one_of, record

MAX_FILES = 100_000
BYTES = integer(0, 2**62)
FILES = items(record({"path": NAME, "size": BYTES, "sha256": DIGEST}), most=MAX_FILES)


def place_schema(file: Check) -> Check:
    """Return the check of a tensor's place. file: the check of its file's name."""
    shape = items(BYTES, most=16)
    return record({"file": file, "offset": BYTES, "length": BYTES, "dtype": one_of(*DTYPE_BITS), "shape": shape})


@dataclass(frozen=True)
class StoredFile:
    """A file: its path as the manifest has it, its bytes and their sha256."""

    path: str
    size: int
    sha256: str

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StoredFile:
        return cls(value["path"], value["size"], value["sha256"])

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor: `length` bytes at `offset` from the start of a file.

    file: as the manifest that holds this place calls it; in a header, the file's name. dtype: safetensors' name, such
    as "F16".
    """

    file: str
    offset: int
    length: int
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def from_json(cls, file: str, value: Mapping[str, Any]) -> TensorPlace:
        return cls(file, value["offset"], value["length"], value["dtype"], tuple(value["shape"]))

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "shape": list(self.shape)}
