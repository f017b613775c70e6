"""Resident adapters on a device, each copied from page-locked memory into columns of A and rows of B."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.gpu import cuda
from lockstep.weights.adapters import LoadedAdapter, LoraArrays, scaled


class ResidentAdapters:
    """A writer of adapters into device arrays, which it clears first.

    Copies are put on `stream`, and nobody waits: steps before them have the adapter that was there, steps behind them
    the new one. loads: by slot the number of the load that brought its adapter; the last entry, of slot -1, stays -1.
    """

    def __init__(self, arrays: Sequence[LoraArrays], max_lora_rank: int, stream: cuda.Stream):
        self._arrays = arrays
        self._rank = max_lora_rank
        self._stream = stream
        self.loads = np.full(arrays[0].b.shape[0] // max_lora_rank + 1, -1, np.int64)
        self._packed: dict[str, np.ndarray] = {}  # by name, page-locked
        self._staging = cuda.empty((0,), arrays[0].a.dtype)
        for each in arrays:
            for array in (each.a, each.b):
                stream.fill_zero(array.address, array.nbytes, array.nbytes, 1)

    def prepare(self, adapter: LoadedAdapter) -> None:
        """Keep an adapter in page-locked memory, laid out as in the arrays, B with the scale, for `write`."""
        packed = self._packed[adapter.name] = self._pack(adapter)
        if packed.size > self._staging.shape[0]:
            self._stream.synchronize()  # the old array is freed now
            self._staging = cuda.empty(packed.shape, packed.dtype, "an adapter on its way")

    def write(self, adapter: LoadedAdapter, adapter_slot: int) -> None:
        """Put copies of an adapter to its slot on the stream; modules that it does not have become zero."""
        self.loads[adapter_slot] = self.loads.max() + 1
        packed = self._packed[adapter.name]
        staging = self._staging[: packed.size]
        self._stream.upload(staging, packed)
        at = staging.address
        for each in self._arrays:
            for to, pitch, width, rows in self._pieces(each, adapter_slot, self._rank):
                self._stream.fill_zero(to, pitch, width, rows)
            if each.module in adapter.modules:
                rank = adapter.modules[each.module][0].shape[0]
                for to, pitch, width, rows in self._pieces(each, adapter_slot, rank):
                    self._stream.copy_rows(to, pitch, at, width, width, rows)
                    at += width * rows

    def forget(self, adapter: LoadedAdapter) -> None:
        """Free the memory of an adapter."""
        self._stream.synchronize()  # a copy from there may be under way
        del self._packed[adapter.name]

    def _pieces(self, each: LoraArrays, adapter_slot: int, rank: int) -> list[tuple[int, int, int, int]]:
        """Return where a slot's A and B lie: (address, bytes to the next row, bytes of a row, rows) each."""
        first = adapter_slot * self._rank
        unit = each.a.dtype.itemsize

        def by_rows(array: cuda.Array) -> tuple[int, int, int, int]:
            row = array.shape[1] * unit
            return array.address + first * row, rank * row, rank * row, 1

        if each.a_by_rows:
            return [by_rows(each.a), by_rows(each.b)]
        size, columns = each.a.shape
        return [(each.a.address + first * unit, columns * unit, rank * unit, size), by_rows(each.b)]

    def _pack(self, adapter: LoadedAdapter) -> np.ndarray:
        """Return the matrices of each module one after another, as they lie in the arrays."""
        dtype = self._arrays[0].a.dtype
        matrices = list(self._matrices(adapter, dtype))
        packed = cuda.pinned((sum(matrix.size for matrix in matrices),), dtype)
        at = 0
        for matrix in matrices:
            packed[at : at + matrix.size].reshape(matrix.shape)[...] = matrix
            at += matrix.size
        return packed

    def _matrices(self, adapter: LoadedAdapter, dtype: np.dtype) -> Iterator[np.ndarray]:
        for each in self._arrays:
            if each.module in adapter.modules:
                a, b = adapter.modules[each.module]
                yield a if each.a_by_rows else a.T
                yield scaled(b, adapter.scale_of(each.module), dtype).T
