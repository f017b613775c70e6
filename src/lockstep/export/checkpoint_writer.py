"""Write a checkpoint's weights a tensor at a time.

In: names, shapes and a function that yields a tensor's numbers in pieces. Out: one `model.safetensors`, or shards and
their index, in a folder.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from lockstep.artifacts.dtypes import NAME_PRECISIONS, PRECISION_DTYPES, named_dtype
from lockstep.artifacts.files import atomic_path, write_json
from lockstep.checkpoint.tensors import INDEX, SINGLE
from lockstep.errors import InputError

SHARD_BYTES = 4 << 30
Pieces = Callable[[str], Iterable[np.ndarray]]


def write_weights(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, pieces: Pieces, shard_bytes: int, what: str
) -> None:
    """Write tensors in the order of `shapes`; pieces: a tensor's numbers. Raises InputError for a full disk."""
    label, numbers = PRECISION_DTYPES[NAME_PRECISIONS[dtype]], named_dtype(dtype)
    total = sum(math.prod(shape) for shape in shapes.values()) * numbers.itemsize
    free = shutil.disk_usage(folder).free
    if free < total:
        raise InputError(
            f"{folder}: expected {total} bytes free for {what}, found {free}; free "
            f"space or choose another output folder"
        )
    shards = _shards(shapes, numbers.itemsize, shard_bytes)
    index: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / file, {name: shapes[name] for name in names}, pieces, label, numbers)
        index |= dict.fromkeys(names, file)
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def _shards(shapes: Mapping[str, tuple[int, ...]], itemsize: int, limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        length = math.prod(shape) * itemsize
        if size and size + length > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += length
    return shards


def _write_shard(
    path: Path, shapes: Mapping[str, tuple[int, ...]], pieces: Pieces, label: str, dtype: np.dtype
) -> None:
    """Write a safetensors file: 8 bytes of header length, JSON padded to 8 bytes, then the tensors."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        length = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": label, "shape": list(shape), "data_offsets": [offset, offset + length]}
        offset += length
    text = json.dumps({"__metadata__": {"format": "pt"}} | header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in shapes:
            for piece in pieces(name):
                file.write(np.ascontiguousarray(piece, dtype).reshape(-1).view(np.uint8).data)
