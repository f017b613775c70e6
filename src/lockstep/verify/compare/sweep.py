"""All sizes of an engine, on parts of one input.

Rows do not depend on each other: an engine's outputs for n tokens must be the graph's for the same tokens in a larger
batch. So the graph runs once, on the largest input, and an engine at every size on a part of it; if either is wrong at
one size only, they differ. Sweeps of a sequence of tokens are in `sequence_sweep`.

In: a graph, the limits, a seed. Out: trials, each with its feed and its expected outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import onnx

from lockstep.artifacts.adapters import IDS
from lockstep.tolerances import DECISIVE_ROWS
from lockstep.verify.arrays import concatenate_rows, take_rows
from lockstep.verify.compare import inputs
from lockstep.verify.compare.inputs import Case, ComparedGraph, Sizes
from lockstep.verify.compare.sequence_sweep import LARGEST_SQUARED, PAST_STATE, AttentionSweep, StateSweep
from lockstep.verify.compare.trial import Arrays, Point, Ranges, Run, Sweep, Trial, span_of
from lockstep.verify.repeats import repeated_rows

_OUTLIER = 100.0  # times a normal value: of one channel in every fourth row, as trained models have them
_LARGE = 64.0  # the largest magnitude of inputs that are no residual stream, in every fourth row
_LEVELS = 8  # magnitudes from 4 to the end of the precision
Whole = dict[str, tuple[np.ndarray, bool]]  # the whole input of a graph, {name: (array, whether it has rows)}


def sweep_of(
    graph: ComparedGraph, seed: int, run: Run, prefill: Callable[[], tuple[onnx.ModelProto, Run]], largest: float
) -> Sweep:
    """Return the sweep of a graph; its trials are in a seeded order in which small ones tend to come first.

    run: runs the graph. prefill: gives the prefill graph of the same attention. largest: number in the engine's
    activations, where its type is narrower than the graph's; else infinity.
    """
    ranges = inputs.ranges(graph)
    draw = Random(seed)
    sweep: Sweep
    if "past_capacity" in ranges:
        sweep = AttentionSweep(graph, ranges, draw, largest, run, *prefill())
    elif PAST_STATE in graph.dims and "num_requests" not in ranges:
        sweep = StateSweep(graph, ranges, draw, run)
    elif {"num_tokens", "num_requests"} <= set(ranges):
        sweep = _ExitSweep(graph, ranges, draw, largest, run)
    else:
        sweep = _TokenSweep(graph, ranges, draw, largest, run)
    # Cheaper trials tend to come earlier. Those at the end of the precision come first: they must run in any case.
    sweep.trials.sort(key=lambda trial: -1.0 if trial.scaled else trial.cost * draw.random())
    return sweep


class _RowSweep(Sweep):
    """Rows that do not depend on each other. The graph computes them in pieces, when they are needed."""

    is_row_wise = True
    _large: np.ndarray
    _piece_rows = 512  # that a graph computes at a time

    def __init__(self, graph: ComparedGraph, sizes: Sizes, decisive: int, draw: Random, largest: float, run: Run):
        """sizes: of the whole input. decisive: the number of first rows from which `with_other_rows` takes."""
        self._whole, self._large = _whole_input(graph, sizes, draw, largest)
        self._decisive = decisive
        self._run = run
        self._random = np.random.default_rng(draw.randrange(1 << 32))
        self._pieces: dict[int, Arrays] = {}

    def with_other_rows(self, trial: Trial) -> Iterator[Trial]:
        rows = np.unique(trial.rows)
        unused = self._random.permutation(np.setdiff1d(np.arange(self._decisive), rows))
        for start in range(0, len(unused) - len(rows) + 1, len(rows)):
            # Each of the trial's rows changes places with an unused one.
            swapped = np.arange(len(self._large))
            swapped[rows] = unused[start : start + len(rows)]
            swapped[swapped[rows]] = rows
            step_rows = trial.step_rows
            if step_rows is not None:
                step_rows = swapped[step_rows]
            yield replace(trial, rows=swapped[trial.rows], step_rows=step_rows)

    def expected(self, trial: Trial) -> Arrays:
        begin = int(trial.rows.min()) // self._piece_rows * self._piece_rows
        end = int(trial.rows.max()) + 1
        rows = concatenate_rows([self._piece(low) for low in range(begin, end, self._piece_rows)])
        return take_rows(rows, span_of(trial.rows - begin))

    def _piece(self, low: int) -> Arrays:
        """Return the graph's outputs for some rows. Only the first, which most trials need, are kept."""
        if low in self._pieces:
            return self._pieces[low]
        piece = self._computed(slice(low, min(low + self._piece_rows, len(self._large))))
        if low < self._decisive:
            self._pieces[low] = piece
        return piece

    def _computed(self, rows: slice) -> Arrays:
        return self._run(_cut(self._whole, rows))


