"""Places of bytes: a file with its size and digest, and a tensor within a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from lockstep.artifacts.bounds import Bytes, Digest, FileName, Name
from lockstep.artifacts.document import JsonObject, length, one_of
from lockstep.artifacts.dtypes import DTYPE_BITS

MAX_FILES = 100_000


@dataclass(frozen=True)
class FileEntry:
    """A file in the manifest's folder, and its sha256."""

    file: FileName
    sha256: Digest


@dataclass(frozen=True)
class StoredFile:
    """A file: its path as the manifest has it, its bytes and their sha256."""

    path: Name
    size: Bytes
    sha256: Digest


StoredFiles = Annotated[tuple[StoredFile, ...], length(MAX_FILES)]
TensorDtype = Annotated[str, one_of(*DTYPE_BITS)]
TensorShape = Annotated[tuple[Bytes, ...], length(16)]


@dataclass(frozen=True)
class TensorPlace(JsonObject):
    """The place of a tensor: `length` bytes at `offset` from the start of a file.

    file: as the manifest that holds this place calls it; in a header, the file's name. dtype: safetensors' name, such
    as "F16".
    """

    file: Name
    offset: Bytes
    length: Bytes
    dtype: TensorDtype
    shape: TensorShape
