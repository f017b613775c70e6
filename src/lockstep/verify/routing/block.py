"""A block with a router, and its engine: which choices did the engine make, and do its outputs follow from them?

In: a graph with its weights, rows of its inputs and an engine's outputs for them. Out: the choices, and the graph's
outputs for them. Rows are independent: one call may compute a row several times, for different choices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort

from lockstep.artifacts.signature import IO
from lockstep.onnx_tools.judge import relative_errors
from lockstep.onnx_tools.rounded import exact_and_rounded
from lockstep.onnx_tools.sessions import open_session
from lockstep.verify.arrays import concatenate_rows, take_rows
from lockstep.verify.graphs import Graph
from lockstep.verify.routing.choices import Choice, with_choices

Arrays = dict[str, np.ndarray]
_ROWS = 64  # computed at once: each of them gathers the weights of its experts
_MAX_CANDIDATES = 64  # combinations of choices that are tried for a row
_DRAWS = 8  # of roundings, where there may be a near-tie
_MOVE = 2.0**-5  # relative change of each input in a draw: several roundings, so that the draws are independent
_SCREEN = 4  # times the noise of one draw: a larger margin is no near-tie


@dataclass(frozen=True)
class Routed:
    """Rows of a block with the engine's choices forced.

    outputs: the graph's, float32. noisy: the same with 16-bit values rounded to bf16. chosen: {choice: bool [rows,
    width]}. tied: rows with another choice that is as good, bool [rows]. margins: of each row to its nearest other
    choice, in units of what rounding in this block may decide.
    """

    outputs: Arrays
    noisy: Arrays
    chosen: dict[str, np.ndarray]
    tied: np.ndarray
    margins: np.ndarray

    def may_differ(self, blocks: int) -> np.ndarray:
        """Return the rows that the reference may route otherwise, bool [rows]. blocks: those up to this one.

        Its scores differ by the rounding of each of them, and of their weights.
        """
        return self.tied | (self.margins <= math.sqrt(blocks))


class ChoosingBlock:
    """A graph of blocks with its choices as inputs and outputs. choices: empty without a router."""

    def __init__(self, graph: Graph, threads: int | None):
        model, self.choices = with_choices(graph.model, forced=True)
        self._inputs = graph.inputs
        self._slots = graph.slots
        self._outputs = graph.outputs
        if self.choices:
            exact, rounded = exact_and_rounded(model, [io.name for io in graph.slots])
            self._exact = open_session(exact.SerializeToString(), threads)
            self._rounded = open_session(rounded.SerializeToString(), threads)

    def forces(self, chosen: Mapping[str, np.ndarray], positions: np.ndarray, count: int) -> Arrays:
        """Return {choice: input that forces it} for the rows at `positions` of `count`; the others choose freely."""
        forces = {}
        for choice in self.choices:
            forces[choice.name] = np.zeros((count, choice.width), np.float32)
            forces[choice.name][positions] = choice.force(chosen[choice.name])
        return forces

    def forced(self, inputs: Arrays, weights: Arrays, forces: Mapping[str, np.ndarray]) -> Arrays:
        """Return the outputs where choices are forced. forces: as of the method of that name."""
        pieces = []
        for rows, piece in self._pieces(inputs):
            pieces.append(self._run(self._exact, piece, weights, take_rows(forces, rows)))
        outputs = concatenate_rows(pieces)
        return {io.name: outputs[io.name] for io in self._outputs}

    def follow(self, inputs: Arrays, weights: Arrays, engine_outputs: Arrays, tie_factor: float) -> Routed:
        """Return the graph's outputs for an engine's choices, which are inferred from its outputs for these inputs.

        tie_factor: rounding may decide a margin of up to this many times the noise of a score in bf16.
        """
        parts = []
        for rows, piece in self._pieces(inputs):
            parts.append(self._resolve(piece, weights, take_rows(engine_outputs, rows), tie_factor))
        return Routed(
            concatenate_rows([part.outputs for part in parts]),
            concatenate_rows([part.noisy for part in parts]),
            concatenate_rows([part.chosen for part in parts]),
            np.concatenate([part.tied for part in parts]),
            np.concatenate([part.margins for part in parts]),
        )

    def _resolve(self, inputs: Arrays, weights: Arrays, engine_outputs: Arrays, tie_factor: float) -> Routed:
        """Follow the graph's own choices, and at near-ties those of the engine."""
        exact = self._run(self._exact, inputs, weights, {})
        chosen = {choice.name: choice.chosen(exact[choice.scores]) for choice in self.choices}
        noisy = self._run(self._rounded, inputs, weights, self._forces(chosen))
        margins = np.full(self._rows(inputs), np.inf)
        # A cheap screen by one draw of roundings: only rows that it cannot clear are tried in several ways below.
        for choice in self.choices:
            error = np.sqrt(np.square(_error(exact, noisy, choice)).max(axis=1))
            decided = tie_factor * np.maximum(error, np.sqrt(np.mean(np.square(error))))
            with np.errstate(divide="ignore", invalid="ignore"):  # where nothing is rounded, or scores are masked
                margins = np.fmin(margins, choice.margins(exact[choice.scores]) / decided)
        tied = margins <= _SCREEN
        rows = np.flatnonzero(tied)
        if len(rows):
            unresolved = self._take(inputs, rows)
            resolved = self._resolve_ties(unresolved, weights, take_rows(engine_outputs, rows), tie_factor)
            tied[rows] = resolved.tied
            for arrays, of_tied in ((exact, resolved.outputs), (noisy, resolved.noisy), (chosen, resolved.chosen)):
                for name, array in of_tied.items():
                    arrays[name][rows] = array
        outputs = {name: exact[name] for name in engine_outputs}
        return Routed(outputs, {name: noisy[name] for name in engine_outputs}, chosen, tied, margins)

    def _resolve_ties(self, inputs: Arrays, weights: Arrays, engine_outputs: Arrays, tie_factor: float) -> Routed:
        """Try each row with all near-tied choices; keep those whose outputs are nearest to the engine's."""
        noise = self._score_noise(inputs, weights)
        count = len(next(iter(engine_outputs.values())))
        # Candidates: the row that each is of, and its choices so far. Scores of a later choice depend on the earlier
        # ones, so each candidate branches at each choice.
        rows = np.arange(count)
        chosen = dict[str, np.ndarray]()
        for choice in self.choices:
            scores = self._run(self._exact, self._take(inputs, rows), weights, self._forces(chosen))[choice.scores]
            branches = []
            for number, row in enumerate(rows):
                margin = tie_factor * noise[choice.name][row]
                branches += [(number, mask) for mask in choice.alternatives(scores[number], margin)]
            branches = _limited(rows, branches)
            numbers = np.array([number for number, _ in branches])
            chosen = take_rows(chosen, numbers)
            chosen[choice.name] = np.stack([mask for _, mask in branches])
            rows = rows[numbers]
        outputs = self._run(self._exact, self._take(inputs, rows), weights, self._forces(chosen))
        errors = np.sum([_squared(outputs[name], array[rows]) for name, array in engine_outputs.items()], axis=0)
        best = np.array([int(np.flatnonzero(rows == row)[np.argmin(errors[rows == row])]) for row in range(count)])
        chosen = take_rows(chosen, best)
        noisy = self._run(self._rounded, inputs, weights, self._forces(chosen))
        return Routed(
            {name: outputs[name][best] for name in engine_outputs},
            {name: noisy[name] for name in engine_outputs},
            chosen,
            np.bincount(rows, minlength=count) > 1,
            np.full(count, np.nan),
        )

    def _score_noise(self, inputs: Arrays, weights: Arrays) -> Arrays:
        """Return the rms noise of each score in bf16 [rows, width], over some draws of roundings.

        Each draw is of inputs that are moved by a few times their own rounding.
        """
        random = np.random.default_rng(0)
        squares = {choice.name: np.zeros(()) for choice in self.choices}
        for _ in range(_DRAWS):
            moved = dict(inputs)
            for name, array in inputs.items():
                if array.dtype.kind == "f":
                    moved[name] = array * (1 + _MOVE * random.uniform(-1, 1, array.shape)).astype(np.float32)
            exact = self._run(self._exact, moved, weights, {})
            forces = self._forces({choice.name: choice.chosen(exact[choice.scores]) for choice in self.choices})
            noisy = self._run(self._rounded, moved, weights, forces)
            for choice in self.choices:
                squares[choice.name] = squares[choice.name] + np.square(_error(exact, noisy, choice))
        return {name: np.sqrt(total / _DRAWS) for name, total in squares.items()}

    def _forces(self, chosen: Mapping[str, np.ndarray]) -> Arrays:
        return {choice.name: choice.force(chosen[choice.name]) for choice in self.choices if choice.name in chosen}

    def _run(
        self, session: ort.InferenceSession, inputs: Arrays, weights: Arrays, forces: Mapping[str, np.ndarray]
    ) -> Arrays:
        """Return outputs and scores. forces: of the choices that are forced."""
        rows = self._rows(inputs)
        feeds = {**inputs, **weights}
        for choice in self.choices:
            free = np.zeros((rows, choice.width), np.float32)
            feeds[choice.forced] = forces.get(choice.name, free)
        declared = {value.name: value.type for value in session.get_inputs()}
        feeds = {name: _as_declared(feeds[name], kind) for name, kind in declared.items()}
        names = [value.name for value in session.get_outputs()]
        return dict(zip(names, session.run(names, feeds)))

    def _pieces(self, inputs: Arrays) -> Iterator[tuple[slice, Arrays]]:
        for start in range(0, self._rows(inputs), _ROWS):
            rows = slice(start, start + _ROWS)
            yield rows, self._take(inputs, np.arange(self._rows(inputs))[rows])

    def _rows(self, inputs: Arrays) -> int:
        return next(len(inputs[io.name]) for io in self._inputs if is_of_tokens(io))

    def _take(self, inputs: Arrays, rows: np.ndarray) -> Arrays:
        """Return the inputs of some rows; each row of logits is that of its token."""
        selected = {io.name: np.ascontiguousarray(inputs[io.name][rows]) for io in self._inputs if is_of_tokens(io)}
        if any(io.name == "logit_rows" for io in self._inputs):
            selected["logit_rows"] = np.arange(len(rows))
        return selected


