"""The tensors of the KServe v2 protocol, as requests and answers carry them.

JSON lists, or bytes (Triton's binary tensor data extension, and gRPC's raw contents: little-endian, row-major; a BYTES
element is its length in 4 bytes, then its bytes).

In: untrusted names, datatypes, shapes and data. Out: NumPy arrays of exactly that type and shape, or BadRequest, which
names the tensor.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep_serve.bodies import BadRequest

_MAX_ELEMENTS = 1 << 31  # more than the bytes of any body
_LENGTH = struct.Struct("<I")
DATATYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(bool),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),
}


@dataclass(frozen=True)
class Tensor:
    """A tensor; array: of the dtype that DATATYPES has for `datatype`, objects that are bytes for BYTES."""

    name: str
    datatype: str
    array: np.ndarray

    @property
    def shape(self) -> list[int]:
        return list(self.array.shape)


def new_tensor(name: str, datatype: str, values: Any, *shape: int) -> Tensor:
    """Return a tensor of an answer, flat without a shape. values: numbers, or bytes."""
    return Tensor(name, datatype, np.asarray(values, DATATYPES[datatype]).reshape(shape or (-1,)))


def check_declaration(name: str, datatype: str, shape: Sequence[int]) -> int:
    """Return the number of elements of a tensor. Raises BadRequest."""
    if datatype not in DATATYPES:
        raise BadRequest(f"{name}: datatype: expected one of {', '.join(DATATYPES)}, found {datatype[:20]!r}", name)
    # Count zeros as 1: NumPy limits the other sizes of an empty tensor too.
    sizes = [max(1, size) for size in shape]
    if len(shape) > 8 or min(shape, default=0) < 0 or math.prod(sizes) >= _MAX_ELEMENTS:
        raise BadRequest(f"{name}: shape: expected at most 8 sizes, none negative, found {str(list(shape))[:60]}", name)
    return math.prod(shape)


def check_parameters(name: str, parameters: Mapping[str, Any]) -> None:
    """Raise BadRequest for a tensor's parameter that this server does not support."""
    for key in ("shared_memory_region", "classification"):
        if parameters.get(key):
            raise BadRequest(f"{name[:80]}: {key}: not supported by this server; leave it out", name)


def from_list(name: str, datatype: str, shape: Sequence[int], data: Any) -> Tensor:
    """Return a tensor of JSON values, flat or nested, row-major."""
    count = check_declaration(name, datatype, shape)
    # Wrapped, because a single value may come without a list.
    flat: list[Any] = []
    _flatten([data], flat, depth=-1)
    if len(flat) != count:
        raise BadRequest(f"{name}: data: expected {count} elements for shape {list(shape)}, found {len(flat)}", name)
    return Tensor(name, datatype, values_array(name, datatype, flat).reshape(shape))


def _flatten(values: list[Any], into: list[Any], depth: int) -> None:
    for value in values:
        if isinstance(value, list) and depth < 8:
            _flatten(value, into, depth + 1)
        else:
            into.append(value)


def values_array(name: str, datatype: str, values: list[Any]) -> np.ndarray:
    """Return JSON's values as an array [len(values)]. Raises BadRequest."""
    dtype = DATATYPES[datatype]
    if datatype == "BYTES":
        return new_tensor(name, datatype, [_bytes(name, value) for value in values]).array
    types: tuple[type, ...] = (bool,)
    lowest: float = 0
    highest: float = 1
    if dtype.kind in "iu":
        types = (int,)
        lowest = np.iinfo(dtype).min
        highest = np.iinfo(dtype).max
    elif dtype.kind == "f":
        types = (int, float)
        highest = float(np.finfo(dtype).max)
        lowest = -highest
    bad = next((value for value in values if type(value) not in types or not lowest <= value <= highest), None)
    # null is invalid too, but `next` also returns None if all are valid.
    if bad is not None or None in values:
        raise BadRequest(f"{name}: expected a value of {datatype}, found {str(bad)[:40]!r}", name)
    return np.array(values, dtype)


def _bytes(name: str, value: Any) -> bytes:
    if not isinstance(value, str):
        raise BadRequest(f"{name}: expected a string, found {str(value)[:40]!r}", name)
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"{name}: expected Unicode text, found a lone surrogate at {error.start}", name) from None


def from_bytes(name: str, datatype: str, shape: Sequence[int], data: bytes) -> Tensor:
    """Return a tensor of binary data."""
    count = check_declaration(name, datatype, shape)
    if datatype == "BYTES":
        if not count:
            return Tensor(name, datatype, np.empty(shape, DATATYPES[datatype]))
        return new_tensor(name, datatype, _elements(name, count, data), *shape)
    dtype = DATATYPES[datatype]
    if len(data) != count * dtype.itemsize:
        raise BadRequest(
            f"{name}: expected {count * dtype.itemsize} bytes for {datatype} of shape {list(shape)}, found {len(data)}",
            name,
        )
    if datatype == "BOOL" and data.translate(None, b"\0\1"):
        raise BadRequest(f"{name}: expected bytes 0 and 1 for BOOL, found another", name)
    return Tensor(name, datatype, np.frombuffer(data, dtype).reshape(shape))


def _elements(name: str, count: int, data: bytes) -> list[bytes]:
    elements: list[bytes] = []
    at = 0
    while at + _LENGTH.size <= len(data) and len(elements) < count:
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size + length
        if at > len(data):
            raise BadRequest(f"{name}: expected an element of {length} bytes, found the data to end before", name)
        elements.append(data[at - length : at])
    if len(elements) != count or at != len(data):
        raise BadRequest(
            f"{name}: expected exactly {count} BYTES elements, found {len(elements)} and other bytes", name
        )
    return elements


def to_list(tensor: Tensor) -> list[Any]:
    """Return a tensor's values for JSON, row-major; BYTES as text."""
    if tensor.datatype == "BYTES":
        return [value.decode(errors="replace") for value in tensor.array.ravel()]
    return tensor.array.ravel().tolist()


def to_bytes(tensor: Tensor) -> bytes:
    if tensor.datatype == "BYTES":
        return b"".join(_LENGTH.pack(len(value)) + value for value in tensor.array.ravel())
    return tensor.array.tobytes()
