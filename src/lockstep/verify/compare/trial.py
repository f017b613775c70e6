"""One run of an engine; a sweep of such runs; and which sizes that vary together they tried. No graph is run here."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from lockstep.artifacts.reports import SizeCombinations
from lockstep.verify.compare.inputs import Case

Arrays = Mapping[str, np.ndarray]
Run = Callable[[Arrays], Arrays]
Ranges = Mapping[str, tuple[int, int]]
Point = tuple[int, ...]


@dataclass(frozen=True)
class Trial:
    """One run of an engine. rows: those of the whole input whose outputs it must give.

    step_rows: of an exit, whose step has more rows than logits. is_far: beyond the sequence that other trials are parts
    of; the graph runs for it alone.
    """

    case: Case
    rows: np.ndarray
    scaled: bool = False
    step_rows: np.ndarray | None = None
    is_far: bool = False

    @property
    def cost(self) -> int:
        return len(self.rows) * (1 + self.case.sizes.get("past_capacity", 0))


def span_of(rows: np.ndarray) -> np.ndarray | slice:
    """Return contiguous rows as a slice, which copies nothing."""
    if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


class Sweep(abc.ABC):
    """Trials of one graph.

    totals: how many pairs, and triples, there are of sizes that vary together and that requests reach.
    """

    trials: list[Trial]
    is_row_wise = False  # a row's outputs depend on that row alone
    totals: tuple[int, ...] = ()
    _large: np.ndarray | None = None

    @abc.abstractmethod
    def feed(self, trial: Trial) -> dict[str, np.ndarray]:
        """Return the engine's inputs but the weights."""

    @abc.abstractmethod
    def expected(self, trial: Trial) -> Arrays:
        """Return the graph's outputs, and their noise, of the trial's rows."""

    def with_other_rows(self, trial: Trial) -> Iterator[Trial]:
        """Yield runs of the same sizes on other rows, of which each comes once; none where rows depend on others."""
        yield from ()

    def points(self, trial: Trial) -> Iterable[Point]:
        """Return the sizes that a trial has together, of those that `totals` counts."""
        return ()

    def beyond(self, trial: Trial) -> np.ndarray | None:
        """Return for each row whether its inputs go to the end of the precision; None where no row's do."""
        if self._large is None:
            return None
        return self._large[trial.rows]

    def tried(self, trials: Collection[Trial]) -> list[SizeCombinations]:
        """Return how many of all pairs, and of all triples, some trials have."""
        points = set(itertools.chain.from_iterable(map(self.points, trials)))
        combinations = []
        for count, total in enumerate(self.totals, start=2):
            tried = set()
            for point in points:
                for dims in itertools.combinations(range(len(point)), count):
                    tried.add((dims, tuple(point[dim] for dim in dims)))
            combinations.append(SizeCombinations(len(tried), total))
        return combinations
