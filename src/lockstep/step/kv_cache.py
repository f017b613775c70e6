"""The KV cache on the host, and the states beside it: contiguous arrays that engines read without a copy.

Rows are kept by capacity, a power of two of tokens: a request that outgrows its row is copied into one of the next
capacity. So a row's capacity follows from its own length alone, a short request never reads, or pays for, the length of
a long one beside it, and what a decode graph computes for a request does not depend on its company.

`keys` of rows of one capacity and one kind of layer are [layers, rows, num_kv_heads, capacity, head_dim]: one layer's
rows `low:high` are a contiguous view, which is what the decode graph takes. States of layers that have one instead lie
in the same rows, [layers, rows, *state] float32.
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
    """Cache of one layer, for one request and token.

    keys [num_kv_heads, head_dim], values [num_kv_heads, value_head_dim].
    """

    num_kv_heads: int
    head_dim: int
    value_head_dim: int

    @property
    def size(self) -> int:
        """Return how many numbers a token's key and value have."""
        return self.num_kv_heads * (self.head_dim + self.value_head_dim)


@dataclass(frozen=True)
class StateShape:
    """State of one layer, for one request, whatever its length: float32 of these sizes."""

    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * _STATE.itemsize


@dataclass(frozen=True)
class CacheRow:
    """Where a request's row lies: row `row` of those of `capacity` tokens."""

    capacity: int
    row: int


class _Rows:
    """Rows of one capacity: for each kind of layer keys and values.

    `slots[row]`: the slot that has the row, None for a free one. touched: rows in front that a slot had once; others
    have taken no memory yet.
    """

    def __init__(self) -> None:
        self.slots: list[int | None] = []
        self.touched = 0
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.states: list[np.ndarray] = []  # of each kind of state


