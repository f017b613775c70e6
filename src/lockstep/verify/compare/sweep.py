"""All sizes of an engine, on parts of one input.

Rows do not depend on each other: what an engine gives for n tokens must be what its graph gives for the same tokens
among others. So the graph runs once, on the largest input, and an engine at every size on a part of it; whichever of
the two is wrong at one size only, they differ. A token of a sequence sees what lies before it, in whatever pieces it
comes: one whole prefill holds what every chunk and every decode step over that sequence gives.

In: a graph, the limits, a seed. Out: trials, each with its feed and what is expected.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from lockstep.artifacts.adapters import IDS
from lockstep.verify.boundaries import PAGE
from lockstep.verify.compare import inputs
from lockstep.verify.compare.inputs import Case, Graph, Sizes

Arrays = Mapping[str, np.ndarray]
Run = Callable[[Arrays], Arrays]
Ranges = Mapping[str, tuple[int, int]]
_PIECE = 512  # rows that a graph computes at a time
_SEQUENCE = 512  # tokens of the sequence that attention is run on; its scores take heads * 512^2 numbers
GROUP = 32  # trials of an exit whose rows the graph computes together
_OUTLIER = 100.0  # of one channel in every fourth row, as trained models have them
_LARGE = 64.0  # of inputs that are no residual stream, in every fourth row
_LEVELS = 8  # magnitudes from 4 to the end of the precision
# Squares of a hidden state are accumulated in float32, which ends at 2^128.
_LARGEST_SQUARED = 2.0**60
_KEYS_UP = 2.0**10  # queries are as much smaller, and fp16 has subnormal numbers below 2^-14
_PAST_STATE, _STATE = "past_state", "state_out"
_SPAN = 64  # tokens between the states that are kept


@dataclass(frozen=True)
class Trial:
    """One run of an engine. rows: those of the whole input whose outputs it must give."""

    case: Case
    rows: np.ndarray
    scaled: bool = False

    @property
    def cost(self) -> int:
        return len(self.rows) * (1 + self.case.sizes.get("past_capacity", 0))


class Sweep:
    """Trials of one graph; `feed` and `expected` give what they need."""

    trials: list[Trial]
    is_row_wise = False  # outputs are of rows that a trial has side by side
    _large: np.ndarray | None = None

    def feed(self, trial: Trial) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def expected(self, trials: Sequence[Trial]) -> list[Arrays]:
        raise NotImplementedError

    def beyond(self, trial: Trial) -> np.ndarray | None:
        """Return for each row whether its inputs go to the end of the precision; None where no row's do."""
        return None if self._large is None else self._large[trial.rows]


def sweep_of(
    graph: Graph, seed: int, run: Run, prefill: Callable[[], tuple[onnx.ModelProto, Run]], largest: float
) -> Sweep:
    """Return the sweep of a graph; its trials lie in a seeded order in which small ones tend to come first.

    run: runs the graph. prefill: gives the prefill graph of the same attention. largest: number in the engine's
    activations, where its type is narrower than the graph's; else infinity.
    """
    ranges, draw, sweep = inputs.ranges(graph), random.Random(seed), Sweep()
    if "past_capacity" in ranges:
        sweep = _AttentionSweep(graph, ranges, draw, largest, *prefill())
    elif _PAST_STATE in graph.dims and "num_requests" not in ranges:
        sweep = _StateSweep(graph, ranges, draw, run)
    elif {"num_tokens", "num_requests"} <= set(ranges):
        sweep = _ExitSweep(graph, ranges, draw, largest, run)
    else:
        sweep = _TokenSweep(graph, ranges, draw, largest, run)
    # One that is needed whatever the time comes first; else a trial's chance grows as it gets cheaper.
    sweep.trials.sort(key=lambda trial: -1.0 if trial.scaled else trial.cost * draw.random())
    return sweep


