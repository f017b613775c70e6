"""The lengths at which attention over a KV cache may start to go wrong.

A config and a limit in; sorted lengths out. Positions and cache rows are alike but at a few edges: of pages, of a cache
that grows by doubling, of a sliding window, of a RoPE setting that names a length, and of the limit itself. Checks run
on both sides of each.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

# Tokens: a page of the paged KV cache, and the first capacity of the contiguous one, which doubles.
PAGE = 64
# Keys of a config.json that name a length in tokens: sliding windows, chunks of attention, the length that a RoPE was
# scaled from.
_LENGTH_KEYS = re.compile(
    r"window(_size|_sizes)?$|attention_chunk_size$|local_attention$|original_max_position_embeddings$"
)
# A cache row's values are scaled by the number of rows, up to this: fp16 has no room for the sums of larger ones.
_LARGEST_WEIGHT = 8192


def config_lengths(config: Mapping[str, Any]) -> set[int]:
    """Return the lengths in tokens that a config.json names: windows, chunks, what RoPE was scaled from."""
    lengths: set[int] = set()
    for key, value in _items(config):
        if _LENGTH_KEYS.search(key):
            lengths |= {length for length in _numbers(value) if length > 0}
    return lengths


def _items(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _items(value)
        else:
            yield str(key), value


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, (list, tuple)):
        yield from itertools.chain.from_iterable(map(_numbers, value))
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def edges(longest: int, lengths: Iterable[int] = ()) -> list[int]:
    """Return the lengths at which something may change: powers of two, `lengths`, the last page, `longest`."""
    lengths_at_edges = {longest, *lengths}
    capacity = PAGE
    while capacity < longest:
        lengths_at_edges.add(capacity)
        capacity *= 2
    lengths_at_edges.add((longest - 1) // PAGE * PAGE)  # the last page
    return sorted(length for length in lengths_at_edges if 1 <= length <= longest)


def both_sides(longest: int, lengths: Iterable[int] = ()) -> list[int]:
    """Return the lengths from 1 to `longest` one below, at and one above each of `edges`."""
    near: set[int] = set()
    for edge in edges(longest, lengths):
        near |= {edge - 1, edge, edge + 1}
    return sorted(length for length in near if 1 <= length <= longest)


def synthetic_past(
    random: np.random.Generator, rows: int, heads: int, dims: tuple[int, int], lengths: Iterable[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return seeded keys and values for a cache in which each row matters.

    Keys [rows, heads, dims[0]] and values [rows, heads, dims[1]], float32.

    Standard normal keys spread attention over all rows, so one row has a weight of about 1/rows, which no tolerance
    would notice. The values of the rows on both sides of each edge, counted from the front and (for windows) from the
    back, are therefore scaled up by the number of rows: to forget one of them, or to see one too many, moves the result
    by about its own size.
    """
    keys, values = (random.standard_normal((rows, heads, dim), np.float32) for dim in dims)
    near = np.array(both_sides(rows, lengths), np.int64)
    marked = np.unique(np.concatenate([near - 1, rows - near, [0]]))
    values[marked] *= max(1.0, min(rows, _LARGEST_WEIGHT) / 4)
    return keys, values