class KVCache:
    """Rows of keys and values for slots 0 to `num_slots`-1.

    `lengths[slot]` tokens of a slot are valid; the rest of its row is zero or stale, but finite. Its states are of all
    tokens that it holds, and zero before the first.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape | StateShape],
        num_slots: int,
        max_seq_len: int,
        dtype: np.dtype,
        kept_nbytes: int,
    ):
        """Make a cache that has no rows yet.

        kept_nbytes: up to so much memory in all stays with rows that no slot has: memory that the system gives anew has
        to be cleared first.
        """
        self.num_slots = num_slots
        self.max_seq_len = max_seq_len
        self.dtype = np.dtype(dtype)
        self.lengths = np.zeros(num_slots, np.int64)
        shapes = [shape for shape in dict.fromkeys(layers) if isinstance(shape, LayerShape)]
        states = [shape for shape in dict.fromkeys(layers) if isinstance(shape, StateShape)]
        self._groups = [(shape, layers.count(shape)) for shape in shapes]
        self._state_groups = [(shape, layers.count(shape)) for shape in states]
        number: dict[LayerShape | StateShape, int] = {shape: index for index, shape in enumerate(shapes)}
        number |= {shape: index for index, shape in enumerate(states)}
        # layer -> (group, index in it)
        self._layers = [(number[shape], layers[:i].count(shape)) for i, shape in enumerate(layers)]
        self._places: dict[int, CacheRow] = {}
        self._rows: dict[int, _Rows] = {}  # by capacity
        self._most_tokens = kept_nbytes // self.token_nbytes

    @property
    def token_nbytes(self) -> int:
        """Return the bytes of one token's keys and values, all layers together; 1 where no layer has any."""
        return sum(shape.size * count for shape, count in self._groups) * self.dtype.itemsize or 1

    @property
    def state_nbytes(self) -> int:
        """Return the bytes of a request's states, all layers together."""
        return sum(shape.nbytes * count for shape, count in self._state_groups)

    def capacity_for(self, length: int) -> int:
        """Return the capacity of a row that holds `length` tokens."""
        capacity = PAGE_SIZE
        while capacity < length:
            capacity *= 2
        return min(capacity, self.max_seq_len)

    def reserve(self, slot: int, length: int) -> bool:
        """Make room for `length` tokens of a slot.

        Returns True when arrays moved, so that views must be taken again.
        """
        capacity = self.capacity_for(length)
        old = self._places.get(slot)
        if old is not None and capacity <= old.capacity:
            return False
        moved = self._take_row(slot, capacity)
        if old is not None:
            used = int(self.lengths[slot])
            for (keys, values), (old_keys, old_values) in zip(self._row(self._places[slot]), self._row(old)):
                keys[:, :, :used], values[:, :, :used] = old_keys[:, :, :used], old_values[:, :, :used]
            self.states_in(slot, self._states(old))
            self._drop_row(old)
        return moved

    def row_of(self, slot: int) -> CacheRow:
        """Return the row of a slot for which `reserve` was called. Raises KeyError."""
        return self._places[slot]

    def held(self, capacity: int, low: int, high: int) -> np.ndarray:
        """Return how many tokens each of rows `low:high` holds, int64."""
        slots = self._rows[capacity].slots[low:high]
        return np.array([0 if slot is None else self.lengths[slot] for slot in slots], np.int64)

    def layer(self, index: int) -> tuple[int, int]:
        """Return (group, index in the group) of a layer."""
        return self._layers[index]

    def group_shapes(self) -> list[tuple[LayerShape, int]]:
        """Return (shape, number of layers) of each group."""
        return self._groups

    def view(self, layer: int, capacity: int, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and values of rows `low:high`, contiguous, without a copy.

        Keys are [high-low, num_kv_heads, capacity, head_dim].
        """
        (group, index), rows = self._layers[layer], self._rows[capacity]
        return rows.keys[group][index, low:high], rows.values[group][index, low:high]

    def write(self, layer: int, place: CacheRow, start: int, key: np.ndarray, value: np.ndarray) -> None:
        """Put key and value [num_tokens, num_kv_heads, head_dim] of one row at `start`."""
        keys, values = self.view(layer, place.capacity, place.row, place.row + 1)
        end = start + len(key)
        keys[0, :, start:end] = key.swapaxes(0, 1)
        values[0, :, start:end] = value.swapaxes(0, 1)

    def state(self, layer: int, capacity: int, low: int, high: int) -> np.ndarray:
        """Return a layer's states of rows `low:high`, [high-low, *state], contiguous, without a copy."""
        group, index = self._layers[layer]
        return self._rows[capacity].states[group][index, low:high]

    def states_out(self, slot: int) -> list[np.ndarray]:
        """Return copies of a slot's states: of each kind [layers, *state]."""
        return [array.copy() for array in self._states(self._places[slot])]

    def empty_states(self) -> list[np.ndarray]:
        """Return memory for what `states_out` gives."""
        return [np.empty((count, *shape.sizes), _STATE) for shape, count in self._state_groups]

    def states_in(self, slot: int, states: Sequence[np.ndarray]) -> None:
        """Put what `states_out` gave into a slot."""
        for array, given in zip(self._states(self._places[slot]), states, strict=True):
            array[:] = given

    def write_each(
        self, group: int, capacity: int, rows: np.ndarray, starts: np.ndarray, key: np.ndarray, value: np.ndarray
    ) -> None:
        """Put one token a row, for all layers of a group.

        key and value: [layers, len(rows), num_kv_heads, head_dim].
        """
        arrays = self._rows[capacity]
        arrays.keys[group][:, rows, :, starts] = key.swapaxes(0, 1)
        arrays.values[group][:, rows, :, starts] = value.swapaxes(0, 1)

    def copy_out(self, slot: int, start: int, end: int) -> list[np.ndarray]:
        """Return copies of tokens `start` to `end`-1 of a slot.

        Of each group keys, then values, [layers, num_kv_heads, end-start, head_dim].
        """
        return [array[:, :, start:end].copy() for pair in self._row(self._places[slot]) for array in pair]

    def copy_in(self, slot: int, start: int, arrays: Sequence[np.ndarray]) -> None:
        """Put what `copy_out` gave at `start` of a slot that has room for it."""
        own = [array for pair in self._row(self._places[slot]) for array in pair]
        for array, given in zip(own, arrays, strict=True):
            array[:, :, start : start + given.shape[2]] = given

    def clear(self, slot: int, start: int, end: int) -> None:
        """Clear tokens `start` to `end`-1 of a slot: masked entries weigh 0, but 0 times an infinity is NaN."""
        for pair in self._row(self._places[slot]):
            for array in pair:
                array[:, :, start:end] = 0

    def reset(self, slot: int) -> None:
        """Forget a slot."""
        place = self._places.pop(slot, None)
        if place is not None:
            self._drop_row(place)
        self.lengths[slot] = 0

    def _row(self, place: CacheRow) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the keys and values of a row, of each group.

        [layers, num_kv_heads, capacity, head_dim].
        """
        rows = self._rows[place.capacity]
        return [(keys[:, place.row], values[:, place.row]) for keys, values in zip(rows.keys, rows.values)]

    def _states(self, place: CacheRow) -> list[np.ndarray]:
        return [states[:, place.row] for states in self._rows[place.capacity].states]

    def _take_row(self, slot: int, capacity: int) -> bool:
        """Give a slot the lowest free row of this capacity.

        Returns True when the arrays had to grow, or others were let go.
        """
        rows = self._rows.get(capacity)
        if rows is None:
            rows = self._rows[capacity] = _Rows()
        moved = None not in rows.slots
        if moved:
            # Of all slots where that goes: memory is taken when it is written, and arrays that grow are copied.
            doubled = min(max(1, 2 * len(rows.slots)), self.num_slots)
            if not (self._grow(rows, capacity, self.num_slots) or self._grow(rows, capacity, doubled)):
                if not rows.slots:
                    del self._rows[capacity]
                raise InputError(
                    f"{doubled} requests of {capacity} tokens: expected a KV cache that fits in memory, found "
                    f"{doubled * capacity * self.token_nbytes} bytes; lower the limits"
                )
        row = rows.slots.index(None)
        rows.slots[row] = slot
        self._places[slot] = CacheRow(capacity, row)
        if row < rows.touched:
            return moved
        rows.touched = row + 1
        return self._let_go(capacity) or moved

    def _let_go(self, wanted: int) -> bool:
        """Let arrays go that no slot has a row of, until what is kept is within bounds.

        wanted: a capacity that is needed. Returns whether any were.
        """
        state = -(-self.state_nbytes // self.token_nbytes)  # as so many tokens
        count = len(self._rows)
        kept = sum((capacity + state) * rows.touched for capacity, rows in self._rows.items())
        for capacity, rows in [*self._rows.items()]:
            if kept > self._most_tokens and capacity != wanted and all(slot is None for slot in rows.slots):
                kept -= (capacity + state) * rows.touched
                del self._rows[capacity]
        return len(self._rows) < count

    def _drop_row(self, place: CacheRow) -> None:
        """Free a row and clear its memory.

        Masked entries weigh 0, but 0 times a stale infinity would be NaN.
        """
        self._rows[place.capacity].slots[place.row] = None
        for keys, values in self._row(place):
            keys[:] = 0
            values[:] = 0
        for states in self._states(place):
            states[:] = 0

    def _grow(self, rows: _Rows, capacity: int, count: int) -> bool:
        """Make arrays for `count` rows; return False where there is no memory for them."""
        olds: list[Sequence[np.ndarray | None]] = [[*rows.keys], [*rows.values]]
        old_states: Sequence[np.ndarray | None] = [*rows.states] or [None] * len(self._state_groups)
        try:
            grown = [
                [
                    self._grown(array, (layers, count, shape.num_kv_heads, capacity, getattr(shape, dim)))
                    for (shape, layers), array in zip(self._groups, old or (None,) * len(self._groups))
                ]
                for old, dim in zip(olds, ("head_dim", "value_head_dim"))
            ]
            states = [
                self._grown(array, (layers, count, *shape.sizes), _STATE)
                for (shape, layers), array in zip(self._state_groups, old_states)
            ]
        except (OSError, OverflowError):  # OverflowError: more than any memory
            return False
        rows.keys, rows.values = grown
        rows.states = states
        rows.slots += [None] * (count - len(rows.slots))
        return True

    def _grown(self, old: np.ndarray | None, shape: tuple[int, ...], dtype: np.dtype | None = None) -> np.ndarray:
        new = _zeros(shape, dtype or self.dtype)
        if old is not None:
            new[:, : old.shape[1]] = old
        return new


def _zeros(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return zeros whose pages take memory as they are written.

    NumPy asks for pages of 2 MB, each with rows of several slots. Raises OSError, OverflowError without memory for it.
    """
    count = math.prod(shape)
    memory = mmap.mmap(-1, max(1, count * dtype.itemsize), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without such pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, count).reshape(shape)