class _TokenSweep(Sweep):
    """A block: each number of rows; of an embedding also each token of the vocabulary."""

    is_row_wise = True

    def __init__(self, graph: Graph, ranges: Ranges, draw: random.Random, largest: float, run: Run):
        ((self._dim, (least, most)),) = ranges.items() or ((("", (1, 1)),))
        looks_up = "token_ids" in graph.dims
        count = max(most, graph.assembly.vocab_size) if looks_up else most
        self._whole, self._large = _rows(graph, {self._dim: count}, draw, largest)
        self._run, self._count, self._most = run, count, most
        self._pieces: dict[int, Arrays] = {}
        starts = [(size, draw.randrange(most - size + 1)) for size in range(least, most + 1)]
        starts += [(min(most, count - start), start) for start in range(0, count, most)] if looks_up else []
        self.trials = [
            Trial(Case(0, {self._dim: size} if self._dim else {}), np.arange(start, start + size))
            for size, start in starts
        ]

    def feed(self, trial: Trial) -> dict[str, np.ndarray]:
        return self._cut(int(trial.rows[0]), int(trial.rows[-1]) + 1)

    def _cut(self, first: int, end: int) -> dict[str, np.ndarray]:
        return {name: array[first:end] if wide else array for name, (array, wide) in self._whole.items()}

    def expected(self, trials: Sequence[Trial]) -> list[Arrays]:
        outputs: list[Arrays] = []
        for trial in trials:
            first, end = int(trial.rows[0]), int(trial.rows[-1]) + 1
            begin = first // _PIECE * _PIECE
            pieces = [self._piece(low) for low in range(begin, end, _PIECE)]
            join = pieces[0] if len(pieces) == 1 else {n: np.concatenate([p[n] for p in pieces]) for n in pieces[0]}
            outputs.append({name: array[first - begin : end - begin] for name, array in join.items()})
        return outputs

    def _piece(self, low: int) -> Arrays:
        """Return what the graph gives for `_PIECE` rows; those of the first sizes are kept."""
        if low in self._pieces:
            return self._pieces[low]
        piece = self._run(self._cut(low, min(low + _PIECE, self._count)))
        if low < self._most:
            self._pieces[low] = piece
        return piece


