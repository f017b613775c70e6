"""All sizes of an engine whose tokens depend on earlier ones: attention, and mixers with a state.

A token's output does not depend on how its sequence is chunked, so one whole prefill of the graph has the expected
outputs of every chunk and every decode step of that sequence. Longer lengths are drawn, and there the graph runs too.

In: a graph, the limits, a seed. Out: trials, each with its feed and its expected outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import onnx

from lockstep.verify.arrays import take_rows
from lockstep.verify.boundaries import PAGE
from lockstep.verify.compare import inputs
from lockstep.verify.compare.inputs import Case, ComparedGraph
from lockstep.verify.compare.trial import Arrays, Point, Ranges, Run, Sweep, Trial

SEQUENCE_TOKENS = 512  # tokens of the sequence that attention is run on; its scores take heads * 512^2 numbers
_DESIGN = 640  # decode steps, each of other lengths: for the demo model these are all
_FAR = 16  # steps that decode at lengths beyond the sequence, and chunks there
_FAR_TOKENS = 4  # of such a chunk
# Squares of a hidden state are accumulated in float32, which ends at 2^128.
LARGEST_SQUARED = 2.0**60
# Keys are scaled up and queries down by this: fp16 has subnormal numbers below 2^-14, so by no more.
_KEYS_UP = 2.0**10
PAST_STATE = "past_state"
_STATE = "state_out"
_SPAN = 64  # tokens between the states that are kept


class AttentionSweep(Sweep):
    """Attention on one sequence: each chunk, each past; each capacity with each number of requests.

    Sizes that vary together are (tokens, length of the past, capacity) of a prompt's chunk, and (requests, capacity,
    length) of decoding. A cache doubles when it is full, so it has a capacity only from the length of the one before.
    """

    is_row_wise = True  # a row of outputs is of a position of the sequence

    def __init__(
        self,
        graph: ComparedGraph,
        ranges: Ranges,
        draw: Random,
        largest: float,
        run_graph: Run,
        prefill: onnx.ModelProto,
        run_prefill: Run,
    ):
        """prefill: the graph of the same attention that computes the whole sequence; run_prefill: runs it."""
        self._graph = graph
        self._run_graph = run_graph
        _, max_tokens = ranges.get("num_tokens", (1, SEQUENCE_TOKENS))
        self._length = min(SEQUENCE_TOKENS, graph.positions, max_tokens)
        self._names = [value.name for value in graph.model.graph.input]
        self._stale = dict[tuple[str, bool], np.ndarray]()
        self._random = np.random.default_rng(draw.randrange(1 << 32))
        case = Case(0, {"num_tokens": self._length, "past_capacity": 1}, (0,))
        arrays = inputs.arrays(ComparedGraph(prefill, graph.assembly, graph.limits), case)
        self._inputs = {False: arrays, True: _scaled(arrays, graph, largest)}  # by `Trial.scaled`, as the outputs
        self._run_prefill = run_prefill
        self._outputs = dict[bool, Arrays]()
        self._decodes = "num_requests" in ranges
        self._max_capacity = ranges["past_capacity"][1]
        if self._decodes:
            self._requests = ranges["num_requests"][1]
            self.trials = list(self._decode_trials(draw))
            self.totals = self._decode_totals()
        else:
            self.trials = self._prefill_trials(draw)
            self.totals = self._prefill_totals()
        self.trials += self._far_trials(draw)

    def _decode_totals(self) -> tuple[int, int]:
        """Return the numbers of pairs and of triples of (requests, capacity, length)."""
        capacities = self._lengths()
        num_lengths = sum(map(len, capacities.values()))  # each at one capacity
        pairs = self._requests * len(capacities) + self._requests * num_lengths + num_lengths
        return pairs, self._requests * num_lengths

    def _prefill_totals(self) -> tuple[int, int]:
        """Return the numbers of pairs and of triples of (tokens, length of the past, capacity)."""
        pairs = self._length * self._max_capacity
        triples = 0
        for past in range(min(self._length, self._max_capacity + 1)):
            tokens = self._length - past
            capacities = self._max_capacity - max(past, 1) + 1
            pairs += tokens + capacities
            triples += tokens * capacities
        return pairs, triples

    def points(self, trial: Trial) -> Iterator[Point]:
        sizes = trial.case.sizes
        lengths = trial.case.past_lengths
        if not self._decodes:
            if not trial.is_far:
                yield sizes["num_tokens"], lengths[0], sizes["past_capacity"]
            return
        # A request may be shorter than any for which the cache grows to this capacity: `totals` does not have it.
        grown = self._lengths().get(sizes["past_capacity"], range(0))
        yield from ((sizes["num_requests"], sizes["past_capacity"], length) for length in lengths if length in grown)

    def _lengths(self) -> dict[int, range]:
        """Return {capacity that a cache grows to: lengths at which it has that capacity}."""
        lengths = dict[int, range]()
        capacity = min(PAGE, self._max_capacity)
        before = 0
        while capacity > before:
            lengths[capacity] = range(before, min(capacity, self._graph.positions))
            before = capacity
            capacity = min(2 * capacity, self._max_capacity)
        return lengths

    def _prefill_trials(self, draw: Random) -> list[Trial]:
        trials = []
        for number, (past, count) in enumerate(_chunks(self._length, draw)):
            capacity = max(1, past)
            if number >= self._length:  # the drawn chunks, after one of each length
                capacity = draw.randrange(capacity, max(self._max_capacity, capacity) + 1)
            if capacity <= self._max_capacity:
                trials.append(self._prefill_trial(past, count, capacity, False))
        half = self._length // 2
        return [*trials, self._prefill_trial(half, self._length - half, max(1, half), True)]

    def _prefill_trial(self, past: int, count: int, capacity: int, scaled: bool) -> Trial:
        case = Case(0, {"num_tokens": count, "past_capacity": capacity}, (past,), True)
        return Trial(case, np.arange(past, past + count), scaled)

    def _decode_trials(self, draw: Random) -> Iterator[Trial]:
        """Yield each capacity that a cache grows to with each number of requests, of seeded lengths; then `_design`."""
        last = None
        for capacity in self._lengths():
            counts = range(1, self._max_requests(capacity) + 1)
            # Caches with room for one more token; then full ones, as before they grow.
            for count, room in [*((count, 1) for count in counts), (counts[-1], 0)]:
                longest = min(capacity - room, self._length - 1)
                rows = [draw.randint(0, longest) for _ in range(count - 1)] + [longest]
                draw.shuffle(rows)
                last = self._decode_trial(capacity, rows)
                yield last
        if last is not None:
            yield Trial(last.case, last.rows, True)
        yield from self._design(draw)

    def _design(self, draw: Random) -> Iterator[Trial]:
        """Yield each number of requests with each length, in a cache of its capacity: all, or `_DESIGN` drawn steps."""
        steps = []
        for capacity, lengths in self._lengths().items():
            near = [length for length in lengths if length < self._length]
            if not near:
                break
            for count in range(1, self._max_requests(capacity) + 1):
                # All lengths in a random order, filled up to a multiple of `count`: first with others of them, each
                # once, then, where there are too few, with drawn ones.
                shuffled = draw.sample(near, len(near))
                shuffled += shuffled[: -len(near) % count]
                shuffled += [draw.choice(near) for _ in range(-len(shuffled) % count)]
                steps += [(capacity, shuffled[at : at + count]) for at in range(0, len(shuffled), count)]
        for capacity, rows in draw.sample(steps, min(_DESIGN, len(steps))):
            yield self._decode_trial(capacity, rows)

    def _decode_trial(self, capacity: int, rows: Sequence[int], is_far: bool = False) -> Trial:
        case = Case(0, {"num_requests": len(rows), "past_capacity": capacity}, tuple(rows), True)
        return Trial(case, np.array(rows, np.int64), is_far=is_far)

    def _max_requests(self, capacity: int) -> int:
        return min(self._requests, max(2, inputs.CACHE_ROWS // capacity))

    def _far_trials(self, draw: Random) -> Iterator[Trial]:
        """Yield decode steps at lengths drawn beyond the sequence, and chunks after such lengths."""
        if self._graph.positions <= self._length:
            return
        for _ in range(_FAR):
            length = draw.randrange(self._length, self._graph.positions)
            if self._decodes:
                capacity = next(capacity for capacity, lengths in self._lengths().items() if length in lengths)
                lengths = [length]
                lengths += draw.choices(self._lengths()[capacity], k=draw.randint(0, self._max_requests(capacity) - 1))
                yield self._decode_trial(capacity, draw.sample(lengths, len(lengths)), True)
                continue
            past = min(length, self._graph.positions - _FAR_TOKENS, self._max_capacity)
            if past >= self._length:
                yield replace(self._prefill_trial(past, _FAR_TOKENS, past, False), is_far=True)

    def feed(self, trial: Trial) -> dict[str, np.ndarray]:
        if trial.is_far:
            return inputs.arrays(self._graph, trial.case)
        outputs = self._computed(trial.scaled)
        capacity = trial.case.sizes["past_capacity"]
        arrays = self._inputs[trial.scaled]
        feed: dict[str, np.ndarray] = {}
        for name in self._names:
            if name == "past_lengths":
                feed[name] = np.array(trial.case.past_lengths, np.int64)
            elif name in ("past_key", "past_value"):
                rows = outputs[name.removeprefix("past_") + "_out"].swapaxes(0, 1)  # [heads, tokens, dim]
                stale = self._stale_rows(name, trial.scaled, rows)[:, :capacity]
                cache = np.repeat(stale[None], len(trial.case.past_lengths), 0)
                for row, length in enumerate(trial.case.past_lengths):
                    cache[row, :, :length] = rows[:, :length]
                feed[name] = cache
            else:
                feed[name] = arrays[name][trial.rows]
        return feed

    def _stale_rows(self, name: str, scaled: bool, like: np.ndarray) -> np.ndarray:
        """Return garbage for the cache rows after a request's own, of the same magnitude: [heads, capacity, dim].

        An engine that reads past a request's length then gives wrong numbers, which zeros would hide.
        """
        if (name, scaled) not in self._stale:
            stale = self._random.standard_normal((len(like), self._max_capacity, like.shape[2]), np.float32)
            self._stale[name, scaled] = (stale * np.float32(like.std(dtype=np.float64))).astype(like.dtype)
        return self._stale[name, scaled]

    def expected(self, trial: Trial) -> Arrays:
        if trial.is_far:
            return self._run_graph(self.feed(trial))
        return take_rows(self._computed(trial.scaled), trial.rows)

    def _computed(self, scaled: bool) -> Arrays:
        if scaled not in self._outputs:
            self._outputs[scaled] = self._run_prefill(self._inputs[scaled])
        return self._outputs[scaled]


def _scaled(arrays: Arrays, graph: ComparedGraph, largest: float) -> dict[str, np.ndarray]:
    """Return the inputs of attention with values and keys at the end of the precision.

    Queries are scaled down as keys are scaled up, which keeps scores in range. The graph runs on these inputs too, so
    scores need not stay equal: a graph that normalises keys undoes their factor. A sink logit is not scaled.
    """
    end = min(float(np.finfo(arrays["value"].dtype).max), largest)
    up = min(2.0 ** (math.frexp(end)[1] - 3), LARGEST_SQUARED)  # standard normal values stay below 8
    assert graph.variant is not None  # of attention
    query = arrays["query"]
    factors = np.ones((graph.variant.num_heads, graph.variant.query_dim), query.dtype)
    factors[:, : graph.variant.head_dim] = 1 / _KEYS_UP
    value = arrays["value"]
    key = arrays["key"]
    return {
        **arrays,
        "query": query * factors.reshape(-1),
        "key": key * key.dtype.type(_KEYS_UP),
        "value": value * value.dtype.type(up),
    }


class StateSweep(Sweep):
    """A prompt's tokens after a state: each chunk, after each number of tokens."""

    def __init__(self, graph: ComparedGraph, ranges: Ranges, draw: Random, run: Run):
        ((dim, (_, max_tokens)),) = ranges.items()  # of a chunk: a state's size is fixed
        self._run = run
        length = min(SEQUENCE_TOKENS, graph.positions, max_tokens)
        self._whole = inputs.arrays(graph, Case(0, {dim: length}))
        past_state = self._whole.pop(PAST_STATE)
        self._states: dict[int, Arrays] = {0: {_STATE: np.zeros_like(past_state)}}
        self._outputs = dict[str, np.ndarray]()
        self.trials = [
            Trial(Case(0, {dim: count}), np.arange(past, past + count)) for past, count in _chunks(length, draw)
        ]

    def feed(self, trial: Trial) -> dict[str, np.ndarray]:
        return self._rows(int(trial.rows[0]), int(trial.rows[-1]) + 1)

    def expected(self, trial: Trial) -> Arrays:
        if not self._outputs:
            outputs = self._run(self._rows(0, len(next(iter(self._whole.values())))))
            self._outputs = {name: array for name, array in outputs.items() if not name.endswith(_STATE)}
        return {**take_rows(self._outputs, trial.rows), **self._state(int(trial.rows[-1]) + 1)}

    def _rows(self, first: int, end: int) -> dict[str, np.ndarray]:
        rows = {name: array[first:end] for name, array in self._whole.items()}
        return {**rows, PAST_STATE: self._state(first)[_STATE]}

    def _state(self, count: int) -> Arrays:
        """Return the state after the first `count` tokens, with its noise, computed from the last stored one."""
        if count not in self._states:
            outputs = self._run(self._rows((count - 1) // _SPAN * _SPAN, count))
            self._states[count] = {name: array for name, array in outputs.items() if name.endswith(_STATE)}
        return self._states[count]


def _chunks(length: int, draw: Random) -> list[tuple[int, int]]:
    """Return (tokens before, tokens) of chunks: each one that ends with the sequence; then seeded pairs."""
    pairs = [(past, length - past) for past in range(length)]
    for _ in range(length // 4):
        past = draw.randrange(length)
        pairs.append((past, draw.randrange(1, length - past + 1)))
    return pairs