class _TokenSweep(_RowSweep):
    """A block: each number of rows, and rows that are the same; of an embedding each token of the vocabulary too."""

    def __init__(self, graph: ComparedGraph, ranges: Ranges, draw: Random, largest: float, run: Run):
        # A graph of fixed sizes has one row.
        self._dim, (min_rows, max_rows) = next(iter(ranges.items()), ("", (1, 1)))
        first_rows = 1
        if self._dim:
            first_rows = max(max_rows, DECISIVE_ROWS)
        vocabulary = range(graph.assembly.vocab_size if "token_ids" in graph.dims else 0)
        count = max(first_rows, len(vocabulary))
        super().__init__(graph, {self._dim: count}, first_rows, draw, largest, run)
        starts = [(size, draw.randrange(first_rows - size + 1)) for size in range(min_rows, max_rows + 1)]
        starts += [(min(max_rows, count - start), start) for start in vocabulary[::max_rows]]
        self.trials = [self._trial(np.arange(start, start + size)) for size, start in starts]
        if self._dim:
            self.trials += [self._trial(rows, repeats) for repeats, rows in repeated_rows(min_rows, max_rows, draw)]

    def _trial(self, rows: np.ndarray, repeats: str = "") -> Trial:
        sizes = {self._dim: len(rows)}
        sizes.pop("", None)  # a graph of fixed sizes
        return Trial(Case(0, sizes, repeats=repeats), rows)

    def feed(self, trial: Trial) -> dict[str, np.ndarray]:
        return _cut(self._whole, span_of(trial.rows))


class _ExitSweep(_RowSweep):
    """An exit: each number of tokens and each of requests, in seeded pairs, and steps whose rows are the same.

    Logits are those of the first rows of the whole input, wherever in a step: few wide rows that the graph computes.
    """

    _piece_rows = 64  # as wide as the vocabulary

    def __init__(self, graph: ComparedGraph, ranges: Ranges, draw: Random, largest: float, run: Run):
        _, tokens = ranges["num_tokens"]
        _, requests = ranges["num_requests"]
        decisive = max(DECISIVE_ROWS, 2 * requests)
        sizes = {"num_tokens": max(tokens, decisive), "num_requests": 1}
        super().__init__(graph, sizes, decisive, draw, largest, run)
        counts: list[int] = []
        while len(counts) < tokens:
            counts += draw.sample(range(1, requests + 1), requests)
        self.trials = []
        for size, count in zip(range(1, tokens + 1), counts):
            # a prompt's last token, and others
            rows = [size - 1, *(draw.randrange(size) for _ in range(min(size, count) - 1))]
            self.trials.append(self._trial(np.arange(size), draw.sample(rows, len(rows))))
        for count in range(1, min(requests, tokens) + 1):
            self.trials.append(self._trial(np.arange(tokens), draw.sample(range(tokens), count)))
        for repeats, step_rows in repeated_rows(1, tokens, draw):
            rows = draw.sample(step_rows.tolist(), min(requests, len(step_rows)))
            self.trials.append(self._trial(step_rows, rows, repeats))
        self.totals = (sum(min(size, requests) for size in range(1, tokens + 1)),)

    def points(self, trial: Trial) -> list[Point]:
        return [(trial.case.sizes["num_tokens"], trial.case.sizes["num_requests"])]

    def _trial(self, step_rows: np.ndarray, rows: Sequence[int], repeats: str = "") -> Trial:
        """Return a run of a step; its rows with logits change places with some of the first."""
        case = Case(0, {"num_requests": len(rows), "num_tokens": len(step_rows)}, repeats=repeats)
        return next(self.with_other_rows(Trial(case, np.array(rows, np.int64), step_rows=step_rows)))

    def feed(self, trial: Trial) -> dict[str, np.ndarray]:
        assert trial.step_rows is not None  # of an exit
        places = {int(row): place for place, row in enumerate(trial.step_rows)}
        logit_rows = np.array([places[int(row)] for row in trial.rows], np.int64)
        return {**_cut(self._whole, trial.step_rows), "logit_rows": logit_rows}

    def _computed(self, rows: slice) -> Arrays:
        return self._run({**_cut(self._whole, rows), "logit_rows": np.arange(rows.stop - rows.start)})