class _ExitSweep(Sweep):
    """An exit: each number of tokens and each of requests, in seeded pairs."""

    def __init__(self, graph: Graph, ranges: Ranges, draw: random.Random, largest: float, run: Run):
        (_, self._tokens), (_, requests) = ranges["num_tokens"], ranges["num_requests"]
        sizes = {"num_tokens": self._tokens, "num_requests": 1}
        self._whole, self._large = _rows(graph, sizes, draw, largest)
        self._run = run
        counts = [draw.sample(range(1, requests + 1), requests) for _ in range(-(-self._tokens // requests))]
        self.trials = []
        for size, count in zip(range(1, self._tokens + 1), [count for each in counts for count in each]):
            count = min(size, count)
            rows = [size - 1, *(draw.randrange(size) for _ in range(count - 1))]  # a prompt's last token, and others
            draw.shuffle(rows)
            self.trials.append(self._trial(size, rows))
        for count in range(1, min(requests, self._tokens) + 1):
            self.trials.append(self._trial(self._tokens, draw.sample(range(self._tokens), count)))

    def _trial(self, size: int, rows: Sequence[int]) -> Trial:
        return Trial(Case(0, {"num_requests": len(rows), "num_tokens": size}), np.array(rows, np.int64))

    def feed(self, trial: Trial) -> dict[str, np.ndarray]:
        size = trial.case.sizes["num_tokens"]
        rows = {name: array[:size] if wide else array for name, (array, wide) in self._whole.items()}
        return {**rows, "logit_rows": trial.rows}

    def expected(self, trials: Sequence[Trial]) -> list[Arrays]:
        whole = {name: array for name, (array, _) in self._whole.items()}
        outputs = self._run({**whole, "logit_rows": np.concatenate([trial.rows for trial in trials])})
        ends = np.cumsum([len(trial.rows) for trial in trials])
        return [
            {name: array[end - len(trial.rows) : end] for name, array in outputs.items()}
            for trial, end in zip(trials, ends)
        ]


class _AttentionSweep(Sweep):
    """Attention on one sequence: each chunk, each past; each capacity with each number of requests."""

    def __init__(
        self, graph: Graph, ranges: Ranges, draw: random.Random, largest: float, prefill: onnx.ModelProto, run: Run
    ):
        length = min(_SEQUENCE, graph.positions, ranges.get("num_tokens", (1, _SEQUENCE))[1])
        self._names = [value.name for value in graph.model.graph.input]
        self._stale = np.random.default_rng(draw.randrange(1 << 32))
        case = Case(0, {"num_tokens": length, "past_capacity": 1}, (0,))
        self._whole = inputs.arrays(Graph(prefill, graph.assembly, graph.limits), case)
        self._run, self._outputs = run, dict[bool, Arrays]()
        self._scaled = _scaled(self._whole, graph, largest)
        self._decodes = "num_requests" in ranges
        capacity = ranges["past_capacity"][1]
        if self._decodes:
            self.trials = list(self._decode_trials(length, capacity, ranges["num_requests"][1], draw))
        else:
            self.trials = list(self._prefill_trials(length, capacity, draw))

    def _prefill_trials(self, length: int, most: int, draw: random.Random) -> list[Trial]:
        found = []
        for number, (past, count) in enumerate(_chunks(length, draw)):
            room = max(1, past) if number < length else draw.randrange(max(1, past), max(most, past, 1) + 1)
            if room <= most:
                found.append(self._prefill_trial(past, count, room, False))
        return [*found, self._prefill_trial(length // 2, length - length // 2, max(1, length // 2), True)]

    def _prefill_trial(self, past: int, count: int, room: int, scaled: bool) -> Trial:
        case = Case(0, {"num_tokens": count, "past_capacity": room}, (past,), True)
        return Trial(case, np.arange(past, past + count), scaled)

    def _decode_trials(self, length: int, most: int, requests: int, draw: random.Random) -> list[Trial]:
        """Each capacity that a cache grows to with each number of requests, of seeded lengths."""
        capacities = [PAGE]
        while capacities[-1] < most:
            capacities.append(2 * capacities[-1])
        found = []
        for capacity in sorted({min(each, most) for each in capacities}):
            counts = range(1, min(requests, max(2, inputs.CACHE_ROWS // capacity)) + 1)
            for count, room in [*((count, 1) for count in counts), (counts[-1], 0)]:
                longest = min(capacity - room, length - 1)
                rows = [draw.randint(0, longest) for _ in range(count - 1)] + [longest]
                draw.shuffle(rows)
                case = Case(0, {"num_requests": count, "past_capacity": capacity}, tuple(rows), True)
                found.append(Trial(case, np.array(rows, np.int64)))
        return [*found, Trial(found[-1].case, found[-1].rows, True)]

    def feed(self, trial: Trial) -> dict[str, np.ndarray]:
        outputs, capacity = self._computed(trial.scaled), trial.case.sizes["past_capacity"]
        whole = self._scaled if trial.scaled else self._whole
        feed: dict[str, np.ndarray] = {}
        for name in self._names:
            if name == "past_lengths":
                feed[name] = np.array(trial.case.past_lengths, np.int64)
            elif name in ("past_key", "past_value"):
                rows = outputs[name.removeprefix("past_") + "_out"].swapaxes(0, 1)  # [heads, tokens, dim]
                stale = self._stale.standard_normal(
                    (len(trial.case.past_lengths), len(rows), capacity, rows.shape[2]), np.float32
                )
                cache = (stale * np.float32(rows.std(dtype=np.float64))).astype(rows.dtype)
                for row, length in enumerate(trial.case.past_lengths):
                    cache[row, :, :length] = rows[:, :length]
                feed[name] = cache
            else:
                feed[name] = whole[name][trial.rows]
        return feed

    def expected(self, trials: Sequence[Trial]) -> list[Arrays]:
        return [{name: array[trial.rows] for name, array in self._computed(trial.scaled).items()} for trial in trials]

    def _computed(self, scaled: bool) -> Arrays:
        if scaled not in self._outputs:
            self._outputs[scaled] = self._run(self._scaled if scaled else self._whole)
        return self._outputs[scaled]


def _scaled(whole: Arrays, graph: Graph, largest: float) -> dict[str, np.ndarray]:
    """Return the inputs of attention with values and keys at the end of the precision.

    Queries are as much smaller as keys are larger, which keeps scores in range. What that does to a score is the
    graph's to say, which is run on these inputs: where keys are normalised they do not grow, and a sink, which is no
    factor of a score, stays as it is.
    """
    end = min(float(np.finfo(whole["value"].dtype).max), largest)
    up = min(2.0 ** (math.frexp(end)[1] - 3), _LARGEST_SQUARED)  # standard normal values stay below 8
    assert graph.variant is not None  # of attention
    query = whole["query"]
    factors = np.ones((graph.variant.num_heads, graph.variant.query_dim), query.dtype)
    factors[:, : graph.variant.head_dim] = 1 / _KEYS_UP
    value, key = whole["value"], whole["key"]
    return {
        **whole,
        "query": query * factors.reshape(-1),
        "key": key * key.dtype.type(_KEYS_UP),
        "value": value * value.dtype.type(up),
    }


class _StateSweep(Sweep):
    """A prompt's tokens behind a state: each chunk, behind each number of tokens."""

    def __init__(self, graph: Graph, ranges: Ranges, draw: random.Random, run: Run):
        ((dim, (_, most)),) = ranges.items()
        self._run = run
        length = min(_SEQUENCE, graph.positions, most)
        self._whole = inputs.arrays(graph, Case(0, {dim: length}))
        self._states = {0: np.zeros_like(self._whole.pop(_PAST_STATE))}
        self._outputs = dict[str, np.ndarray]()
        self.trials = [
            Trial(Case(0, {dim: count}), np.arange(past, past + count)) for past, count in _chunks(length, draw)
        ]

    def feed(self, trial: Trial) -> dict[str, np.ndarray]:
        return self._rows(int(trial.rows[0]), int(trial.rows[-1]) + 1)

    def expected(self, trials: Sequence[Trial]) -> list[Arrays]:
        if not self._outputs:
            outputs = self._run(self._rows(0, len(next(iter(self._whole.values())))))
            self._outputs = {name: array for name, array in outputs.items() if name != _STATE}
        return [
            {
                **{name: array[trial.rows] for name, array in self._outputs.items()},
                _STATE: self._state(int(trial.rows[-1]) + 1),
            }
            for trial in trials
        ]

    def _rows(self, first: int, end: int) -> dict[str, np.ndarray]:
        rows = {name: array[first:end] for name, array in self._whole.items()}
        return {**rows, _PAST_STATE: self._state(first)}

    def _state(self, count: int) -> np.ndarray:
        """Return the state behind the first `count` tokens, computed from the last one that is kept."""
        if count not in self._states:
            self._states[count] = self._run(self._rows((count - 1) // _SPAN * _SPAN, count))[_STATE]
        return self._states[count]


def _chunks(length: int, draw: random.Random) -> list[tuple[int, int]]:
    """Return (tokens before, tokens) of chunks of a sequence.

    Each number of tokens up to its end, and so each number before; then seeded pairs.
    """
    pairs = [(past, length - past) for past in range(length)]
    for _ in range(length // 4):
        past = draw.randrange(length)
        pairs.append((past, draw.randrange(1, length - past + 1)))
    return pairs


def _rows(
    graph: Graph, sizes: Sizes, draw: random.Random, largest: float
) -> tuple[dict[str, tuple[np.ndarray, bool]], np.ndarray]:
    """Return the whole input of a graph of rows, and which rows go to the end of the precision.

    The input is {name: (array, has the rows)}. Every fourth row of activations has an outlier, every fourth is large:
    of the residual stream up to the end of its precision, or to `largest`. Token ids are the whole vocabulary; two of
    three rows have an adapter, each in turn.
    """
    dims, assembly = graph.dims, graph.assembly
    dim = "num_tokens" if "num_tokens" in sizes else next(iter(sizes))
    arrays = inputs.arrays(graph, Case(0, dict(sizes)))
    arrays.pop("logit_rows", None)
    count = sizes.get(dim, 1)
    number, whole = np.arange(count), {}
    for name, array in arrays.items():
        wide = dim in dims[name]
        if name == "token_ids":
            array = np.resize(np.random.default_rng(draw.randrange(1 << 32)).permutation(assembly.vocab_size), count)
        elif name == IDS:
            assert assembly.adapters is not None  # whose graphs take them
            places = np.array(draw.sample(range(assembly.adapters.max_adapters), assembly.adapters.max_adapters))
            array = np.where(number % 3 == 0, -1, np.resize(places, count))
        elif array.dtype.kind == "f" and wide:
            array = _activations(array, largest if name == "hidden" else None, draw)
        whole[name] = array, wide
    return whole, number % 4 == 3


def _activations(array: np.ndarray, largest: float | None, draw: random.Random) -> np.ndarray:
    """Return standard normal rows with outliers in some, and with others made large.

    largest: up to which a residual stream goes, where its type does not end before. None: it is no residual stream.
    """
    rows = array.astype(np.float64).reshape(len(array), -1)
    rows[1::4, draw.randrange(rows.shape[1])] *= _OUTLIER
    large = rows[3::4]
    end = _LARGE if largest is None else min(float(np.finfo(array.dtype).max), largest, _LARGEST_SQUARED)
    if largest is not None:
        large /= np.abs(large).max(1, keepdims=True)
    large *= np.resize(np.geomspace(4, 0.98 * end, _LEVELS), len(large))[:, None]
    return rows.reshape(array.shape).astype(array.dtype)
