"""Which axis of an operator's inputs corresponds to an axis of its outputs.

In: an operator, and an axis of its outputs. Out: for each input the corresponding axis: outputs at index i of theirs
depend only on index i of the input's. None: they depend on all of the input. Packing (`simplify`), the proof that
tokens do not mix (`independence`) and tensor parallelism (`shard_parts`) rely on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from lockstep.onnx_tools.values import array_of, shape_of

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
        inputs: list[tuple | None] = []
        for value in node.inputs:
            has_shape = value is not None and value.shape is not None
            inputs.append(tuple(shape_of(value)) if has_shape else None)
        outputs = [tuple(value.shape or ()) for value in node.outputs]
        return cls(node.op_type, attributes, inputs, outputs, lambda position: array_of(node.inputs[position]))

    @property
    def rank(self) -> int:
        return len(self.inputs[0] or ())

    def axis(self, default: int) -> int:
        """Return the attribute `axis`, counted from the front of the first input."""
        return self.attributes.get("axis", default) % self.rank

    def numbers(self, position: int) -> list[int] | None:
        """Return a constant input as numbers; None where it is absent or not constant."""
        if len(self.inputs) <= position:
            return None
        array = self.constant(position)
        return None if array is None else np.atleast_1d(array).tolist()

    def axes(self, position: int) -> list[int]:
        """Return axes that a constant input names, counted from the front of the first input."""
        return [axis % self.rank for axis in self.numbers(position) or ()]

    def axes_except(self, removed: Collection[int]) -> list[int]:
        return [axis for axis in range(self.rank) if axis not in removed]


def axes_of_inputs(op: Operator, axis: int) -> Axes | None:
    """Return the axis of each input that corresponds to `axis` of the outputs; None for an unknown operator."""
    output_rank = len(op.outputs[0])
    if op.op_type in ELEMENTWISE:
        return [_broadcast_axis(shape, axis - output_rank) for shape in op.inputs]
    if op.op_type == "Concat":
        return [_unless_mixed(axis, [op.axis(0)])] * len(op.inputs)
    mixed_axes = _mixed_axes(op)
    if mixed_axes is not None:
        if not op.attributes.get("keepdims", 1):  # reduced axes are gone: count in the input's
            axis = op.axes_except(mixed_axes)[axis]
        axes: Axes = [_unless_mixed(axis, mixed_axes)]
    else:
        rule = _RULES.get(op.op_type)
        if rule is None:
            return None
        axes = rule(op, axis)
    # A rule names the axes of data; inputs after them are shapes and indices, on which all outputs depend.
    return [*axes, *[None] * (len(op.inputs) - len(axes))]


def _unless_mixed(axis: int, mixed_axes: Collection[int]) -> int | None:
    return None if axis in mixed_axes else axis


def _broadcast_axis(shape: Sequence[Any] | None, axis_from_end: int) -> int | None:
    """Return an axis counted from the end as one from the front; None where a shape is too short to have it."""
    if shape is None or axis_from_end + len(shape) < 0:
        return None
    return axis_from_end + len(shape)


def _mixed_axes(op: Operator) -> Sequence[int] | None:
    """Return the axes of its first input that an operator computes along; None for one that only moves values."""
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


# Rules of operators that move or multiply values: (operator, an axis of its outputs) -> axes of its first inputs.


def _squeeze(op: Operator, axis: int) -> Axes:
    removed = op.axes(1) or [index for index, size in enumerate(op.inputs[0] or ()) if size == 1]
    return [op.axes_except(removed)[axis]]


def _unsqueeze(op: Operator, axis: int) -> Axes:
    added = [number % len(op.outputs[0]) for number in op.numbers(1) or ()]
    if axis in added:
        return [None]
    return [axis - sum(number < axis for number in added)]


def _reshape(op: Operator, axis: int) -> Axes:
    """Return the input axis with as many numbers before it: an index there selects the same elements."""
    shape = op.inputs[0] or ()
    numbers_before = math.prod(op.outputs[0][:axis])
    candidates = [index for index in range(op.rank) if math.prod(shape[:index]) == numbers_before]
    return [max(candidates, default=None)]


def _expand(op: Operator, axis: int) -> Axes:
    shape = op.inputs[0] or ()
    input_axis = _broadcast_axis(op.inputs[0], axis - len(op.outputs[0]))
    if input_axis is None or shape[input_axis] == 1:
        return [None]
    return [input_axis]


def _matmul(op: Operator, axis: int) -> Axes:
    lhs, rhs = op.inputs
    from_end = axis - len(op.outputs[0])  # -1 columns, -2 rows
    is_lhs_vector = len(lhs or ()) == 1
    is_rhs_vector = len(rhs or ()) == 1
    if is_rhs_vector or (is_lhs_vector and from_end < -1):  # a vector adds no axis to the output
        from_end -= 1
    axes: list[int | None] = [None, None]
    if from_end != -1 and not is_lhs_vector:
        axes[0] = _broadcast_axis(lhs, from_end)
    if from_end != -2 and not is_rhs_vector:
        axes[1] = _broadcast_axis(rhs, from_end)
    return axes


def _gemm(op: Operator, axis: int) -> Axes:
    bias_axes = [_broadcast_axis(shape, axis - 2) for shape in op.inputs[2:]]
    if axis == 0:
        return [int(bool(op.attributes.get("transA"))), None, *bias_axes]
    return [None, int(not op.attributes.get("transB")), *bias_axes]


def _gather(op: Operator, axis: int) -> Axes:
    # The output has the indices' axes in place of the gathered one.
    gather_axis = op.axis(0)
    index_rank = len(op.inputs[1] or ())
    if axis < gather_axis:
        return [axis]
    if axis < gather_axis + index_rank:
        return [None, axis - gather_axis]
    return [axis - index_rank + 1]


def _gather_nd(op: Operator, axis: int) -> Axes:
    batch_dims = op.attributes.get("batch_dims", 0)
    *index_dims, depth = op.inputs[1] or (1,)
    if axis >= len(index_dims):
        return [batch_dims + depth + axis - len(index_dims)]
    return [axis if axis < batch_dims else None, axis]


def _scatter_nd(op: Operator, axis: int) -> Axes:
    depth = (op.inputs[1] or (1,))[-1]  # number of axes that the indices address
    if axis < depth:
        return []
    return [axis, None, _broadcast_axis(op.inputs[2], axis - op.rank)]


def _one_hot(op: Operator, axis: int) -> Axes:
    added = op.attributes.get("axis", -1) % (op.rank + 1)
    if axis == added:
        return [None]
    return [axis - (axis > added)]


def _einsum(op: Operator, axis: int) -> Axes:
    operands, _, result = op.attributes["equation"].replace(" ", "").partition("->")
    axes: list[int | None] = []
    for subscripts in operands.split(","):
        axes.append(None)
        if "." not in operands and result[axis] in subscripts:  # an ellipsis is not followed
            axes[-1] = subscripts.index(result[axis])
    return axes


def _gather_elements(op: Operator, axis: int) -> Axes:
    return [_unless_mixed(axis, [op.axis(0)]), axis]


def _scatter_elements(op: Operator, axis: int) -> Axes:
    return [_unless_mixed(axis, [op.axis(0)])] * 3


def _transpose(op: Operator, axis: int) -> Axes:
    reversed_axes = range(op.rank)[::-1]
    return [op.attributes.get("perm", reversed_axes)[axis]]


_RULES: dict[str, Callable[[Operator, int], Axes]] = {
    "Einsum": _einsum,
    "Expand": _expand,
    "Flatten": _reshape,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "OneHot": _one_hot,
    "Reshape": _reshape,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
