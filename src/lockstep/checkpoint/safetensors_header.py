"""Read the header of a safetensors file.

In: its path. Out: byte ranges of its tensors, which cover the file.

Format: https://github.com/huggingface/safetensors#format - eight bytes (little-endian length of the header), the header
(a JSON object: tensor name -> dtype, shape, data_offsets), then the tensors' bytes, without holes or overlaps, up to
the end. The safetensors library checks the same, but its errors name neither the file nor a remedy, and it does not
return byte offsets.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from lockstep.artifacts.dtypes import DTYPE_BITS
from lockstep.artifacts.places import TensorPlace
from lockstep.checkpoint.source_files import LFS_POINTER, shorten
from lockstep.errors import InputError, truncate

MAX_HEADER_BYTES = 100_000_000  # the library's own limit
# Twice the number in the largest published checkpoint (Kimi K2 in fp8, 140,000). A header can have ten times as many,
# which would take minutes and gigabytes from here to the manifest.
MAX_TENSORS = 300_000
_AGAIN = "the file is damaged or incomplete, download it again"


def read_header(path: str | os.PathLike) -> dict[str, TensorPlace]:
    """Return {name: place} of all tensors of the safetensors file `path`, in file order.

    Raises InputError for any damage of the header, and for a file that is longer or shorter than its header says.
    """
    path = Path(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        limit = min(size - 8, MAX_HEADER_BYTES)
        if len(prefix) < 8 or not 2 <= header_bytes <= limit:
            _refuse_prefix(path, prefix + file.read(len(LFS_POINTER)), size, limit)
        header = _parse(path, file.read(header_bytes))
    header.pop("__metadata__", None)
    start = 8 + header_bytes
    places = {name: _place(path, name, entry, start) for name, entry in header.items()}
    # By length too: an empty tensor begins where the next one does, and after it would seem to overlap it.
    places = dict(sorted(places.items(), key=lambda item: (item[1].offset, item[1].length, item[0])))
    _check_layout(path, places, start, size)
    return places


def _refuse_prefix(path: Path, data: bytes, size: int, limit: int) -> NoReturn:
    if data.startswith(LFS_POINTER):
        raise InputError(
            f"{path}: expected a safetensors file, found a Git LFS pointer; run `git lfs pull` in its folder"
        )
    if len(data) < 8:
        _refuse(path, "a header length in the first 8 bytes", f"a file of {size} bytes")
    _refuse(
        path,
        f"a header of 2 to {max(limit, 2)} bytes",
        f"a header length of {int.from_bytes(data[:8], 'little')} in a file of {size} bytes",
    )


def _refuse(path: Path, expected: str, actual: str) -> NoReturn:
    raise InputError(f"{path}: expected {expected}, found {actual}; {_AGAIN}")


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    """Return the header as a dict of unique names; rejects JSON that the format does not allow."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            (duplicate, _), *_ = counts.most_common(1)
            _refuse(path, "each name once in the header", f"{shorten(duplicate)} twice")
        return values

    if not data.startswith(b"{"):
        _refuse(path, "a header that opens with '{'", repr(data[:1]))
    count = data.count(b'"data_offsets"')
    if count > MAX_TENSORS:  # before it is parsed, which would take minutes
        raise InputError(
            f"{path}: expected at most {MAX_TENSORS} tensors, found {count}; use a checkpoint whose experts are"
            " stacked, or another model"
        )
    try:
        text = data.decode()
        header = json.loads(text, object_pairs_hook=unique)
        json.dumps(header, ensure_ascii=False).encode()  # a lone surrogate in a name could not be written to a manifest
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        _refuse(path, "a header in UTF-8", error.reason)
    except (ValueError, RecursionError) as error:
        _refuse(path, "a JSON header", truncate(str(error)))
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(path, "strings in the header's __metadata__", shorten(metadata))
    return header


def _place(path: Path, name: str, entry: Any, start: int) -> TensorPlace:
    where = f"tensor {shorten(name)}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        _refuse(path, f"dtype, shape and data_offsets for {where}", shorten(entry))
    dtype = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _refuse(path, f"a dtype of the safetensors format for {where}", shorten(dtype))
    if not _all_sizes(shape):
        _refuse(path, f"a list of sizes as the shape of {where}", shorten(shape))
    if not _all_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse(path, f"a begin and an end as data_offsets of {where}", shorten(offsets))
    begin, end = offsets
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != (end - begin) * 8:
        # A longer number would not fit on a line.
        size = f"{-(-bits // 8)} bytes" if bits < 2**63 else "fewer elements"
        _refuse(
            path, f"{size} for {where} ({dtype} {shorten(shape)})", f"{end - begin} bytes in data_offsets {offsets}"
        )
    return TensorPlace(path.name, start + begin, end - begin, dtype, tuple(shape))


def _all_sizes(values: Any) -> bool:
    # `type` and not `isinstance`: JSON's true is an int in Python.
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_layout(path: Path, places: dict[str, TensorPlace], start: int, size: int) -> None:
    """Check that the tensors fill the file after the header without holes or overlaps. Raises InputError."""
    position = start
    for name, place in places.items():
        if place.offset != position:
            problem = "a hole" if place.offset > position else "an overlap"
            _refuse(path, f"tensor {shorten(name)} at byte {position}", f"{problem}: it begins at byte {place.offset}")
        position += place.length
    if position != size:
        _refuse(path, f"a file of {position} bytes, as its header says", f"{size} bytes")
