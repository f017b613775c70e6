"""Stream tensors into a safetensors file: cast, quantised or new ones, in the memory of a few pieces."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.artifacts.dtypes import DTYPE_BITS, DTYPE_ORDER, FLOAT_DTYPES, PRECISION_DTYPES, ROW, numpy_dtype
from lockstep.artifacts.files import atomic_path, check_place, disk_room
from lockstep.artifacts.places import StoredFile, TensorPlace
from lockstep.artifacts.quantized import QuantizedTensors, data_name, order_name, scales_name, zero_points_name
from lockstep.errors import InputError
from lockstep.progress import steps
from lockstep.weights import e4m3
from lockstep.weights.groups import integers_of, pack, scales_of
from lockstep.weights.packed import pack_zero_points
from lockstep.weights.scan import from_bits
from lockstep.weights.source import PIECE_BYTES, Source

# (source, tensor of the file, group size, buffer for `Source.pieces`) -> the bytes of a part of a quantised tensor.
ReadPart = Callable[["Source", "Stored", int, np.ndarray], Iterator[memoryview]]
Pieces = Callable[[str], Iterable[np.ndarray]]


@dataclass(frozen=True)
class Stored:
    """A tensor of the file to write.

    name: of the checkpoint's tensor. dtype, shape: in the file. bits: of a part of a quantised one; part: data, scales,
    zero_points or order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bits: int | None = None
    part: str = ""

    @property
    def length(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def write_cast(
    source: Source,
    dtypes: Mapping[str, str],
    path: Path,
    before_rename: Callable[[], None],
    quantized: QuantizedTensors | None = None,
) -> tuple[StoredFile, dict[str, TensorPlace]]:
    """Write all tensors of `source` to the safetensors file `path`.

    dtypes: of the floats, by name; those of `quantized` are written as integers with scales, unless the checkpoint has
    just these.

    Returns the file and its tensors for the weights manifest. `before_rename` is called when the file is complete and
    not yet in place. On any error `path` does not change.
    """
    stored = _entries(source.tensors, dtypes, quantized)
    header, tensors = layout(stored, path.name)
    size = len(header) + sum(place.length for place in tensors.values())
    contents = _contents(header, source, [stored[name] for name in tensors], quantized)
    return StoredFile(path.name, size, write_stream(path, size, contents, "converted", before_rename)), tensors


def write_pieces(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, pieces: Pieces, what: str) -> None:
    """Write tensors of one dtype, whose numbers `pieces` returns, to the safetensors file `path`."""
    opening, places = layout({name: Stored(name, dtype, shape) for name, shape in shapes.items()}, path.name)

    def contents() -> Iterator[memoryview]:
        yield memoryview(opening)
        for name in places:
            for piece in pieces(name):
                yield np.ascontiguousarray(piece, numpy_dtype(dtype)).reshape(-1).view(np.uint8).data

    size = len(opening) + sum(place.length for place in places.values())
    write_stream(path, size, contents(), what)


def write_stream(
    path: Path, size: int, contents: Iterable[memoryview], what: str, before_rename: Callable[[], None] = lambda: None
) -> str:
    """Write `size` bytes to `path`, whole or not at all; return their hex sha256.

    what: kind of the weights, for the message. before_rename: as of `write_cast`. Raises InputError when the disk has
    no room.
    """
    check_place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Check before minutes of writing; if another program fills the disk meanwhile, `disk_room` reports it.
    free = shutil.disk_usage(path.parent).free
    if free < size:
        raise InputError(
            f"{path}: expected {size} bytes free for the {what} weights, found {free}; free "
            f"space or choose another output folder"
        )
    digest = hashlib.sha256()
    with disk_room(f"{path}: expected {size} bytes free for the {what} weights"), atomic_path(path) as temporary:
        with open(temporary, "wb", buffering=0) as file, ThreadPoolExecutor(1) as pool:
            for data in contents:
                # hashlib releases the interpreter lock, so a piece is hashed while it is written. Both must be done
                # before the next, which is in the same buffer.
                hashed = pool.submit(digest.update, data)
                _write_all(file, data)
                hashed.result()
        before_rename()
    return digest.hexdigest()


def _entries(
    tensors: Mapping[str, TensorPlace], dtypes: Mapping[str, str], quantized: QuantizedTensors | None
) -> dict[str, Stored]:
    """Return the tensors of the file to write, a quantised one in its parts."""
    stored = {}
    for name, place in tensors.items():
        if quantized is None or name not in quantized.bits:
            stored[name] = Stored(name, dtypes.get(name, place.dtype), place.shape)
            continue
        if quantized.mxfp4:  # stays in the checkpoint's file
            continue
        bits = quantized.bits[name]
        *rows, columns = place.shape
        if quantized.group_size == ROW:
            stored[data_name(name)] = Stored(name, "F8_E4M3", place.shape, bits, "data")
            stored[scales_name(name)] = Stored(name, "F32", tuple(rows), bits, "scales")
            continue
        groups = (*rows, columns // quantized.group_size)
        stored[data_name(name)] = Stored(name, "U8", (*groups, quantized.group_size * bits // 8), bits, "data")
        stored[scales_name(name)] = Stored(name, "F32", groups, bits, "scales")
        if quantized.zero_points:
            packed = (*rows, (groups[-1] * bits + 7) // 8)
            stored[zero_points_name(name)] = Stored(name, "U8", packed, bits, "zero_points")
        if quantized.ordered:
            stored[order_name(name)] = Stored(name, "I64", (columns,), bits, "order")
    return stored


def layout(stored: Mapping[str, Stored], file: str) -> tuple[bytes, dict[str, TensorPlace]]:
    """Return the opening bytes of `file` and its tensors, in the order of the safetensors library."""
    # As transformers writes it; its version 4 refuses files without it.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # The largest types first, as the library does: then each tensor is aligned to its elements.
    for name in sorted(stored, key=lambda name: (-DTYPE_ORDER[stored[name].dtype], name)):
        entry = stored[name]
        begin = end
        end = begin + entry.length
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Padded with spaces, as the library does, so that the first tensor begins at a multiple of eight.
    text += b" " * (-len(text) % 8)
    opening = len(text).to_bytes(8, "little") + text
    del header["__metadata__"]
    places = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        places[name] = TensorPlace(file, len(opening) + begin, end - begin, entry["dtype"], tuple(entry["shape"]))
    return opening, places


def _contents(
    opening: bytes, source: Source, stored: Iterable[Stored], quantized: QuantizedTensors | None
) -> Iterator[memoryview]:
    buffer = np.empty(PIECE_BYTES, np.uint8)
    yield memoryview(opening)
    for entry in steps(stored, "weights", "tensors"):
        name = entry.name
        stored_dtype = source.tensors[name].dtype
        if entry.bits is not None:
            assert quantized is not None  # it has the bits
            if quantized.group_size == ROW:
                read: ReadPart = _read_codes if source.keeps_codes(name) else _quantize_rows
            else:
                read = _repack if source.stays_packed(name) else _quantize
            yield from read(source, entry, quantized.group_size, buffer)
        elif stored_dtype in FLOAT_DTYPES and stored_dtype != entry.dtype:
            yield from _cast(source, name, entry.dtype, buffer)
        elif stored_dtype in FLOAT_DTYPES:
            yield from (piece.data for piece, _ in source.finite_pieces(name, buffer))
        else:
            yield from (piece.data for piece in source.pieces(name, buffer))


def _quantize(source: Source, entry: Stored, group_size: int, buffer: np.ndarray) -> Iterator[memoryview]:
    """Yield the data or the scales of a tensor, quantised."""
    # A piece holds whole groups: the sizes of both are powers of two, and a row has whole groups.
    assert entry.bits is not None
    for piece in _cast(source, entry.name, "F32", buffer):
        groups = np.frombuffer(piece, np.float32).reshape(-1, group_size)
        scales = scales_of(groups, entry.bits)
        if entry.part == "scales":
            yield _bytes_of(scales)
        else:
            yield _bytes_of(pack(integers_of(groups, scales, entry.bits), entry.bits))


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _quantize_rows(source: Source, entry: Stored, _: int, buffer: np.ndarray) -> Iterator[memoryview]:
    """Yield the data or the scales of a tensor as e4m3, by whole rows, which may span several pieces."""
    columns = source.tensors[entry.name].shape[-1]
    numbers = np.empty(0, np.float32)  # the start of a row, from the end of the last piece
    for piece in _cast(source, entry.name, "F32", buffer):
        numbers = np.concatenate([numbers, np.frombuffer(piece, np.float32)])
        count = numbers.size // columns
        if count:
            rows = numbers[: count * columns].reshape(count, columns)
            numbers = numbers[count * columns :]
            scales = e4m3.row_scales(rows)
            yield _bytes_of(scales if entry.part == "scales" else e4m3.codes_of(rows, scales))


def _read_codes(source: Source, entry: Stored, _: int, __: np.ndarray) -> Iterator[memoryview]:
    """Yield the data or the scales of a weight that the checkpoint stores as e4m3 numbers, unchanged."""
    coded = source.coded(entry.name)
    codes = coded.arrays["data"]
    if (codes & e4m3.NAN == e4m3.NAN).any():
        source.array(entry.name)  # raises, with the number of NaNs
    yield _bytes_of(coded.row_scales() if entry.part == "scales" else codes)


def _repack(source: Source, entry: Stored, group_size: int, _: np.ndarray) -> Iterator[memoryview]:
    """Yield the parts of a weight that the checkpoint stores quantised: the same integers, scales and zero points."""
    assert entry.bits is not None
    packed = source.open_packed(entry.name, entry.part, "order", "shape", "zero_points")
    order = packed.order()
    if entry.part == "order":
        yield order.astype(np.int64).view(np.uint8).data
        return
    for rows in packed.blocks():
        if entry.part == "data":
            integers = packed.integers(rows)
            if packed.packing.ordered:
                integers = integers[:, order]
            yield _bytes_of(pack(integers.reshape(-1, group_size), entry.bits))
        elif entry.part == "scales":
            yield _bytes_of(packed.scales(rows, group_size))
        else:
            yield _bytes_of(pack_zero_points(packed.zero_points(rows, group_size), entry.bits))


def _cast(source: Source, name: str, dtype: str, buffer: np.ndarray) -> Iterator[memoryview]:
    stored = source.tensors[name].dtype
    stored_dtype = numpy_dtype(stored)
    cast_dtype = numpy_dtype(dtype)
    out = np.empty(PIECE_BYTES // stored_dtype.itemsize, cast_dtype)
    for piece, bits in source.finite_pieces(name, buffer):
        numbers = piece.view(stored_dtype)
        cast = out[: numbers.size]
        with np.errstate(over="ignore", under="ignore"):  # overflow is rejected, underflow is rounded
            # Rounding keeps the order of magnitudes: if the largest one does not overflow, none does.
            if np.isinf(from_bits(stored, bits, stored_dtype).astype(cast_dtype))[0]:
                _refuse_overflow(source, name, dtype, buffer)
            np.copyto(cast, numbers, casting="unsafe")
        yield cast.view(np.uint8).data


def _refuse_overflow(source: Source, name: str, dtype: str, buffer: np.ndarray) -> None:
    """Read the whole tensor again for its largest number."""
    stored = source.tensors[name].dtype
    largest = from_bits(stored, max(bits for _, bits in source.finite_pieces(name, buffer)), numpy_dtype(stored))
    precision = next(precision for precision, of_precision in PRECISION_DTYPES.items() if of_precision == dtype)
    other = {"F16": "bf16 or fp32", "BF16": "fp32", "F32": "a checkpoint stored in fp32 or smaller"}[dtype]
    raise InputError(
        f"{source.words(name)}: expected numbers that fit {precision}, found a magnitude of "
        f"{float(largest[0]):g}, which overflows; use {other} for this model"
    )


def _write_all(file: RawIOBase, data: memoryview) -> None:
    """Write all of `data`: a raw file may accept less at once, and raises where it cannot accept the rest."""
    while data:
        data = data[file.write(data) :]
