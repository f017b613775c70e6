"""Weights on a device, each tensor once, from the mapped checkpoint through page-locked memory."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from lockstep.errors import CheckError, few
from lockstep.gpu import cuda
from lockstep.gpu.device import Device
from lockstep.weights import Tensors

_PIECE = 32 << 20  # bytes; larger pieces copy no faster
_UPLOADERS = 4


@dataclass(frozen=True)
class WeightCast:
    """A cast of weights on their way to the device: to another dtype, or `times` as large."""

    dtype: np.dtype
    times: float = 1.0


class Uploads:
    """Copies to the device that go on in the background."""

    def __init__(self) -> None:
        self._pending: list[Future] = []

    def add(self, copies: Sequence[Future]) -> None:
        self._pending += copies

    def wait(self) -> None:
        """Wait until all copies are done. Raises, each time, what one of them raised."""
        while self._pending:
            self._pending[-1].result()
            self._pending.pop()


class DeviceWeights:
    """Tensors of one checkpoint on a device; wait for `uploads` before the first use."""

    _stores: weakref.WeakKeyDictionary[object, dict[Device, DeviceWeights]] = weakref.WeakKeyDictionary()

    def __init__(self, device: Device):
        self.uploads = Uploads()
        self._arrays: weakref.WeakValueDictionary[tuple[Hashable, ...], cuda.Array] = weakref.WeakValueDictionary()
        self._uploader = _Uploader(device)

    @classmethod
    def of(cls, weights: Tensors, device: Device) -> DeviceWeights:
        stores = cls._stores.setdefault(weights.checkpoint, {})
        if device not in stores:
            stores[device] = cls(device)
        return stores[device]

    def put(
        self,
        weights: Tensors,
        names: Sequence[str],
        shape: tuple[int, ...],
        dtype: np.dtype,
        where: str,
        sign: int = 0,
        room: bool = False,
        cast: WeightCast | None = None,
    ) -> cuda.Array:
        """Return the tensors `names` one after another, as one array of `shape`.

        They are uploaded if they are not there yet. dtype: of the tensors. sign: what each byte is changed by on its
        way (`onnx_tools.dequantized`). room: the shape has room for more behind them, which is the caller's alone.
        cast: to what they are cast on the device, if they are. Raises CheckError for tensors of another dtype or size.
        """
        key = (sign, cast, *map(weights.identity, names))
        array = None if room else self._arrays.get(key)
        if array is not None:
            return array.reshape(*shape)
        parts = [weights[name] for name in names]
        size = sum(part.size for part in parts)
        fits = size <= math.prod(shape) if room else size == math.prod(shape)
        if not fits or any(part.dtype != dtype for part in parts):
            found = few([f"{part.dtype.name} {list(part.shape)}" for part in parts])
            raise CheckError(
                f"{where}: expected weights {dtype.name} {list(shape)}, found {found}; are "
                f"graphs and weights of one model and precision?"
            )
        array = cuda.empty(shape, dtype if cast is None else cast.dtype, "weights")
        self._arrays.setdefault(key, array)  # what lies in a larger array lies there for all
        flat = array.reshape(math.prod(shape))
        start = 0
        for part in parts:
            self.uploads.add(self._uploader.upload(flat[start : start + part.size], part, sign, cast))
            start += part.size
        return array


class _Uploader:
    """Threads that copy from mapped files through page-locked memory: while one reads, another sends."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(min(_UPLOADERS, os.cpu_count() or 1))
        self._own = threading.local()

    def upload(self, array: cuda.Array, part: np.ndarray, sign: int, cast: WeightCast | None) -> list[Future]:
        """Start the copies of a tensor to a 1-D array of as many numbers; pieces hold the memory they go to."""
        copies = []
        start = 0
        for values in _pieces(part):
            copies.append(self._pool.submit(self._copy, array[start : start + values.size], values, sign, cast))
            start += values.size
        return copies

    def _copy(self, array: cuda.Array, values: np.ndarray, sign: int, cast: WeightCast | None) -> None:
        own = self._own
        if not hasattr(own, "stream"):
            self._device.use()
            own.stream = cuda.Stream()
            own.host = cuda.pinned((_PIECE,), np.uint8)
        if cast is not None:
            with np.errstate(over="ignore"):  # what is too large for the dtype becomes infinite, and is seen
                values = (values * values.dtype.type(cast.times)).astype(cast.dtype)
        host = own.host[: values.nbytes].view(values.dtype)
        np.copyto(host.reshape(values.shape), values)
        if sign:
            host ^= np.uint8(sign)
        own.stream.upload(array, host)
        own.stream.synchronize()


def _pieces(part: np.ndarray) -> Iterator[np.ndarray]:
    """Yield views of all numbers in order, of at most `_PIECE` bytes; a rank's part may have gaps."""
    if part.flags.c_contiguous:
        values = part.reshape(-1)
        numbers = _PIECE // part.itemsize
        yield from (values[at : at + numbers] for at in range(0, values.size, numbers))
    elif len(part) == 1 or part[0].nbytes > _PIECE:
        for row in part:
            yield from _pieces(row)
    else:
        rows = _PIECE // part[0].nbytes
        yield from (part[at : at + rows] for at in range(0, len(part), rows))
