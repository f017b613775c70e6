"""Which axes of an operator's inputs go with an axis of its outputs.

In: an operator, and an axis of its outputs. Out: for each input the axis that goes with it: what the operator gives at
an index there is made of what the input has at this index. None: of what it has at all. Packing (`simplify`), the proof
that tokens are kept apart (`independence`) and the split over ranks (`shard_parts`) stand on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from lockstep.export.known import array_of

ELEMENTWISE = frozenset(
    "Abs Add And Atanh Cast Ceil Clip Cos Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid "
    "HardSwish Identity IsNaN LeakyRelu Less LessOrEqual Log Max Min Mish Mod Mul Neg Not Or Pow Reciprocal Relu Round "
    "Selu Sigmoid Sign Sin Softplus Sqrt Sub Tanh Where Xor".split()
)
REDUCTIONS = frozenset("ReduceMax ReduceMean ReduceMin ReduceSum ReduceSumSquare ReduceL2".split())
Axes = Sequence[int | None]


@dataclass(frozen=True)
class Operator:
    """A node of a graph. inputs, outputs: their shapes, None for an input that is absent; constant: by position."""

    op_type: str
    attributes: Mapping[str, Any]
    inputs: Sequence[Sequence[Any] | None]
    outputs: Sequence[Sequence[Any]]
    constant: Callable[[int], np.ndarray | None]

    @classmethod
    def of(cls, node: ir.Node) -> Operator:
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        inputs = [None if value is None or value.shape is None else tuple(value.shape) for value in node.inputs]
        outputs = [tuple(value.shape or ()) for value in node.outputs]
        return cls(node.op_type, attributes, inputs, outputs, lambda position: array_of(node.inputs[position]))

    @property
    def rank(self) -> int:
        return len(self.inputs[0] or ())

    def axis(self, default: int) -> int:
        """Return the attribute `axis`, counted from the front of the first input."""
        return self.attributes.get("axis", default) % self.rank

    def numbers(self, position: int) -> list[int] | None:
        """Return a constant input as numbers; None where it is absent or no constant."""
        array = self.constant(position) if len(self.inputs) > position else None
        return None if array is None else np.atleast_1d(array).tolist()

    def axes(self, position: int) -> list[int]:
        """Return axes that a constant input names, counted from the front of the first input."""
        return [axis % self.rank for axis in self.numbers(position) or ()]


def axes_of_inputs(op: Operator, axis: int) -> Axes | None:
    """Return the axes that go with `axis` of the outputs; None of an operator that is not known."""
    out = len(op.outputs[0])
    if op.op_type in ELEMENTWISE:
        return [_from_the_end(shape, axis - out) for shape in op.inputs]
    if op.op_type == "Concat":
        return [None if axis == op.axis(0) else axis for _ in op.inputs]
    if (over := _axes_gone_over(op)) is not None:
        if not op.attributes.get("keepdims", 1):
            axis = [kept for kept in range(op.rank) if kept not in over][axis]
        axes: Axes = [None if axis in over else axis]
    else:
        rule = _RULES.get(op.op_type)
        if rule is None:
            return None
        axes = rule(op, axis)
    return [*axes, *[None] * (len(op.inputs) - len(axes))]


def _from_the_end(shape: Sequence[Any] | None, place: int) -> int | None:
    return None if shape is None or place + len(shape) < 0 else place + len(shape)


def _axes_gone_over(op: Operator) -> Sequence[int] | None:
    """Return the axes of its first input that an operator computes along; None of one that moves values."""
    if op.op_type in REDUCTIONS:
        return op.axes(1) or [axis % op.rank for axis in op.attributes.get("axes") or range(op.rank)]
    match op.op_type:
        case "LogSoftmax" | "Softmax" | "TopK":
            return [op.axis(-1)]
        case "ArgMax" | "Split":
            return [op.axis(0)]
        case "LayerNormalization" | "RMSNormalization":
            return range(op.axis(-1), op.rank)
        case "CumSum":
            return op.axes(1) or [0]
        case "Slice":
            return op.axes(3) or range(len(op.numbers(1) or ()) or op.rank)
    return None


# Rules of what moves or multiplies values: {operator: (it, an axis of its outputs) -> the axes of its first inputs}.


def _squeeze(op: Operator, axis: int) -> Axes:
    taken = op.axes(1) or [number for number, size in enumerate(op.inputs[0] or ()) if size == 1]
    return [[kept for kept in range(op.rank) if kept not in taken][axis]]


def _unsqueeze(op: Operator, axis: int) -> Axes:
    added = [number % len(op.outputs[0]) for number in op.numbers(1) or ()]
    return [None if axis in added else axis - sum(number < axis for number in added)]


def _reshape(op: Operator, axis: int) -> Axes:
    """Find the axis with as many numbers before it: what follows an index there follows it behind the reshape too."""
    given = op.inputs[0] or ()
    before = math.prod(op.outputs[0][:axis])
    return [max((own for own in range(op.rank) if math.prod(given[:own]) == before), default=None)]


def _expand(op: Operator, axis: int) -> Axes:
    own = _from_the_end(op.inputs[0], axis - len(op.outputs[0]))
    return [None if own is None or (op.inputs[0] or ())[own] == 1 else own]


def _matmul(op: Operator, axis: int) -> Axes:
    left, right = op.inputs
    place = axis - len(op.outputs[0])  # from the end: -1 columns, -2 rows
    if len(right or ()) == 1 or (len(left or ()) == 1 and place < -1):  # a vector, which has none of its own
        place -= 1
    rows = None if place == -1 or len(left or ()) == 1 else _from_the_end(left, place)
    return [rows, None if place == -2 or len(right or ()) == 1 else _from_the_end(right, place)]


def _gemm(op: Operator, axis: int) -> Axes:
    row = int(bool(op.attributes.get("transA")))
    column = int(not op.attributes.get("transB"))
    added = [_from_the_end(shape, axis - 2) for shape in op.inputs[2:]]
    return [row if axis == 0 else None, column if axis else None, *added]


def _gather(op: Operator, axis: int) -> Axes:
    at = op.axis(0)
    chosen = len(op.inputs[1] or ())
    if at <= axis < at + chosen:
        return [None, axis - at]
    return [axis if axis < at else axis - chosen + 1]


def _gather_nd(op: Operator, axis: int) -> Axes:
    batch, (*rows, depth) = op.attributes.get("batch_dims", 0), op.inputs[1] or (1,)
    if axis >= len(rows):
        return [batch + depth + axis - len(rows)]
    return [axis if axis < batch else None, axis]


def _scatter_nd(op: Operator, axis: int) -> Axes:
    chosen = (op.inputs[1] or (1,))[-1]  # axes that indices choose in
    return [axis, None, _from_the_end(op.inputs[2], axis - op.rank)] if axis >= chosen else []


def _one_hot(op: Operator, axis: int) -> Axes:
    added = op.attributes.get("axis", -1) % (op.rank + 1)
    return [None if axis == added else axis - (axis > added)]


def _einsum(op: Operator, axis: int) -> Axes:
    terms, _, result = op.attributes["equation"].replace(" ", "").partition("->")
    return [None if "." in terms or (at := term.find(result[axis])) < 0 else at for term in terms.split(",")]


_RULES: dict[str, Callable[[Operator, int], Axes]] = {
    "Einsum": _einsum,
    "Expand": _expand,
    "Flatten": _reshape,
    "Gather": _gather,
    "GatherElements": lambda op, axis: [None if axis == op.axis(0) else axis, axis],
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "OneHot": _one_hot,
    "Reshape": _reshape,
    "ScatterElements": lambda op, axis: [None if axis == op.axis(0) else axis] * 3,
    "ScatterND": _scatter_nd,
    "Squeeze": _squeeze,
    "Transpose": lambda op, axis: [op.attributes.get("perm", range(op.rank)[::-1])[axis]],
    "Unsqueeze": _unsqueeze,
}
