"""Upload weights from the mapped checkpoint through page-locked memory, each tensor once per device."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from lockstep.errors import CheckError, truncate_list
from lockstep.weights import Tensors
from lockstep_gpu import cuda
from lockstep_gpu.device import Device

PIECE_NBYTES = 32 << 20  # bytes; larger copies are no faster
_UPLOADERS = 4


@dataclass(frozen=True)
class WeightCast:
    """A cast of weights during upload: multiplied by `times`, then converted to `dtype`; matrices are transposed."""

    dtype: np.dtype
    times: float = 1.0
    transposed: bool = False


class Uploads:
    """Copies to the device that run in the background."""

    def __init__(self) -> None:
        self._pending: list[Future] = []

    def add(self, copies: Sequence[Future]) -> None:
        self._pending += copies

    def wait(self) -> None:
        """Wait for all copies. If one failed, every call raises its exception."""
        while self._pending:
            self._pending[-1].result()
            self._pending.pop()


class DeviceWeights:
    """The tensors of a checkpoint on a device. Wait for `uploads` before the first use."""

    _stores: weakref.WeakKeyDictionary[object, dict[Device, DeviceWeights]] = weakref.WeakKeyDictionary()

    def __init__(self, device: Device):
        self.uploads = Uploads()
        self._arrays: weakref.WeakValueDictionary[tuple[Hashable, ...], cuda.Array] = weakref.WeakValueDictionary()
        self._uploader = Uploader(device)

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
        """Return the tensors `names`, concatenated into one array of `shape`; upload them if they aren't there yet.

        Args:
            dtype: Dtype of the tensors in the checkpoint.
            where: Prefix of error messages.
            sign: XOR mask of each byte (`onnx_tools.dequantized`).
            room: The shape has room for more values after the tensors, which belong to the caller alone.
            cast: Cast during upload.

        Raises CheckError for tensors of another dtype or size.
        """
        key = (sign, cast, *map(weights.identity, names))
        array = None if room else self._arrays.get(key)
        if array is not None:
            return array.reshape(*shape)
        tensors = [weights[name] for name in names]
        size = sum(tensor.size for tensor in tensors)
        fits = size <= math.prod(shape) if room else size == math.prod(shape)
        if not fits or any(tensor.dtype != dtype for tensor in tensors):
            actual = truncate_list([f"{tensor.dtype.name} {list(tensor.shape)}" for tensor in tensors])
            raise CheckError(
                f"{where}: expected weights {dtype.name} {list(shape)}, found {actual}; are "
                f"graphs and weights of one model and precision?"
            )
        array = cuda.empty(shape, dtype if cast is None else cast.dtype, "weights")
        self._arrays.setdefault(key, array)  # others may read the tensors out of a larger array too
        flat = array.reshape(math.prod(shape))
        start = 0
        for tensor in tensors:
            end = start + tensor.size
            turned = tensor.T if cast is not None and cast.transposed else tensor
            self.uploads.add(self._uploader.upload(flat[start:end], turned, sign, cast))
            start = end
        return array


class Uploader:
    """Threads that copy from mapped files through page-locked memory: one reads the disk while another sends."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(min(_UPLOADERS, os.cpu_count() or 1))
        self._local = threading.local()

    def upload(self, array: cuda.Array, tensor: np.ndarray, sign: int, cast: WeightCast | None) -> list[Future]:
        """Start the copies of a tensor to a 1-D array of its size. Each copy keeps the device memory alive."""
        copies = []
        start = 0
        for values in _pieces(tensor):
            end = start + values.size
            copies.append(self._pool.submit(self.copy_piece, array[start:end], values, sign, cast))
            start = end
        return copies

    def copy_piece(self, array: cuda.Array, values: np.ndarray, sign: int, cast: WeightCast | None) -> None:
        local = self._local
        if not hasattr(local, "stream"):
            self._device.use()
            local.stream = cuda.Stream()
            local.buffer = cuda.pinned((PIECE_NBYTES,), np.uint8)
        if cast is not None:
            with np.errstate(over="ignore"):  # an overflow becomes infinity, which the checks of logits report
                values = (values * values.dtype.type(cast.times)).astype(cast.dtype)
        host = local.buffer[: values.nbytes].view(values.dtype)
        np.copyto(host.reshape(values.shape), values)
        if sign:
            host ^= np.uint8(sign)
        local.stream.upload(array, host)
        local.stream.synchronize()


def _pieces(tensor: np.ndarray) -> Iterator[np.ndarray]:
    """Yield views of at most `PIECE_NBYTES` bytes, in order; a rank's shard may not be contiguous."""
    if tensor.flags.c_contiguous:
        values = tensor.reshape(-1)
        step = PIECE_NBYTES // tensor.itemsize
        for start in range(0, values.size, step):
            yield values[start : start + step]
    elif len(tensor) == 1 or tensor[0].nbytes > PIECE_NBYTES:
        for row in tensor:
            yield from _pieces(row)
    else:
        step = PIECE_NBYTES // tensor[0].nbytes
        for start in range(0, len(tensor), step):
            yield tensor[start : start + step]
