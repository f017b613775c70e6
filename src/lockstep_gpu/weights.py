"""Upload weights from the mapped checkpoint through page-locked memory, each tensor once per device."""

from __future__ import annotations

import itertools
import math
import os
import threading
import weakref
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.errors import CheckError, LockstepError, note, truncate_list
from lockstep.weights import Tensors, Weights
from lockstep_gpu import cuda
from lockstep_gpu.device import Device
from lockstep_gpu.host_pool import HostPool

PIECE_NBYTES = 32 << 20  # bytes; larger copies are no faster
_UPLOADERS = 4
_PRELOADED = 128 << 20  # bytes of tensors that are added at a time, for which a request may have to wait
_pool: HostPool | None = None


@dataclass(frozen=True)
class WeightCast:
    """A cast of weights during upload: multiplied by `times`, then converted to `dtype`; matrices are transposed."""

    dtype: np.dtype
    times: float = 1.0
    transposed: bool = False


class Uploads:
    """Copies to the device that run in the background. store: whose tensors they are."""

    def __init__(self, store: DeviceWeights | None = None) -> None:
        self.store = store
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
        self.uploads = Uploads(self)
        self.device = device
        self.placed: list[PlacedTensor] = []
        self._arrays: weakref.WeakValueDictionary[tuple[Hashable, ...], cuda.Array] = weakref.WeakValueDictionary()
        self._uploader = Uploader.of(device)

    @classmethod
    def of(cls, weights: Tensors, device: Device) -> DeviceWeights:
        stores = cls._stores.setdefault(weights.checkpoint, {})
        if device not in stores:
            stores[device] = cls(device)
        return stores[device]

    def upload(self, entry: PlacedTensor, tensor: np.ndarray) -> list[Future]:
        """Start to write a tensor, as the checkpoint has it, to its place; return the copies."""
        return self._uploader.upload(entry.part(), _transposed(tensor, entry.cast), entry.cast)

    def current(self) -> list[PlacedTensor]:
        """Return the tensors whose arrays are in use."""
        return [entry for entry in self.placed if entry.array() is not None]

    def put(
        self,
        weights: Tensors,
        names: Sequence[str],
        shape: tuple[int, ...],
        dtype: np.dtype,
        where: str,
        room: bool = False,
        cast: WeightCast | None = None,
    ) -> cuda.Array:
        """Return the tensors `names`, concatenated into one array of `shape`; upload them if they aren't there yet.

        Args:
            dtype: Dtype of the tensors in the checkpoint.
            where: Prefix of error messages.
            room: The shape has room for more values after the tensors, which belong to the caller alone.
            cast: Cast during upload.

        Raises CheckError for tensors of another dtype or size.
        """
        key = (cast, *map(weights.identity, names))
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
            self.uploads.add(self._uploader.upload(flat[start:end], _transposed(tensor, cast), cast))
            start = end
        ends = list(itertools.accumulate(tensor.size for tensor in tensors))
        for name, first, end in zip(names, (0, *ends), ends):
            self.placed.append(PlacedTensor(weakref.ref(array), first, end, name, dtype, cast))
        return array


@dataclass
class PlacedTensor:
    """A tensor in a part of a device array. dtype: in the checkpoint. digest: of its contents, None if not known."""

    array: weakref.ref[cuda.Array]
    first: int
    end: int
    name: str
    dtype: np.dtype
    cast: WeightCast | None
    digest: bytes | None = None

    @property
    def key(self) -> Hashable:
        """Return what its bytes depend on in a checkpoint."""
        return self.name, self.cast

    def part(self) -> cuda.Array:
        """Return the part of the array, [size of the tensor]."""
        array = self.array()
        assert array is not None  # see `DeviceWeights.current`
        return array.reshape(math.prod(array.shape))[self.first : self.end]

    def values(self, tensor: np.ndarray) -> np.ndarray:
        """Return a tensor of this name as the device has it."""
        values = np.ascontiguousarray(_transposed(tensor, self.cast))
        if self.cast is not None:
            values = _cast(values, self.cast)
        return values


