"""The choices of a graph, such as a router's top-k, as inputs and outputs of the graph.

In: a graph. Out: one with the scores of each choice as outputs, and inputs that force it. At a near-tie, where scores
differ by less than rounding, an engine that rounds elsewhere may choose others, and is right.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult, add_input, infer_types, replace, run_passes
from lockstep.onnx_tools.values import array_of, attribute, required
from lockstep.verify.routing import COMPARISONS, OPERATORS, may_choose

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_FORCE = 1e6  # added to a score that must win: larger than all scores, and float32 still orders the others
_MOST_TIED = 6  # near-tied scores of a row, the nearest ones, of which all combinations are tried


@dataclass(frozen=True)
class Choice:
    """One choice of a graph, of each row.

    name: of the output with its indices, or its booleans. count: how many are chosen; 0 where each score is compared
    with a limit, which is then subtracted from `scores`. largest: whether the larger scores are chosen.
    """

    name: str
    count: int
    width: int
    largest: bool = True

    @property
    def scores(self) -> str:
        """The output [rows, width] float32."""
        return f"scores of {self.name}"

    @property
    def forced(self) -> str:
        """The input [rows, width] float32, which is added to the scores."""
        return f"forced {self.name}"

    def _signed(self, scores: np.ndarray) -> np.ndarray:
        """Return scores of which the larger are chosen."""
        if self.largest:
            return scores
        return -scores

    def chosen(self, scores: np.ndarray) -> np.ndarray:
        ordered = self._signed(scores)
        if not self.count:
            return ordered > 0
        first = np.argsort(-ordered, axis=1, kind="stable")[:, : self.count]
        chosen = np.zeros(scores.shape, bool)
        np.put_along_axis(chosen, first, True, axis=1)
        return chosen

    def force(self, chosen: np.ndarray) -> np.ndarray:
        not_chosen = 0.0 if self.count else -_FORCE  # a limit is not a competition: each score must be moved
        return self._signed(np.where(chosen, _FORCE, not_chosen).astype(np.float32))

    def margins(self, scores: np.ndarray) -> np.ndarray:
        """Return how near each row's choice is to another one, [rows] float64."""
        ordered = self._signed(scores).astype(np.float64)
        if not self.count:
            return np.abs(ordered).min(axis=1)
        ordered = -np.sort(-ordered, axis=1)
        with np.errstate(invalid="ignore"):
            return ordered[:, self.count - 1] - ordered[:, self.count]

    def alternatives(self, scores: np.ndarray, tolerance: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the choices, bool [width], that are as good for a row's scores [width]; first the scores' own.

        tolerance [width]: two scores are near-tied where they differ by at most the larger of theirs. Of more than
        `_MOST_TIED` near-tied scores the nearest ones count.
        """
        chosen = self.chosen(scores[None])[0]
        yield chosen
        ordered = self._signed(scores).astype(np.float64)
        if not self.count:
            # The largest tolerance of the row: that of a score which is itself the limit is 0 in some draws.
            for flipped in _subsets(_nearest(np.abs(ordered), tolerance.max())):
                yield chosen ^ _mask(flipped, len(scores))
            return
        with np.errstate(invalid="ignore"):
            apart = ordered[:, None] - ordered  # of each two
            distance = np.where(chosen, ordered - ordered[~chosen].max(), ordered[chosen].min() - ordered)
        near = (apart <= np.maximum(tolerance[:, None], tolerance)) & chosen[:, None] & ~chosen
        tied = _nearest(np.where(near.any(0) | near.any(1), distance, np.inf), np.finfo(float).max)
        # Exchange some of the chosen ones for as many others, each near-tied with each.
        leaving = [i for i in tied if chosen[i]]
        coming = [i for i in tied if not chosen[i]]
        for size in range(1, min(len(leaving), len(coming)) + 1):
            for removed in itertools.combinations(leaving, size):
                for added in itertools.combinations(coming, size):
                    if near[np.ix_(removed, added)].all():
                        yield chosen ^ _mask((*removed, *added), len(scores))


def _nearest(distances: np.ndarray, tolerance: float) -> list[int]:
    near = [int(i) for i in np.argsort(distances, kind="stable") if distances[i] <= tolerance]
    return near[:_MOST_TIED]


def _subsets(items: list[int]) -> Iterator[tuple[int, ...]]:
    for size in range(1, len(items) + 1):
        yield from itertools.combinations(items, size)


def _mask(places: tuple[int, ...], width: int) -> np.ndarray:
    mask = np.zeros(width, bool)
    mask[list(places)] = True
    return mask


def with_choices(model: onnx.ModelProto, forced: bool = False) -> tuple[onnx.ModelProto, tuple[Choice, ...]]:
    """Return a copy with the scores of each choice among its outputs, and the choices in the graph's order.

    The model itself where there is none. forced: with an input for each; zeros leave the choice to the scores.
    """
    if not may_choose(model):
        return model, ()
    expose = ExposeChoices(forced)
    return run_passes(model, expose), tuple(expose.choices)


class ExposeChoices(Pass):
    """Make the scores of each choice an output. forced: add an input that forces it.

    A choice takes the largest of some scores of each row (TopK, ArgMax), or compares each with a limit.
    """

    def __init__(self, forced: bool):
        self._forced = forced
        self.choices: list[Choice] = []

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        infer_types(model)
        for node in [*graph]:
            choice = _choice(node)
            if choice is None:
                continue
            self.choices.append(choice)
            writer = GraphWriter(graph, f"{choice.name}/choice", before=node)
            scores = required(node.inputs[0])
            if not choice.count:
                scores = writer.op("Sub", *node.inputs)
            as_float = writer.op("Cast", scores, to=ir.DataType.FLOAT, result=choice.scores)
            as_float.type = ir.TensorType(ir.DataType.FLOAT)
            as_float.shape = ir.Shape([None, choice.width])
            graph.outputs.append(as_float)
            if self._forced:
                force = add_input(graph, choice.forced, ir.DataType.FLOAT, ["rows", choice.width])
                _force(writer, node, writer.op("Add", as_float, force))
        return PassResult(model, bool(self.choices))


def _choice(node: ir.Node) -> Choice | None:
    """Return the choice that a node makes for each row; None for other nodes."""
    if node.op_type not in OPERATORS:
        return None
    scores = required(node.inputs[0])
    shape = [*(scores.shape or ())]
    if scores.dtype not in _FLOATS or len(shape) != 2 or not isinstance(shape[1], int):
        return None
    width = shape[1]
    if node.op_type in COMPARISONS:
        return Choice(str(node.outputs[0].name), 0, width, node.op_type.startswith("Greater"))
    default_axis = -1 if node.op_type == "TopK" else 0  # ONNX's
    if attribute(node, "axis", default_axis) not in (1, -1):
        return None
    if node.op_type == "ArgMax":
        return Choice(str(node.outputs[0].name), 1, width) if width > 1 else None
    count = array_of(node.inputs[1])
    if count is None or int(count[0]) >= width or not node.outputs[1].uses():
        return None  # a sort of all scores, or a node of which only values are read, chooses nothing
    return Choice(str(node.outputs[1].name), int(count[0]), width, bool(attribute(node, "largest", 1)))


def _force(writer: GraphWriter, node: ir.Node, moved: ir.Value) -> None:
    """Let a node choose by moved scores, while readers of its values still get the original scores."""
    if node.op_type in COMPARISONS:
        writer.copy(node, moved, np.zeros(1, np.float32), replaces=node.outputs[0])
        return
    scores = required(node.inputs[0])
    node.replace_input_with(0, writer.op("Cast", moved, to=scores.dtype))
    if node.op_type == "TopK":
        values, places = node.outputs
        after = GraphWriter(writer.graph, f"{values.name}/chosen", after=node)
        replace(values, after.op("GatherElements", scores, places, axis=-1))
        values.name = f"{places.name}/moved"
