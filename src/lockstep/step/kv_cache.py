"""The KV cache and the recurrent states on the host: contiguous arrays that engines read without a copy.

Rows are grouped by capacity, a power of two of tokens; a request that outgrows its row is copied to a row of the next
capacity. So a row's capacity depends only on its request's length: a short request never pays for a long one, and the
results of a decode graph don't depend on the other requests.

`keys` of the rows of one capacity and layer shape are [layers, rows, num_kv_heads, capacity, head_dim]: rows `low:high`
of a layer are a contiguous view, as the decode graph takes them. Recurrent states are in the same rows, [layers, rows,
*state] float32.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.errors import InputError
from lockstep.step.pages import PAGE_SIZE

_STATE = np.dtype(np.float32)


@dataclass(frozen=True)
class LayerShape:
    """A token's keys [num_kv_heads, head_dim] and values [num_kv_heads, value_head_dim] in a layer."""

    num_kv_heads: int
    head_dim: int
    value_head_dim: int

    @property
    def size(self) -> int:
        """Return the number of elements of a token's keys and values."""
        return self.num_kv_heads * (self.head_dim + self.value_head_dim)


@dataclass(frozen=True)
class StateShape:
    """A request's recurrent state in a layer, float32."""

    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * _STATE.itemsize


@dataclass(frozen=True)
class CacheRow:
    """A request's row of the cache: number `index` of those with `capacity` tokens."""

    capacity: int
    index: int


class _CapacityRows:
    """The rows of one capacity.

    Attributes:
        slots: By row: its slot; None if it is free.
        touched: Number of rows up to the last that was ever used; the others take no memory yet.
        keys, values: For each layer shape.
        states: For each shape of state.
    """

    def __init__(self) -> None:
        self.slots: list[int | None] = []
        self.touched = 0
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.states: list[np.ndarray] = []


