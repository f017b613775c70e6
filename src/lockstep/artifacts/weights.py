"""The manifest of converted weights: files, and the places of tensors in them.

`weights/weights.json` in and out. Types and ranges are checked; that places lie within files is for whoever opens them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lockstep.artifacts import formats
from lockstep.artifacts.files import write_json
from lockstep.artifacts.manifests import NAME, PRECISION, REMEDY, read_checked
from lockstep.artifacts.places import FILES, MAX_FILES, StoredFile, TensorPlace, place_schema
from lockstep.artifacts.quantized import GROUP_SIZE
from lockstep.artifacts.schema import Wrong, check, integer, mapping, record

_TENSOR = place_schema(integer(0, MAX_FILES))
_SCHEMA = record(
    {"precision": PRECISION, "tensors": mapping(_TENSOR, NAME), "files": FILES}, {"group_size": GROUP_SIZE}
)


@dataclass(frozen=True)
class WeightsManifest:
    """The tensors of one precision by name, and their files.

    A file's path is relative to the manifest or absolute; a place has that path. On disk it has the file's number.
    group_size: of the tensors that are quantised (`artifacts.quantized`); None where none is.
    """

    precision: str
    files: tuple[StoredFile, ...]
    tensors: Mapping[str, TensorPlace]
    group_size: int | None = None

    @classmethod
    def load(cls, path: str | os.PathLike) -> WeightsManifest:
        """Read weights.json. Raises InputError for a file that is no manifest of weights."""
        value = read_checked(path, formats.WEIGHTS, _SCHEMA)
        files = tuple(map(StoredFile.from_json, value["files"]))
        check(files, _each_once, path, REMEDY)
        check(value["tensors"], lambda tensors, _: _numbered(tensors, len(files)), path, REMEDY)
        tensors = {
            name: TensorPlace.from_json(files[entry["file"]].path, entry) for name, entry in value["tensors"].items()
        }
        return cls(value["precision"], files, tensors, value.get("group_size"))

    def save(self, path: str | os.PathLike) -> None:
        write_json(path, self.to_json())

    def moved(self, new_path: Callable[[str], str]) -> WeightsManifest:
        """Return the manifest of the same files at other paths."""
        files = tuple(replace(file, path=new_path(file.path)) for file in self.files)
        places = {name: replace(place, file=new_path(place.file)) for name, place in self.tensors.items()}
        return replace(self, files=files, tensors=places)

    def to_json(self) -> dict[str, Any]:
        """Return the content of weights.json, without its seal."""
        numbers = {file.path: number for number, file in enumerate(self.files)}
        return {
            "format": formats.WEIGHTS,
            "precision": self.precision,
            **({"group_size": self.group_size} if self.group_size else {}),
            "files": [file.to_json() for file in self.files],
            "tensors": {name: {**place.to_json(), "file": numbers[place.file]} for name, place in self.tensors.items()},
        }


def _numbered(tensors: Mapping[str, Mapping[str, Any]], num_files: int) -> None:
    for name, entry in tensors.items():
        if entry["file"] >= num_files:
            raise Wrong(f"tensors.{name}.file", f"the number of one of {num_files} files", entry["file"])


def _each_once(files: tuple[StoredFile, ...], where: str) -> None:
    """Raise Wrong where a file is named twice: each is mapped whole."""
    paths = [file.path for file in files]
    if len(set(paths)) < len(paths):
        raise Wrong("files", "each file once", next(path for path in paths if paths.count(path) > 1))
