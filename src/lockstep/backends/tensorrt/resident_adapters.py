"""Adapters on a device: each is kept in page-locked memory as the blocks read it, and copied from there into the arrays
of all resident adapters, where it has columns of every A and rows of every B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.backends.tensorrt import cuda
from lockstep.weights.adapters import LoadedAdapter, LoraArrays, scaled


class ResidentAdapters:
    """Writes adapters into device arrays, which it clears first. Copies are put on `stream`, and nobody waits: steps
    before them have the adapter that was there, steps behind them the new one.

    loads: by place the number of the load that brought its adapter; the last entry, of place -1, stays -1."""

    def __init__(self, arrays: Sequence[LoraArrays], max_lora_rank: int, stream: cuda.Stream):
        self._arrays, self._rank, self._stream = arrays, max_lora_rank, stream
        self.loads = np.full(arrays[0].b.shape[0] // max_lora_rank + 1, -1, np.int64)
        self._packed: dict[str, np.ndarray] = {}  # by name, page-locked
        self._staging = cuda.empty((0,), arrays[0].a.dtype)
        for each in arrays:
            for array in (each.a, each.b):
                stream.fill_zero(array.address, array.nbytes, array.nbytes, 1)

    def prepare(self, adapter: LoadedAdapter) -> None:
        """Keep an adapter as `write` copies it: its A transposed, its B with the scale, in the arrays' dtype."""
        packed = self._packed[adapter.name] = self._pack(adapter)
        if packed.size > self._staging.shape[0]:
            self._stream.synchronize()  # the old array is freed now
            self._staging = cuda.empty(packed.shape, packed.dtype, "an adapter on its way")

    def write(self, adapter: LoadedAdapter, place: int) -> None:
        """Put the copies of an adapter to its place on the stream. What it does not have becomes zero."""
        self.loads[place] = self.loads.max() + 1
        packed = self._packed[adapter.name]
        staging = self._staging[: packed.size]
        self._stream.upload(staging, packed)
        at = staging.address
        for each in self._arrays:
            self._clear(each, place)
            if each.module in adapter.modules:
                at = self._place(each, place, adapter.modules[each.module][0].shape[0], at)

    def forget(self, adapter: LoadedAdapter) -> None:
        """Free the memory of an adapter."""
        self._stream.synchronize()  # a copy from there may be under way
        del self._packed[adapter.name]

    def _clear(self, each: LoraArrays, place: int) -> None:
        (size, columns), (_, out), unit, rank = each.a.shape, each.b.shape, each.a.dtype.itemsize, self._rank
        first = place * rank
        self._stream.fill_zero(each.a.address + first * unit, columns * unit, rank * unit, size)
        self._stream.fill_zero(each.b.address + first * out * unit, rank * out * unit, rank * out * unit, 1)

    def _place(self, each: LoraArrays, place: int, rank: int, at: int) -> int:
        """Copy a module's two matrices from `at`; gives the address behind them."""
        (size, columns), (_, out), unit = each.a.shape, each.b.shape, each.a.dtype.itemsize
        first = place * self._rank
        self._stream.copy_rows(each.a.address + first * unit, columns * unit, at, rank * unit, rank * unit, size)
        at += size * rank * unit
        nbytes = rank * out * unit
        self._stream.copy_rows(each.b.address + first * out * unit, nbytes, at, nbytes, nbytes, 1)
        return at + nbytes

    def _pack(self, adapter: LoadedAdapter) -> np.ndarray:
        """One after another the matrices [in_features, rank] and [rank, out_features] of each module."""
        dtype = self._arrays[0].a.dtype
        matrices = list(self._matrices(adapter, dtype))
        packed, at = cuda.pinned((sum(matrix.size for matrix in matrices),), dtype), 0
        for matrix in matrices:
            packed[at : at + matrix.size].reshape(matrix.shape)[...] = matrix
            at += matrix.size
        return packed

    def _matrices(self, adapter: LoadedAdapter, dtype: np.dtype) -> Iterator[np.ndarray]:
        for each in self._arrays:
            if each.module in adapter.modules:
                a, b = adapter.modules[each.module]
                yield a.T
                yield scaled(b, adapter.scale, dtype).T
