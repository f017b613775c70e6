"""Faults of the runtime: the KV cache and the packing of a step on the host.

And the page table of fused attention on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from faults.fault import Fault
from lockstep.step import host, host_step, kv_cache, pages

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextlib.contextmanager
def _wrapped(owner: Any, name: str, wrap: Wrap) -> Iterator[None]:
    """`wrap(right)` in place of a function, for as long as this is open."""
    right = getattr(owner, name)
    setattr(owner, name, wrap(right))
    try:
        yield
    finally:
        setattr(owner, name, right)


def _in(owner: Any, name: str, wrap: Wrap) -> Callable[[], AbstractContextManager[None]]:
    return lambda: _wrapped(owner, name, wrap)


# The cache on the host


def _written_late(right):
    def write(self, layer, place, start, key, value):
        late = start + 1 if start + 1 + len(key) <= place.capacity else start
        right(self, layer, place, late, key, value)

    return write


def _written_to_row_before(right):
    def write(self, layer, place, start, key, value):
        right(self, layer, replace(place, row=max(place.row - 1, 0)), start, key, value)

    return write


def _second_chunk_lost(right):
    def write(self, layer, place, start, key, value):
        if not start:
            right(self, layer, place, start, key, value)

    return write


def _past_one_short(right):
    def past(self, index, chunk, kind):
        pair = right(self, index, chunk, kind)
        if chunk.start > 1:
            for array in pair:
                self._calls.append(functools.partial(array[:, :, -1].fill, 0))
        return pair

    return past


def _growth_forgets(right):
    def reserve(self, slot, length):
        before, moved = self._places.get(slot), right(self, slot, length)
        if before not in (None, self._places[slot]):
            for pair in self._row(self._places[slot]):
                for array in pair:
                    array[:] = 0
        return moved

    return reserve


def _growth_loses_last(right):
    def reserve(self, slot, length):
        before, moved = self._places.get(slot), right(self, slot, length)
        if before not in (None, self._places[slot]) and self.lengths[slot]:
            for pair in self._row(self._places[slot]):
                for array in pair:
                    array[:, :, int(self.lengths[slot]) - 1] = 0
        return moved

    return reserve


def _rows_grow_empty(right):
    return lambda self, old, shape: right(self, None, shape)


def _plans_outlive_growth(right):
    def reserve(self, slot, length):
        right(self, slot, length)
        return False

    return reserve


def _stale_after_reset(right):
    def drop(self, place):
        self._rows[place.capacity].slots[place.row] = None

    return drop


def _view_of_row_before(right):
    def view(self, layer, capacity, low, high):
        back = 1 if high - low == 1 and low else 0
        return right(self, layer, capacity, low - back, high - back)

    return view


def _row_3_not_written(right):
    def write_each(self, group, capacity, rows, starts, key, value):
        kept = rows != 3
        right(self, group, capacity, rows[kept], starts[kept], key[:, kept], value[:, kept])

    return write_each


def _rows_written_swapped(right):
    def write_each(self, group, capacity, rows, starts, key, value):
        step = -1 if len(rows) > 2 else 1
        right(self, group, capacity, rows, starts, key[:, ::step], value[:, ::step])

    return write_each


def _last_layer_not_written(right):
    def write_each(self, group, capacity, rows, starts, key, value):
        arrays = self._rows[capacity]
        kept = arrays.keys[group][-1].copy(), arrays.values[group][-1].copy()
        right(self, group, capacity, rows, starts, key, value)
        arrays.keys[group][-1], arrays.values[group][-1] = kept

    return write_each


# The packing of a step


def _gaps_closed(right):
    def write_decoded(self, decoded):
        for part, tokens, new in zip(self.layout.decoding, self.slices, self._new):
            rows = decoded[part.capacity]
            starts = self.tokens.position_ids[tokens][rows - part.low]
            for group, (keys, values) in enumerate(new):
                self._cache.write_each(group, part.capacity, rows, starts, keys[:, : len(rows)], values[:, : len(rows)])

    return write_decoded


def _chunks_from_zero(right):
    def pack(self, made, advances):
        rows = right(self, made, advances)
        for chunk, tokens in zip(made.layout.chunks, made.slices[len(made.layout.decoding) :]):
            made.tokens.position_ids[tokens] = np.arange(chunk.count)
        return rows

    return pack


def _row_before_of_chunks(right):
    def pack(self, made, advances):
        rows = right(self, made, advances)
        for i, advance in enumerate(advances):
            made.logit_rows[i] -= len(advance.tokens) > 1
        return rows

    return pack


def _in_order_of_slots(right):
    def pack(self, made, advances):
        decoded = right(self, made, advances)
        made.logit_rows[:] = made.logit_rows[np.argsort([advance.slot for advance in advances], kind="stable")]
        return decoded

    return pack


# The page table of fused attention


def _fused(name: str, wrap: Wrap) -> Callable[[], AbstractContextManager[None]]:
    def opened() -> AbstractContextManager[None]:
        from lockstep.gpu.attention.fused import FusedAttention  # loads cuDNN

        return _wrapped(FusedAttention, name, wrap)

    return opened


def _table(change: Callable[[np.ndarray], None]) -> Callable[[], AbstractContextManager[None]]:
    """Apply `change` to the table whenever a row has grown.

    The table is [rows, pages of a row]; it is changed before it goes to the device.
    """

    def wrap(right):
        def reserve(self, ends, lengths):
            held = list(self._sent)
            moved = right(self, ends, lengths)
            if self._sent != held:
                change(self._host_table)
                self._table_staging.send(self._stream, [(self._table, self._host_table)])
            return moved

        return reserve

    return _fused("reserve", wrap)


def _second_page_is_first(table: np.ndarray) -> None:
    table[:, 1] = table[:, 0]


def _row_1_has_row_0s(table: np.ndarray) -> None:
    table[1] = table[0]


def _row_3_has_row_2s_first(table: np.ndarray) -> None:
    table[3, 0] = table[2, 0]


def _third_page_missing(table: np.ndarray) -> None:
    table[:, 2] = 0


def _last_pages_swapped(table: np.ndarray) -> None:
    """Swap the last pages of a row behind its fourth.

    Only what is written before the row has its fourth page is found elsewhere behind that.
    """
    grown = table[:, 3] != 0
    table[grown, 2], table[grown, 3] = table[grown, 3], table[grown, 2]


def _pages_given_twice(right):
    """Of `PagePool`."""

    def release(self, pages):
        right(self, pages)
        self._free += [page for page in pages if page in self._free]

    return release


def _chunk_length_short(right):
    def begin(self, chunks):
        return right(self, [(row, start - 1 if start else start, low, high) for row, start, low, high in chunks])

    return begin


_HOST, _GPU = {"backends": ("onnxruntime",)}, {"backends": ("tensorrt",)}
FAULTS = (
    Fault(
        "cache-late",
        "a prompt's keys and values one row too far",
        runtime=_in(kv_cache.KVCache, "write", _written_late),
        **_HOST,
    ),
    Fault(
        "cache-row-before",
        "a prompt's keys and values in the row of the request before",
        runtime=_in(kv_cache.KVCache, "write", _written_to_row_before),
        **_HOST,
    ),
    Fault(
        "cache-second-chunk",
        "only a prompt's first chunk is written",
        runtime=_in(kv_cache.KVCache, "write", _second_chunk_lost),
        **_HOST,
    ),
    Fault(
        "cache-growth",
        "what a request held is lost when it outgrows its row",
        runtime=_in(kv_cache.KVCache, "reserve", _growth_forgets),
        **_HOST,
    ),
    Fault(
        "cache-growth-last",
        "the last token is lost when a request outgrows its row",
        runtime=_in(kv_cache.KVCache, "reserve", _growth_loses_last),
        **_HOST,
    ),
    Fault(
        "cache-rows",
        "what other requests hold is lost when a row is added beside theirs",
        runtime=_in(kv_cache.KVCache, "_grown", _rows_grow_empty),
        **_HOST,
    ),
    Fault(
        "cache-past",
        "the last token before a chunk is hidden from it",
        runtime=_in(host_step.HostStep, "_past", _past_one_short),
        **_HOST,
    ),
    Fault(
        "cache-growth-plans",
        "bound calls still read the cache as it was before it grew",
        runtime=_in(kv_cache.KVCache, "reserve", _plans_outlive_growth),
        **_HOST,
    ),
    Fault(
        "cache-stale",
        "a row is not cleared for the next request, which masks what it holds",
        runtime=_in(kv_cache.KVCache, "_drop_row", _stale_after_reset),
        **_HOST,
    ),
    Fault(
        "cache-view",
        "a request that is alone reads the cache of the one before",
        runtime=_in(kv_cache.KVCache, "view", _view_of_row_before),
        **_HOST,
    ),
    Fault(
        "cache-row-3",
        "decoded tokens of the fourth request are not written",
        runtime=_in(kv_cache.KVCache, "write_each", _row_3_not_written),
        **_HOST,
    ),
    Fault(
        "cache-swapped",
        "decoded tokens of more than two requests in reverse order",
        runtime=_in(kv_cache.KVCache, "write_each", _rows_written_swapped),
        **_HOST,
    ),
    Fault(
        "cache-last-layer",
        "decoded tokens are not written in the last layer",
        runtime=_in(kv_cache.KVCache, "write_each", _last_layer_not_written),
        **_HOST,
    ),
    Fault(
        "step-gaps",
        "decoding rows with a gap between them are written as if there were none",
        runtime=_in(host_step.HostStep, "write_decoded", _gaps_closed),
        **_HOST,
    ),
    Fault(
        "step-chunk-positions",
        "positions of each chunk begin at 0",
        runtime=_in(host.HostExecutor, "_pack", _chunks_from_zero),
        **_HOST,
    ),
    Fault(
        "step-chunk-row",
        "logits of a prompt's last token but one",
        runtime=_in(host.HostExecutor, "_pack", _row_before_of_chunks),
        **_HOST,
    ),
    Fault(
        "step-order",
        "logits in the order of the slots, not of the list",
        runtime=_in(host.HostExecutor, "_pack", _in_order_of_slots),
        **_HOST,
    ),
    Fault("pages-second", "a row's second page is its first", runtime=_table(_second_page_is_first), **_GPU),
    Fault("pages-row-1", "the second request has the first's pages", runtime=_table(_row_1_has_row_0s), **_GPU),
    Fault(
        "pages-row-3", "the fourth request's first page is the third's", runtime=_table(_row_3_has_row_2s_first), **_GPU
    ),
    Fault("pages-third", "a row's third page is page 0", runtime=_table(_third_page_missing), **_GPU),
    Fault(
        "pages-swapped",
        "a row's third and fourth page swapped when it has four",
        runtime=_table(_last_pages_swapped),
        **_GPU,
    ),
    Fault(
        "pages-twice",
        "pages of a request that ended are given out twice",
        runtime=_in(pages.PagePool, "release", _pages_given_twice),
        **_GPU,
    ),
    Fault("pages-length", "a chunk's past one token short", runtime=_fused("begin", _chunk_length_short), **_GPU),
)