def _cut(inputs: Whole, rows: np.ndarray | slice) -> dict[str, np.ndarray]:
    arrays = {}
    for name, (array, has_rows) in inputs.items():
        if has_rows:
            array = array[rows]
        arrays[name] = array
    return arrays


def _whole_input(graph: ComparedGraph, sizes: Sizes, draw: Random, largest: float) -> tuple[Whole, np.ndarray]:
    """Return the whole input of a graph of rows, and which rows go to the end of the precision.

    Every fourth row of activations has an outlier, every fourth is large: of the residual stream up to the end of its
    precision, or to `largest`. Token ids are the whole vocabulary; two of three rows have an adapter, each in turn.
    """
    dims = graph.dims
    assembly = graph.assembly
    dim = "num_tokens" if "num_tokens" in sizes else next(iter(sizes))
    arrays = inputs.arrays(graph, Case(0, dict(sizes)))
    arrays.pop("logit_rows", None)
    count = sizes.get(dim, 1)
    number = np.arange(count)
    tensors: Whole = {}
    for name, array in arrays.items():
        has_rows = dim in dims[name]
        if name == "token_ids":
            array = np.resize(np.random.default_rng(draw.randrange(1 << 32)).permutation(assembly.vocab_size), count)
        elif name == IDS:
            assert assembly.adapters is not None  # whose graphs take them
            places = np.array(draw.sample(range(assembly.adapters.max_adapters), assembly.adapters.max_adapters))
            array = np.where(number % 3 == 0, -1, np.resize(places, count))
        elif array.dtype.kind == "f" and has_rows:
            array = _activations(array, largest if name == "hidden" else None, draw)
        tensors[name] = array, has_rows
    return tensors, number % 4 == 3


def _activations(array: np.ndarray, largest: float | None, draw: Random) -> np.ndarray:
    """Return standard normal rows with outliers in some, and with others made large.

    largest: number of a residual stream, where its dtype allows it. None: it is no residual stream.
    """
    rows = array.astype(np.float64).reshape(len(array), -1)
    rows[1::4, draw.randrange(rows.shape[1])] *= _OUTLIER
    large = rows[3::4]  # a view: the changes below are to `rows`
    end = _LARGE
    if largest is not None:
        end = min(float(np.finfo(array.dtype).max), largest, LARGEST_SQUARED)
        large /= np.abs(large).max(1, keepdims=True)  # so that no number is beyond the end
    large *= np.resize(np.geomspace(4, 0.98 * end, _LEVELS), len(large))[:, None]
    return rows.reshape(array.shape).astype(array.dtype)