def _error(exact: Arrays, noisy: Arrays, choice: Choice) -> np.ndarray:
    """Return the errors of a choice's scores; 0 where they are not finite, as masked scores."""
    with np.errstate(invalid="ignore"):
        error = noisy[choice.scores].astype(np.float64) - exact[choice.scores]
    return np.where(np.isfinite(error), error, 0.0)


def is_of_tokens(io: IO) -> bool:
    return bool(io.shape) and io.shape[0] == "num_tokens"


def _as_declared(array: np.ndarray, kind: str) -> np.ndarray:
    """Return float32 for 16 bits where a graph was widened."""
    if kind == "tensor(float)":
        return array.astype(np.float32, copy=False)
    return array


def _squared(expected: np.ndarray, actual: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.nan_to_num(np.square(relative_errors(expected, actual)).mean(axis=1), nan=np.inf)


def _limited(rows: np.ndarray, branches: Sequence[tuple[int, np.ndarray]]) -> list[tuple[int, np.ndarray]]:
    """Return the first `_MAX_CANDIDATES` branches of each row."""
    counts = Counter[int]()
    limited = []
    for number, mask in branches:
        counts[rows[number]] += 1
        if counts[rows[number]] <= _MAX_CANDIDATES:
            limited.append((number, mask))
    return limited
