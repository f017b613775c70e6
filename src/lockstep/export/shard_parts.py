"""The parts of a tensor that ranks hold, and what a reshape makes of them. Parts lie along one axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class ShardIndices:
    """The indices along an axis that each rank holds: [ranks, held] int64, ascending within a section."""

    axis: int
    indices: np.ndarray

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ShardIndices) and self.axis == other.axis and np.array_equal(self.indices, other.indices)
        )

    @property
    def count(self) -> int:
        return self.indices.shape[1]

    def at(self, axis: int, indices: np.ndarray | None = None) -> ShardIndices:
        return ShardIndices(axis, self.indices if indices is None else indices)


def even(axis: int, size: int, ranks: int, unit: int = 1) -> ShardIndices | None:
    """Return successive parts in whole units, shared where these are fewer than ranks; None where uneven."""
    units = size // unit
    if units % ranks == 0:
        whole = np.arange(units).reshape(ranks, -1)
    elif ranks % units == 0:
        whole = np.repeat(np.arange(units), ranks // units)[:, None]
    else:
        return None
    return ShardIndices(axis, (whole[:, :, None] * unit + np.arange(unit)).reshape(ranks, -1))


class NotSplit(Exception):
    """Raised for a part that cannot be split, with the reason."""


class Uneven(NotSplit):
    """A part whose size does not divide by the ranks; left whole, each rank would do all the work."""


def merged(name: str, wants: Sequence[ShardIndices]) -> ShardIndices:
    """Return the one part that all readers of a value want, or sections of it in a row. Raises NotSplit for none."""
    if all(want == wants[0] for want in wants):
        return wants[0]
    if len({want.axis for want in wants}) > 1:
        raise NotSplit(f"{name} is read along different axes")
    distinct: list[ShardIndices] = []
    for want in wants:
        if not any(want == other for other in distinct):
            distinct.append(want)
    ordered = sorted(distinct, key=lambda want: int(want.indices.min()))
    for one, other in zip(ordered, ordered[1:]):
        if one.indices.max() >= other.indices.min():
            raise NotSplit(f"{name} is read in parts that overlap")
    return ShardIndices(ordered[0].axis, np.concatenate([want.indices for want in ordered], axis=1))


def reshaped(before: Sequence[int | str], after: Sequence[int | str], part: ShardIndices) -> ShardIndices:
    """Return what is held of a value once its shape `before` becomes `after`.

    Sizes that are names stand for a number of tokens, which no axis is joined with. Raises NotSplit where it is no part
    along one axis.
    """
    for old, new in _axes_kept(before, after):
        if part.axis not in old:
            continue
        sizes = [_number(before[axis]) for axis in old]
        numbers = np.arange(math.prod(sizes)).reshape(sizes)
        targets = [_number(after[axis]) for axis in new]
        taken = [np.take(numbers, indices, old.index(part.axis)).reshape(-1) for indices in part.indices]
        for position, axis in enumerate(new):
            rows = [np.unravel_index(held, targets)[position] for held in taken]
            kept = [rows_of[np.sort(np.unique(rows_of, return_index=True)[1])] for rows_of in rows]
            if len({len(held) for held in kept}) > 1:
                continue
            whole = np.arange(math.prod(targets)).reshape(targets)
            if all(
                np.array_equal(np.take(whole, indices, position).reshape(-1), held)
                for indices, held in zip(kept, taken, strict=True)
            ):
                return ShardIndices(axis, np.stack(kept))
    raise NotSplit(f"a reshape of {list(before)} to {list(after)} does not keep the ranks' parts together")


def _size(shape: Sequence[int | str], axes: Sequence[int]) -> int:
    return math.prod(_number(shape[axis]) for axis in axes)


def _number(size: int | str) -> int:
    if not isinstance(size, int):
        raise NotSplit(f"a reshape joins {size} with what would be split")
    return size


def _axes_kept(before: Sequence[int | str], after: Sequence[int | str]) -> list[tuple[list[int], list[int]]]:
    """Return groups of axes of two shapes that hold the same numbers. Raises NotSplit where there are none."""
    groups, i, j = [], 0, 0
    while i < len(before) and j < len(after):
        old, new = [i], [j]
        i, j = i + 1, j + 1
        if not (isinstance(before[old[0]], int) and isinstance(after[new[0]], int)):
            if isinstance(before[old[0]], int) or isinstance(after[new[0]], int):
                raise NotSplit(f"a reshape of {list(before)} to {list(after)} joins axes of tokens")
            groups.append((old, new))
            continue
        while _size(before, old) != _size(after, new):
            if _size(before, old) < _size(after, new):
                if i == len(before):
                    raise NotSplit("a reshape that does not come out even")
                old.append(i)
                i += 1
            else:
                if j == len(after):
                    raise NotSplit("a reshape that does not come out even")
                new.append(j)
                j += 1
        groups.append((old, new))
    for axis in range(i, len(before)):
        groups.append(([axis], []))
    for axis in range(j, len(after)):
        groups.append(([], [axis]))
    return groups
