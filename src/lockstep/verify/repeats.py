"""Steps whose rows repeat. Sizes and a source of draws in; numbers of rows out."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import numpy as np

_REPEATED = 4  # steps of each kind


def repeated_rows(min_rows: int, max_rows: int, draw: random.Random) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (description, rows of 0 to `max_rows` - 1) of steps in which rows are the same.

    First steps of drawn sizes in which two, three or all rows are equal. Then one step in which each pair of rows of a
    sample is adjacent once.
    """
    for repeats in (2, 3, 0):
        fewest = max(min_rows, repeats, 2)
        if max_rows < fewest:
            continue
        for _ in range(_REPEATED):
            size = round(fewest * (max_rows / fewest) ** draw.random())
            rows = np.array(draw.sample(range(max_rows), size), np.int64)
            same = draw.sample(range(size), repeats or size)
            rows[same] = rows[same[0]]
            yield f"{repeats or 'all'} rows the same", rows
    sample_size = math.isqrt(max_rows)
    if sample_size * sample_size >= max(min_rows, 4):
        sample = np.array(draw.sample(range(max_rows), sample_size), np.int64)
        yield f"{sample_size} rows next to each other", sample[list(_all_adjacent(sample_size))]


def _all_adjacent(count: int) -> Iterator[int]:
    """Yield numbers below `count` so that each follows each, itself too, once (a de Bruijn sequence of order 2)."""
    for number in range(count):
        yield number
        for other in range(number + 1, count):
            yield from (number, other)
