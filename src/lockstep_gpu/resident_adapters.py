"""Copy LoRA adapters into device arrays: A into columns, B into rows of the slot."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.weights.adapters import LoadedAdapter, LoraArrays, scaled
from lockstep_gpu import cuda


class ResidentAdapters:
    """Writes adapters into the device arrays of all networks, which start as zeros.

    Copies are enqueued on `stream`: steps before them use the slot's previous adapter, steps after them the new one.
    loads: by adapter slot, the number of the load that wrote it; the last entry, which index -1 reads, stays -1.
    """

    def __init__(self, networks: Sequence[Sequence[LoraArrays]], max_lora_rank: int, stream: cuda.Stream):
        self._networks = networks
        self._arrays = arrays = networks[0]
        self._rank = max_lora_rank
        self._stream = stream
        self.loads = np.full(arrays[0].b.shape[0] // max_lora_rank + 1, -1, np.int64)
        self._packed: dict[str, np.ndarray] = {}  # by adapter, page-locked
        self._staging = cuda.empty((0,), arrays[0].a.dtype)
        for lora in itertools.chain.from_iterable(networks):
            for array in (lora.a, lora.b):
                stream.fill_zero(array.address, array.nbytes, array.nbytes, 1)

    def prepare(self, adapter: LoadedAdapter) -> None:
        """Pack an adapter into page-locked memory in the arrays' layout, B times the scale, for `write`."""
        packed = self._packed[adapter.name] = self._pack(adapter)
        if packed.size > self._staging.shape[0]:
            self._stream.synchronize()  # copies may still read the old array, which is freed here
            self._staging = cuda.empty(packed.shape, packed.dtype, "an adapter on its way")

    def write(self, adapter: LoadedAdapter, adapter_slot: int) -> None:
        """Enqueue the copies of an adapter to its slot; modules that it doesn't have become zero."""
        self.loads[adapter_slot] = self.loads.max() + 1
        packed = self._packed[adapter.name]
        staging = self._staging[: packed.size]
        self._stream.upload(staging, packed)
        for arrays in self._networks:
            address = staging.address
            for lora in arrays:
                for to, pitch, width, rows in self._pieces(lora, adapter_slot, self._rank):
                    self._stream.fill_zero(to, pitch, width, rows)
                if lora.module in adapter.modules:
                    rank = adapter.modules[lora.module][0].shape[0]
                    for to, pitch, width, rows in self._pieces(lora, adapter_slot, rank):
                        self._stream.copy_rows(to, pitch, address, width, width, rows)
                        address += width * rows

    def forget(self, adapter: LoadedAdapter) -> None:
        """Free the memory of an adapter."""
        self._stream.synchronize()  # a copy may still read the memory
        del self._packed[adapter.name]

    def _pieces(self, lora: LoraArrays, adapter_slot: int, rank: int) -> list[tuple[int, int, int, int]]:
        """Return the blocks of memory of a slot's A and B: (address, bytes to the next row, bytes of a row, rows)."""
        first = adapter_slot * self._rank
        unit = lora.a.dtype.itemsize

        def by_rows(array: cuda.Array) -> tuple[int, int, int, int]:
            row = array.shape[1] * unit
            return array.address + first * row, rank * row, rank * row, 1

        if lora.a_by_rows:
            return [by_rows(lora.a), by_rows(lora.b)]
        size, columns = lora.a.shape
        return [(lora.a.address + first * unit, columns * unit, rank * unit, size), by_rows(lora.b)]

    def _pack(self, adapter: LoadedAdapter) -> np.ndarray:
        """Return the matrices of all modules, concatenated in the arrays' order and layout."""
        dtype = self._arrays[0].a.dtype
        matrices = list(self._matrices(adapter, dtype))
        packed = cuda.pinned((sum(matrix.size for matrix in matrices),), dtype)
        start = 0
        for matrix in matrices:
            packed[start : start + matrix.size].reshape(matrix.shape)[...] = matrix
            start += matrix.size
        return packed

    def _matrices(self, adapter: LoadedAdapter, dtype: np.dtype) -> Iterator[np.ndarray]:
        for lora in self._arrays:
            if lora.module in adapter.modules:
                a, b = adapter.modules[lora.module]
                yield a if lora.a_by_rows else a.T
                yield scaled(b, adapter.scale_of(lora.module), dtype).T