def replace_weights(stores: Sequence[DeviceWeights | None], weights_json: Path, used: cuda.Event) -> None:
    """Write the tensors of another checkpoint over those of stores, and return when they are there.

    Tensors that are known to be equal stay as they are. used: after it, no enqueued step reads the old ones.

    Raises InputError for files that have changed, and CheckError for a tensor of another dtype or size.
    """
    pool = _host_pool()
    weights = Weights.open(weights_json)
    for store in stores:
        assert store is not None  # each block has weights
        store.device.use()
        store.uploads.wait()
        used.wait()
        stream = cuda.Stream()
        copies: list[Future] = []  # through page-locked buffers, of what the pool does not have
        placed = store.current()
        try:
            for entry in placed:
                pooled = pool.find(weights_json, entry.key)
                if pooled is None:
                    entry.digest = None
                    copies += store.upload(entry, _checked(entry, weights, weights_json))
                elif pooled[0] != entry.digest:
                    entry.digest = None
                    part = entry.part()
                    start = 0
                    for piece in pooled[1]:
                        end = start + piece.nbytes // part.dtype.itemsize
                        stream.upload(part[start:end], piece)
                        start = end
                    entry.digest = pooled[0]
            for copy in copies:
                copy.result()
            stream.synchronize()
        except BaseException:
            wait(copies)
            stream.drain()
            for entry in placed:
                entry.digest = None
            raise


def preload(stores: Sequence[DeviceWeights | None], checkpoints: Sequence[Path]) -> Iterator[None]:
    """Add the tensors of checkpoints to the pool of host memory while it has room; yield after some of them each."""
    pool = _host_pool()
    for number, weights_json in enumerate(checkpoints):
        try:
            weights = Weights.open(weights_json)
            entries = [entry for store in stores if store is not None for entry in store.current()]
            while entries:
                tensors: dict[Hashable, np.ndarray] = {}
                nbytes = 0
                while entries and nbytes < _PRELOADED:
                    entry = entries.pop()
                    tensors[entry.key] = entry.values(_checked(entry, weights, weights_json))
                    nbytes += tensors[entry.key].nbytes
                if not pool.add(weights_json, tensors):
                    note(f"page-locked memory has room for {number} of {len(checkpoints)} models; others load longer")
                    return
                yield
            weights.drop_pages()
        except (LockstepError, OSError):
            pass  # its load raises it


def _host_pool() -> HostPool:
    global _pool
    if _pool is None:
        _pool = HostPool.of_machine()
    return _pool


def _checked(entry: PlacedTensor, weights: Weights, weights_json: Path) -> np.ndarray:
    """Return the tensor of a place, as the checkpoint has it. Raises CheckError for another dtype or size."""
    tensor = weights[entry.name]
    if tensor.size != entry.end - entry.first or tensor.dtype != entry.dtype:
        raise CheckError(
            f"{weights_json}: tensor {entry.name!r}: expected {entry.end - entry.first} numbers of "
            f"{entry.dtype.name}, found {tensor.size} of {tensor.dtype.name}"
        )
    return tensor


def _transposed(tensor: np.ndarray, cast: WeightCast | None) -> np.ndarray:
    return tensor.T if cast is not None and cast.transposed else tensor


def _cast(values: np.ndarray, cast: WeightCast) -> np.ndarray:
    with np.errstate(over="ignore"):  # an overflow becomes infinity, which the checks of logits report
        return (values * values.dtype.type(cast.times)).astype(cast.dtype)


class Uploader:
    """Threads that copy from mapped files through page-locked memory: one reads the disk while another sends."""

    _by_device: weakref.WeakValueDictionary[Device, Uploader] = weakref.WeakValueDictionary()

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(min(_UPLOADERS, os.cpu_count() or 1))
        self._local = threading.local()

    @classmethod
    def of(cls, device: Device) -> Uploader:
        """Return the threads of a device, which all of its stores share."""
        uploader = cls._by_device.get(device)
        if uploader is None:
            uploader = cls._by_device[device] = cls(device)
        return uploader

    def upload(self, array: cuda.Array, tensor: np.ndarray, cast: WeightCast | None) -> list[Future]:
        """Start the copies of a tensor to a 1-D array of its size. Each copy keeps the device memory alive."""
        copies = []
        start = 0
        for values in _pieces(tensor):
            end = start + values.size
            copies.append(self._pool.submit(self.copy_piece, array[start:end], values, cast))
            start = end
        return copies

    def copy_piece(self, array: cuda.Array, values: np.ndarray, cast: WeightCast | None) -> None:
        local = self._local
        if not hasattr(local, "stream"):
            self._device.use()
            local.stream = cuda.Stream()
            local.buffer = cuda.pinned((PIECE_NBYTES,), np.uint8)
        if cast is not None:
            values = _cast(values, cast)
        host = local.buffer[: values.nbytes].view(values.dtype)
        np.copyto(host.reshape(values.shape), values)
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
