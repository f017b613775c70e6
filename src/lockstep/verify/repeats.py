"""Steps whose rows repeat. Sizes and a source of draws in; numbers of rows out."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import numpy as np

_REPEATED = 4  # steps of each kind


def repeated_rows(least: int, most: int, draw: random.Random) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (what repeats, rows of 0 to `most`-1) of steps in which rows are the same.

    In steps of drawn sizes, few or many, two, three, and all rows are one. Of a sample each stands beside each other.
    """
    for repeats in (2, 3, 0):
        fewest = max(least, repeats, 2)
        for _ in range(_REPEATED if most >= fewest else 0):
            size = round(fewest * (most / fewest) ** draw.random())
            rows = np.array(draw.sample(range(most), size), np.int64)
            same = draw.sample(range(size), repeats or size)
            rows[same] = rows[same[0]]
            yield f"{repeats or 'all'} rows the same", rows
    beside = math.isqrt(most)
    if beside * beside >= max(least, 4):
        sample = np.array(draw.sample(range(most), beside), np.int64)
        yield f"{beside} rows beside each other", sample[list(_each_beside_each(beside))]


def _each_beside_each(count: int) -> Iterator[int]:
    """Yield numbers below `count` so that each follows each, itself too, once (a de Bruijn sequence of order 2)."""
    for number in range(count):
        yield number
        for other in range(number + 1, count):
            yield from (number, other)
