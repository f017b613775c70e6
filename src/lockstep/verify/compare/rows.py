"""Rows of an engine's outputs, of one call or of several."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.verify.arrays import concatenate_rows, take_rows
from lockstep.verify.compare.trial import Arrays, Trial, span_of


@dataclass(frozen=True)
class Rows:
    """An engine's outputs, and the graph's.

    beyond: rows whose inputs go to the end of the precision, where the graph too may overflow.
    """

    expected: Arrays
    outputs: Arrays
    beyond: np.ndarray | None = None

    @property
    def count(self) -> int:
        return len(next(iter(self.outputs.values())))

    def take(self, rows: np.ndarray) -> Rows:
        beyond = self.beyond
        if beyond is not None:
            beyond = beyond[rows]
        return Rows(take_rows(self.expected, rows), take_rows(self.outputs, rows), beyond)

    def __add__(self, other: Rows) -> Rows:
        beyond = None
        if self.beyond is not None and other.beyond is not None:
            beyond = np.concatenate([self.beyond, other.beyond])
        expected = concatenate_rows([self.expected, other.expected])
        return Rows(expected, concatenate_rows([self.outputs, other.outputs]), beyond)


class EarlierRows:
    """An engine's outputs for each row when they were judged; NaN, which equals nothing, for other rows."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}

    def has(self, trial: Trial, outputs: Arrays) -> bool:
        end = int(trial.rows.max()) + 1
        span = span_of(trial.rows)
        return all(
            name in self._arrays and end <= len(self._arrays[name]) and np.array_equal(self._arrays[name][span], array)
            for name, array in outputs.items()
        )

    def keep(self, trial: Trial, outputs: Arrays) -> None:
        end = int(trial.rows.max()) + 1
        for name, array in outputs.items():
            rows = self._arrays.get(name, array[:0])
            if len(rows) < end:
                larger = np.full((end, *array.shape[1:]), np.nan, array.dtype)
                larger[: len(rows)] = rows
                self._arrays[name] = rows = larger
            rows[span_of(trial.rows)] = array
