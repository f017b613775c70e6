"""Keys and values of all requests: one contiguous array for each kind of layer, that engines read without a copy.

`keys` of a group is [layers, rows, num_kv_heads, capacity, head_dim]: one layer's rows `lo:hi` are a contiguous view,
which is what the decode graph takes, and one assignment writes a decode step's new keys of all layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.errors import InputError

FIRST_CAPACITY = 64


@dataclass(frozen=True)
class LayerShape:
    """Cache of one layer, for one request and token: keys [num_kv_heads, head_dim], values [num_kv_heads,
    value_head_dim]."""

    num_kv_heads: int
    head_dim: int
    value_head_dim: int


class KVCache:
    """Rows of keys and values that grow together. `lengths[row]` tokens of a row are valid; the rest is zero or stale,
    but finite."""

    def __init__(self, layers: Sequence[LayerShape], rows: int, max_seq_len: int, dtype: np.dtype):
        self.rows = rows
        self.max_seq_len = max_seq_len
        self.lengths = np.zeros(rows, np.int64)
        self.capacity = 0
        self.dtype = np.dtype(dtype)
        shapes = sorted(set(layers), key=layers.index)
        self._groups = [(shape, sum(other == shape for other in layers)) for shape in shapes]
        # layer -> (group, index in it)
        self._place = [(shapes.index(shape), layers[:i].count(shape)) for i, shape in enumerate(layers)]
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self._resize(self._bucket(1))

    def reserve(self, length: int) -> bool:
        """Make room for rows of `length` tokens; gives True when arrays moved, so that views must be taken again.

        Capacity doubles, and falls back when a third would do: a decode step reads all of it, masked or not.
        """
        bucket = self._bucket(max(length, int(self.lengths.max())))
        if self.capacity < 3 * bucket and bucket <= self.capacity:
            return False
        self._resize(bucket)
        return True

    def place(self, layer: int) -> tuple[int, int]:
        """(group, index in the group) of a layer."""
        return self._place[layer]

    def group_shapes(self) -> list[tuple[LayerShape, int]]:
        """(shape, number of layers) of each group."""
        return self._groups

    def view(self, layer: int, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys [high-low, num_kv_heads, capacity, head_dim] and values of rows `low:high`, contiguous, no copy."""
        group, index = self._place[layer]
        return self.keys[group][index, low:high], self.values[group][index, low:high]

    def write(self, layer: int, row: int, start: int, key: np.ndarray, value: np.ndarray) -> None:
        """Put key and value [num_tokens, num_kv_heads, head_dim] of one row at `start`."""
        group, index = self._place[layer]
        end = start + len(key)
        self.keys[group][index, row, :, start:end] = key.swapaxes(0, 1)
        self.values[group][index, row, :, start:end] = value.swapaxes(0, 1)

    def write_each(self, group: int, rows: np.ndarray, starts: np.ndarray, key: np.ndarray, value: np.ndarray) -> None:
        """Put one token a row, for all layers of a group: key and value [layers, len(rows), num_kv_heads, head_dim]."""
        self.keys[group][:, rows, :, starts] = key.swapaxes(0, 1)
        self.values[group][:, rows, :, starts] = value.swapaxes(0, 1)

    def reset(self, row: int) -> None:
        """Forget a row. Its memory is cleared: masked entries weigh 0, but 0 times a stale infinity would be NaN."""
        used = int(self.lengths[row])
        if used:
            for array in (*self.keys, *self.values):
                array[:, row, :, :used] = 0
        self.lengths[row] = 0

    def _bucket(self, length: int) -> int:
        capacity = FIRST_CAPACITY
        while capacity < length:
            capacity *= 2
        return min(capacity, self.max_seq_len)

    def _resize(self, capacity: int) -> None:
        used = min(int(self.lengths.max()), self.capacity)
        for arrays, dim in ((self.keys, "head_dim"), (self.values, "value_head_dim")):
            old = arrays[:]
            arrays.clear()
            for i, (shape, count) in enumerate(self._groups):
                new = self._zeros((count, self.rows, shape.num_kv_heads, capacity, getattr(shape, dim)))
                if used:
                    new[:, :, :, :used] = old[i][:, :, :, :used]
                arrays.append(new)
        self.capacity = capacity

    def _zeros(self, sizes: tuple[int, ...]) -> np.ndarray:
        try:
            return np.zeros(sizes, self.dtype)
        except (MemoryError, ValueError):  # ValueError: more than any memory
            number = math.prod(sizes) * self.dtype.itemsize
            raise InputError(
                f"max_batch_size {self.rows}, {sizes[3]} tokens: expected a KV cache that fits in memory, "
                f"found {number} bytes for keys or values; lower the limits"
            ) from None
