"""Read a checkpoint's tensors in bounded pieces, by its manifest, and refuse numbers that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.artifacts import formats
from lockstep.artifacts.dtypes import DTYPE_BITS, FLOAT_DTYPES, INTEGER_DTYPES
from lockstep.artifacts.files import read_json
from lockstep.checkpoint import check_checkpoint, checkpoint_folder
from lockstep.checkpoint.safetensors_header import TensorRecord, read_header
from lockstep.errors import InputError
from lockstep.weights.scan import NonFinite, count_non_finite, is_finite, largest_bits

# Large enough that calls cost nothing, small enough that a piece is still in the cache when it is scanned, cast and
# hashed.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of the checkpoint: `length` bytes at `offset` of the file `path`."""

    name: str
    path: Path
    offset: int
    length: int
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.path}: tensor {self.name!r} ({self.dtype} {list(self.shape)})"


@dataclass(frozen=True)
class Source:
    """A checkpoint as its manifest describes it, with every file found and of the size it had then."""

    folder: Path
    manifest: dict[str, Any]
    tensors: tuple[SourceTensor, ...]

    def float_dtypes(self) -> set[str]:
        return {tensor.dtype for tensor in self.tensors if tensor.dtype in FLOAT_DTYPES}


def open_source(checkpoint_json: Path) -> Source:
    """Raises InputError when a file has changed since `resolve`, or holds tensors of a type that cannot be read yet."""
    manifest = read_json(checkpoint_json, formats.CHECKPOINT)
    folder = checkpoint_folder(checkpoint_json, manifest)
    check_checkpoint(folder, manifest)
    tensors = tuple(
        SourceTensor(
            name, folder / entry["file"], entry["offset"], entry["length"], entry["dtype"], tuple(entry["shape"])
        )
        for name, entry in sorted(manifest["tensors"].items())
    )
    headers = {path: read_header(path) for path in sorted({tensor.path for tensor in tensors})}
    for tensor in tensors:
        if headers[tensor.path].get(tensor.name) != TensorRecord(
            tensor.dtype, tensor.shape, tensor.offset, tensor.length
        ):
            raise InputError(
                f"{tensor}: expected it at bytes {tensor.offset}+{tensor.length}, found the "
                f"file's header changed; resolve the checkpoint again"
            )
        if tensor.dtype not in FLOAT_DTYPES + INTEGER_DTYPES:
            known = f"{', '.join(FLOAT_DTYPES)} or integers"
            raise InputError(
                f"{tensor}: expected {known}, found {tensor.dtype}, which is not supported yet; "
                f"use a checkpoint that is not quantized"
            )
    return Source(folder, manifest, tensors)


def pieces(tensor: SourceTensor, buffer: np.ndarray) -> Iterator[np.ndarray]:
    """The tensor's bytes as uint8 views of `buffer`, one after the other; each is valid until the next is asked for.

    `buffer` is a uint8 array of PIECE_BYTES. Read, not mapped: a file that shrinks meanwhile is then an error, not a
    SIGBUS.
    """
    with open(tensor.path, "rb", buffering=0) as file:
        file.seek(tensor.offset)
        for start in range(0, tensor.length, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, tensor.length - start)]
            filled = 0
            while filled < piece.size:
                count = file.readinto(piece.data[filled:])
                if not count:
                    expected = f"{tensor.length} bytes at byte {tensor.offset}"
                    raise InputError(
                        f"{tensor}: expected {expected}, found the end of the file; restore it "
                        f"or resolve the checkpoint again"
                    )
                filled += count
            yield piece


def finite_pieces(tensor: SourceTensor, buffer: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """`pieces` of a float tensor, each with the bits of its largest magnitude. Raises InputError at NaN and
    infinity."""
    for piece in pieces(tensor, buffer):
        bits = largest_bits(tensor.dtype, piece)
        if not is_finite(tensor.dtype, bits):
            _refuse_non_finite(tensor, buffer)
        yield piece, bits


def _refuse_non_finite(tensor: SourceTensor, buffer: np.ndarray) -> None:
    """Read the whole tensor once more for the numbers that the user needs to see."""
    total, position = NonFinite(-1, 0, 0), 0
    for piece in pieces(tensor, buffer):
        found = count_non_finite(tensor.dtype, piece)
        if found:
            first = total.first if total.first >= 0 else position + found.first
            total = NonFinite(first, total.nans + found.nans, total.infinities + found.infinities)
        position += piece.size * 8 // DTYPE_BITS[tensor.dtype]
    raise InputError(
        f"{tensor}: expected finite numbers, found {total.nans} NaN and {total.infinities} infinite, the "
        f"first at flat index {total.first}; "
        "download this file again, or use another checkpoint if it was trained to this"
    )
