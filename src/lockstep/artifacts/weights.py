"""The manifest of converted weights: in which files the tensors lie, and where in them.

`weights/weights.json` in and out. Types and ranges are checked; that places lie within files is for whoever opens them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.artifacts import formats
from lockstep.artifacts.dtypes import DTYPE_BITS
from lockstep.artifacts.files import write_json
from lockstep.artifacts.manifests import DIGEST, NAME, PRECISION, REMEDY, read_checked
from lockstep.artifacts.schema import Wrong, check, integer, items, mapping, one_of, record

_BYTES = integer(0, 2**62)
_TENSOR = record(
    {
        "file": integer(0, 100_000),
        "offset": _BYTES,
        "length": _BYTES,
        "dtype": one_of(*DTYPE_BITS),
        "shape": items(_BYTES, most=16),
    }
)
_SCHEMA = record({
    "precision": PRECISION, "tensors": mapping(_TENSOR, NAME),
    "files": items(record({"path": NAME, "size": _BYTES, "sha256": DIGEST}), most=100_000),
})  # fmt: skip


@dataclass(frozen=True)
class WeightsFile:
    """A file of tensors: its path, relative to the manifest or absolute, its bytes and their sha256."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies: `length` bytes at `offset` of file number `file`; `dtype` is safetensors' name, such as
    "F16"."""

    file: int
    offset: int
    length: int
    dtype: str
    shape: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "shape": list(self.shape)}


@dataclass(frozen=True)
class WeightsManifest:
    """The tensors of one precision by name, and their files."""

    precision: str
    files: tuple[WeightsFile, ...]
    tensors: Mapping[str, TensorPlace]

    @classmethod
    def load(cls, path: str | os.PathLike) -> WeightsManifest:
        """Read weights.json. Raises InputError for a file that is no manifest of weights."""
        value = read_checked(path, formats.WEIGHTS, _SCHEMA)
        files = tuple(WeightsFile(file["path"], file["size"], file["sha256"]) for file in value["files"])
        check(files, _each_once, path, REMEDY)
        tensors = {
            name: TensorPlace(entry["file"], entry["offset"], entry["length"], entry["dtype"], tuple(entry["shape"]))
            for name, entry in value["tensors"].items()
        }
        return cls(value["precision"], files, tensors)

    def save(self, path: str | os.PathLike) -> None:
        write_json(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the content of weights.json, without its seal."""
        return {
            "format": formats.WEIGHTS,
            "precision": self.precision,
            "files": [dict(vars(file)) for file in self.files],
            "tensors": {name: place.to_json() for name, place in self.tensors.items()},
        }


def _each_once(files: tuple[WeightsFile, ...], where: str) -> None:
    """Each is mapped whole."""
    paths = [file.path for file in files]
    if len(set(paths)) < len(paths):
        raise Wrong("files", "each file once", next(path for path in paths if paths.count(path) > 1))
