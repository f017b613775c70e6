"""Stream a checkpoint's tensors, cast to one float type, into a safetensors file. Memory: a few pieces, however large
the model."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import RawIOBase
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.artifacts.dtypes import DTYPE_BITS, DTYPE_ORDER, FLOAT_DTYPES, PRECISION_DTYPES, numpy_dtype
from lockstep.artifacts.files import atomic_path, check_place
from lockstep.artifacts.places import StoredFile, TensorPlace
from lockstep.errors import InputError
from lockstep.weights.scan import from_bits
from lockstep.weights.source import PIECE_BYTES, Source

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_cast(
    source: Source, dtype: str, path: Path, before_rename: Callable[[], None]
) -> tuple[StoredFile, dict[str, TensorPlace]]:
    """Write all tensors of `source`, floats as `dtype`, to the safetensors file `path`.

    Returns the file and the tensors of the weights manifest beside it. `before_rename` is called when the file is
    complete and not yet in place. On any error `path` stays as it was.
    """
    stored = {name: dtype if place.dtype in FLOAT_DTYPES else place.dtype for name, place in source.tensors.items()}
    header, tensors = layout(stored, source.tensors, path.name)
    size = len(header) + sum(place.length for place in tensors.values())
    contents = _contents(header, source, tensors, dtype)
    return StoredFile(path.name, size, write_stream(path, size, contents, "converted", before_rename)), tensors


def write_stream(
    path: Path, size: int, contents: Iterable[memoryview], what: str, before_rename: Callable[[], None] = lambda: None
) -> str:
    """Write `size` bytes to `path`, whole or not at all; gives their hex sha256. what: weights they are, in words;
    before_rename: as of `write_cast`. Raises InputError when the disk has no room."""
    check_place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < size:
        raise InputError(
            f"{path}: expected {size} bytes free for the {what} weights, found {free}; free "
            f"space or choose another output folder"
        )
    digest = hashlib.sha256()
    try:
        with atomic_path(path) as temporary:
            with open(temporary, "wb", buffering=0) as file, ThreadPoolExecutor(1) as pool:
                for data in contents:
                    hashed = pool.submit(digest.update, data)  # hashlib lets go of the interpreter lock
                    _write_all(file, data)
                    hashed.result()
            before_rename()
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        found = f"found the disk full ({error.strerror})"
        raise InputError(
            f"{path}: expected {size} bytes free for the {what} weights, {found}; free space and run again"
        ) from None
    return digest.hexdigest()


def layout(
    stored: Mapping[str, str], tensors: Mapping[str, TensorPlace], file: str
) -> tuple[bytes, dict[str, TensorPlace]]:
    """The opening bytes of `file` and the manifest's tensors, both in file order, which is that of the safetensors
    library. stored: the dtype of each tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in sorted(tensors, key=lambda name: (-DTYPE_ORDER[stored[name]], name)):
        shape = tensors[name].shape
        length = math.prod(shape) * DTYPE_BITS[stored[name]] // 8
        header[name] = {"dtype": stored[name], "shape": list(shape), "data_offsets": [position, position + length]}
        position += length
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    opening = len(text).to_bytes(8, "little") + text
    del header["__metadata__"]
    places = {
        name: TensorPlace(file, len(opening) + begin, end - begin, entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
        for begin, end in [entry["data_offsets"]]
    }
    return opening, places


def _contents(opening: bytes, source: Source, names: Iterable[str], dtype: str) -> Iterator[memoryview]:
    buffer = np.empty(PIECE_BYTES, np.uint8)
    yield memoryview(opening)
    for name in names:
        found = source.tensors[name].dtype
        if found in FLOAT_DTYPES and found != dtype:
            yield from _cast(source, name, dtype, buffer)
        elif found == dtype:
            yield from (piece.data for piece, _ in source.finite_pieces(name, buffer))
        else:
            yield from (piece.data for piece in source.pieces(name, buffer))


def _cast(source: Source, name: str, dtype: str, buffer: np.ndarray) -> Iterator[memoryview]:
    stored = source.tensors[name].dtype
    found, wanted = numpy_dtype(stored), numpy_dtype(dtype)
    out = np.empty(PIECE_BYTES // found.itemsize, wanted)
    for piece, bits in source.finite_pieces(name, buffer):
        numbers = piece.view(found)
        cast = out[: numbers.size]
        with np.errstate(over="ignore", under="ignore"):  # what overflows is refused, what is too small is rounded
            if np.isinf(from_bits(stored, bits, found).astype(wanted))[0]:
                _refuse_overflow(source, name, dtype, buffer)
            np.copyto(cast, numbers, casting="unsafe")
        yield cast.view(np.uint8).data


def _refuse_overflow(source: Source, name: str, dtype: str, buffer: np.ndarray) -> None:
    """Read the whole tensor once more for its largest number."""
    stored = source.tensors[name].dtype
    largest = from_bits(stored, max(bits for _, bits in source.finite_pieces(name, buffer)), numpy_dtype(stored))
    precision = next(precision for precision, wanted in PRECISION_DTYPES.items() if wanted == dtype)
    other = {"F16": "bf16 or fp32", "BF16": "fp32", "F32": "a checkpoint stored in fp32 or smaller"}[dtype]
    raise InputError(
        f"{source.words(name)}: expected numbers that fit {precision}, found a magnitude of "
        f"{float(largest[0]):g}, which overflows; use {other} for this model"
    )


def _write_all(file: RawIOBase, data: memoryview) -> None:
    """A raw file may take less than all: the rest is written, or fails with the reason."""
    while data:
        data = data[file.write(data) :]