class KVCache:
    """Rows of keys, values and states for slots 0 to `num_slots`-1.

    `lengths[slot]` tokens of a slot are valid; the rest of its row is zero or stale, but finite. States start as zeros.

    Attributes:
        groups: Each shape of keys and values, with the number of its layers.
        layers: By layer: its group, and its index in the group.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape | StateShape],
        num_slots: int,
        max_seq_len: int,
        dtype: np.dtype,
        kept_nbytes: int,
    ):
        """Create a cache without rows.

        kept_nbytes: bytes of rows to keep, used or not: the system would have to clear new memory first.
        """
        self.num_slots = num_slots
        self.max_seq_len = max_seq_len
        self.dtype = np.dtype(dtype)
        self.lengths = np.zeros(num_slots, np.int64)
        shapes = [shape for shape in dict.fromkeys(layers) if isinstance(shape, LayerShape)]
        states = [shape for shape in dict.fromkeys(layers) if isinstance(shape, StateShape)]
        self.groups = [(shape, layers.count(shape)) for shape in shapes]
        self._state_groups = [(shape, layers.count(shape)) for shape in states]
        group_of: dict[LayerShape | StateShape, int] = {shape: group for group, shape in enumerate(shapes)}
        group_of |= {shape: group for group, shape in enumerate(states)}
        self.layers = [(group_of[shape], layers[:index].count(shape)) for index, shape in enumerate(layers)]
        self._cache_rows: dict[int, CacheRow] = {}  # by slot
        self.rows: dict[int, _CapacityRows] = {}  # by capacity
        self._kept_tokens = kept_nbytes // self.token_nbytes

    @property
    def token_nbytes(self) -> int:
        """Return the bytes of a token's keys and values in all layers; 1 if no layer has any."""
        return sum(shape.size * count for shape, count in self.groups) * self.dtype.itemsize or 1

    @property
    def state_nbytes(self) -> int:
        return sum(shape.nbytes * count for shape, count in self._state_groups)

    def capacity_for(self, length: int) -> int:
        capacity = PAGE_SIZE
        while capacity < length:
            capacity *= 2
        return min(capacity, self.max_seq_len)

    def reserve(self, slot: int, length: int) -> bool:
        """Make room for `length` tokens of a slot. Return True if arrays moved, which invalidates views."""
        capacity = self.capacity_for(length)
        old = self._cache_rows.get(slot)
        if old is not None and capacity <= old.capacity:
            return False
        moved = self._take_row(slot, capacity)
        if old is not None:  # the request has outgrown its row
            used = int(self.lengths[slot])
            for (keys, values), (old_keys, old_values) in zip(self._row(self._cache_rows[slot]), self._row(old)):
                keys[:, :, :used] = old_keys[:, :, :used]
                values[:, :, :used] = old_values[:, :, :used]
            self.states_in(slot, self._states(old))
            self._drop_row(old)
        return moved

    def row_of(self, slot: int) -> CacheRow:
        """Return the row of a slot for which `reserve` was called. Raises KeyError."""
        return self._cache_rows[slot]

    def row_lengths(self, capacity: int, low: int, high: int) -> np.ndarray:
        """Return the number of tokens in each of rows `low:high`, int64."""
        lengths = np.zeros(high - low, np.int64)
        for number, slot in enumerate(self.rows[capacity].slots[low:high]):
            if slot is not None:
                lengths[number] = self.lengths[slot]
        return lengths

    def view(self, layer: int, capacity: int, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
        """Return contiguous views of a layer's keys and values, [high-low, num_kv_heads, capacity, head_dim]."""
        group, index = self.layers[layer]
        rows = self.rows[capacity]
        return rows.keys[group][index, low:high], rows.values[group][index, low:high]

    def write(self, layer: int, cache_row: CacheRow, start: int, key: np.ndarray, value: np.ndarray) -> None:
        """Write the key and value [num_tokens, num_kv_heads, head_dim] of a row's tokens from `start` on."""
        keys, values = self.view(layer, cache_row.capacity, cache_row.index, cache_row.index + 1)
        end = start + len(key)
        keys[0, :, start:end] = key.swapaxes(0, 1)
        values[0, :, start:end] = value.swapaxes(0, 1)

    def state(self, layer: int, capacity: int, low: int, high: int) -> np.ndarray:
        """Return a contiguous view of a layer's states of rows `low:high`, [high-low, *state]."""
        group, index = self.layers[layer]
        return self.rows[capacity].states[group][index, low:high]

    def states_out(self, slot: int) -> list[np.ndarray]:
        """Return copies of a slot's states: [layers, *state] for each shape."""
        return [array.copy() for array in self._states(self._cache_rows[slot])]

    def empty_states(self) -> list[np.ndarray]:
        return [np.empty((count, *shape.sizes), _STATE) for shape, count in self._state_groups]

    def states_in(self, slot: int, states: Sequence[np.ndarray]) -> None:
        for array, saved in zip(self._states(self._cache_rows[slot]), states, strict=True):
            array[:] = saved

    def write_each(
        self, group: int, capacity: int, rows: np.ndarray, starts: np.ndarray, key: np.ndarray, value: np.ndarray
    ) -> None:
        """Write a token of each row in all layers of a group.

        key, value: [layers, len(rows), num_kv_heads, head_dim].
        """
        arrays = self.rows[capacity]
        # Indices that a slice parts come first in NumPy: the left side is [len(rows), layers, num_kv_heads, head_dim].
        arrays.keys[group][:, rows, :, starts] = key.swapaxes(0, 1)
        arrays.values[group][:, rows, :, starts] = value.swapaxes(0, 1)

    def copy_out(self, slot: int, start: int, end: int) -> list[np.ndarray]:
        """Return copies of tokens `start` to `end`-1 of a slot.

        They are keys, then values, [layers, num_kv_heads, end-start, head_dim], for each group of layers.
        """
        return [array[:, :, start:end].copy() for array in self._slot_arrays(slot)]

    def copy_in(self, slot: int, start: int, arrays: Sequence[np.ndarray]) -> None:
        """Copy the arrays of `copy_out` to a slot, from token `start` on."""
        for array, saved in zip(self._slot_arrays(slot), arrays, strict=True):
            array[:, :, start : start + saved.shape[2]] = saved

    def clear(self, slot: int, start: int, end: int) -> None:
        """Zero tokens `start` to `end`-1 of a slot: masked entries have weight 0, but 0 times infinity is NaN."""
        for array in self._slot_arrays(slot):
            array[:, :, start:end] = 0

    def _slot_arrays(self, slot: int) -> list[np.ndarray]:
        """Return views of a slot's keys and values: of each group keys, then values."""
        arrays: list[np.ndarray] = []
        for keys, values in self._row(self._cache_rows[slot]):
            arrays += [keys, values]
        return arrays

    def reset(self, slot: int) -> None:
        cache_row = self._cache_rows.pop(slot, None)
        if cache_row is not None:
            self._drop_row(cache_row)
        self.lengths[slot] = 0

    def _row(self, cache_row: CacheRow) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return views of a row's keys and values of each group, [layers, num_kv_heads, capacity, head_dim]."""
        rows = self.rows[cache_row.capacity]
        return [(keys[:, cache_row.index], values[:, cache_row.index]) for keys, values in zip(rows.keys, rows.values)]

    def _states(self, cache_row: CacheRow) -> list[np.ndarray]:
        return [states[:, cache_row.index] for states in self.rows[cache_row.capacity].states]

    def _take_row(self, slot: int, capacity: int) -> bool:
        """Give a slot the lowest free row of a capacity. Return True if arrays grew, or others were freed."""
        rows = self.rows.get(capacity)
        if rows is None:
            rows = self.rows[capacity] = _CapacityRows()
        moved = None not in rows.slots
        if moved:
            # For all slots if possible: pages take memory only when written, while growing later means a copy.
            doubled = min(max(1, 2 * len(rows.slots)), self.num_slots)
            if not (self._grow(rows, capacity, self.num_slots) or self._grow(rows, capacity, doubled)):
                if not rows.slots:
                    del self.rows[capacity]
                raise InputError(
                    f"{doubled} requests of {capacity} tokens: expected a KV cache that fits in memory, found "
                    f"{doubled * capacity * self.token_nbytes} bytes; lower the limits"
                )
        row = rows.slots.index(None)
        rows.slots[row] = slot
        self._cache_rows[slot] = CacheRow(capacity, row)
        if row < rows.touched:
            return moved
        rows.touched = row + 1
        return self._free_unused(capacity) or moved  # this row takes memory for the first time

    def _free_unused(self, needed_capacity: int) -> bool:
        """Free unused arrays of other capacities until the rest fits `kept_nbytes`. Return whether any were freed."""
        state = -(-self.state_nbytes // self.token_nbytes)  # in tokens
        tokens = {capacity: (capacity + state) * rows.touched for capacity, rows in self.rows.items()}
        total = sum(tokens.values())
        freed = False
        for capacity, rows in [*self.rows.items()]:
            is_used = capacity == needed_capacity or any(slot is not None for slot in rows.slots)
            if total > self._kept_tokens and not is_used:
                total -= tokens[capacity]
                del self.rows[capacity]
                freed = True
        return freed

    def _drop_row(self, cache_row: CacheRow) -> None:
        """Free a row and zero its memory: masked entries have weight 0, but 0 times a stale infinity is NaN."""
        self.rows[cache_row.capacity].slots[cache_row.index] = None
        for keys, values in self._row(cache_row):
            keys[:] = 0
            values[:] = 0
        for states in self._states(cache_row):
            states[:] = 0

    def _grow(self, rows: _CapacityRows, capacity: int, count: int) -> bool:
        """Grow the arrays to `count` rows; return False if memory is short."""
        keys = []
        values = []
        states = []
        try:
            for shape, layers in self.groups:
                dims = layers, count, shape.num_kv_heads, capacity
                keys.append(_zeros((*dims, shape.head_dim), self.dtype))
                values.append(_zeros((*dims, shape.value_head_dim), self.dtype))
            for state_shape, layers in self._state_groups:
                states.append(_zeros((layers, count, *state_shape.sizes), _STATE))
        except (OSError, OverflowError):  # OverflowError: more than the address space
            return False
        for new_arrays, old_arrays in ((keys, rows.keys), (values, rows.values), (states, rows.states)):
            for new, old in zip(new_arrays, old_arrays):
                new[:, : old.shape[1]] = old
        rows.keys = keys
        rows.values = values
        rows.states = states
        rows.slots += [None] * (count - len(rows.slots))
        return True


def _zeros(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return zeros that take memory only as they are written. Raises OSError or OverflowError if memory is short.

    NumPy would use huge pages of 2 MB, each with rows of several slots.
    """
    count = math.prod(shape)
    memory = mmap.mmap(-1, max(1, count * dtype.itemsize), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, count).reshape(shape)
