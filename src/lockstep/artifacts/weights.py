"""The manifest of converted weights: files, and the places of tensors in them.

`weights/weights.json` in and out. Whether places are within their files is checked when these are opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

from lockstep.artifacts import formats
from lockstep.artifacts.bounds import REMEDY, Bytes, GroupSize, Name, Precision
from lockstep.artifacts.document import Document, Key, ValidationError, integers, length
from lockstep.artifacts.dtypes import ROW, is_fp8
from lockstep.artifacts.places import MAX_FILES, StoredFile, StoredFiles, TensorDtype, TensorPlace, TensorShape


@dataclass(frozen=True)
class NumberedPlace:
    """The place of a tensor, as `TensorPlace`. file: its index among the manifest's files, which keeps JSON short."""

    file: Annotated[int, integers(0, MAX_FILES)]
    offset: Bytes
    length: Bytes
    dtype: TensorDtype
    shape: TensorShape


@dataclass(frozen=True)
class WeightsManifest(Document):
    """The tensors of one precision, and their files.

    A file's path is relative to the manifest or absolute. group_size: of the tensors that are quantised
    (`artifacts.quantized`), 0 for a scale a row; None where none is. transposed: which of them the checkpoint holds as
    [in_features, out_features].
    """

    FORMAT: ClassVar[str] = formats.WEIGHTS
    REMEDY: ClassVar[str] = REMEDY
    precision: Precision
    files: StoredFiles
    numbered: Annotated[Mapping[Name, NumberedPlace], Key("tensors")]
    group_size: GroupSize | None = None
    transposed: Annotated[tuple[Name, ...], length(1_000_000)] = ()

    @classmethod
    def of(
        cls,
        precision: str,
        files: Sequence[StoredFile],
        tensors: Mapping[str, TensorPlace],
        group_size: int | None = None,
    ) -> WeightsManifest:
        """Return the manifest of `tensors`, whose files are given by their paths."""
        numbers = {file.path: number for number, file in enumerate(files)}
        numbered = {
            name: NumberedPlace(numbers[place.file], place.offset, place.length, place.dtype, place.shape)
            for name, place in tensors.items()
        }
        return cls(precision, tuple(files), numbered, group_size)

    # Built on first use and kept: mixtures of experts have tens of thousands of tensors.
    @cached_property
    def tensors(self) -> Mapping[str, TensorPlace]:
        return {
            name: TensorPlace(self.files[place.file].path, place.offset, place.length, place.dtype, place.shape)
            for name, place in self.numbered.items()
        }

    def validate(self, stored: Mapping[str, Any]) -> None:
        for name, place in self.numbered.items():
            if place.file >= len(self.files):
                raise ValidationError(
                    f"tensors.{name}.file", f"the number of one of {len(self.files)} files", place.file
                )
        if self.group_size == ROW and not is_fp8(self.precision):
            raise ValidationError("group_size", f"numbers that share a scale in {self.precision}", self.group_size)
        paths = [file.path for file in self.files]
        # Readers map each file whole, by its path.
        if len(set(paths)) < len(paths):
            raise ValidationError("files", "each file once", next(path for path in paths if paths.count(path) > 1))

    def moved(self, new_path: Callable[[str], str]) -> WeightsManifest:
        """Return the manifest of the same files at other paths."""
        return replace(self, files=tuple(replace(file, path=new_path(file.path)) for file in self.files))
