"""Sums in one order, at any row address.

In: a graph; out: one whose sums give a row the same bits in any batch. ONNX Runtime accumulates rows of more than 4
numbers in whole vectors from the first aligned one on: where the row size is no multiple of 4, the first aligned number
depends on the row's address (5, 6, 7 and 10 experts of a token, whose weights are normalised). Along another axis it
accumulates more than 5 numbers in another order if there is a single row. So such sums are computed along the last
axis, padded with zeros to a multiple of 4; sums of other sizes do not change.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from lockstep.backends.onnxruntime.whole_vectors import VECTOR
from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult, infer_types
from lockstep.onnx_tools.values import array_of, attribute

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
_IN_TURN = 5  # numbers along another axis than the last that are added one after another


class FixSums(Pass):
    """Make sums and means in one order."""

    def call(self, model: ir.Model) -> PassResult:
        nodes = [node for node in model.graph if node.op_type in ("ReduceSum", "ReduceMean")]
        if nodes:
            infer_types(model)
        fixed = [node for node in nodes if _fix(model.graph, node)]
        return PassResult(model, bool(fixed))


def _fix(graph: ir.Graph, node: ir.Node) -> bool:
    """Write a sum in one order; return whether it was not already."""
    value = node.inputs[0]
    (out,) = node.outputs
    if value is None or value.shape is None or value.dtype not in _FLOATS:
        return False
    shape = [*value.shape]
    axes = _axes(node, len(shape))
    sizes = [shape[axis] for axis in axes]
    # Axis 0 is of tokens and never summed.
    if not axes or 0 in axes or not all(isinstance(size, int) for size in sizes):
        return False
    size = math.prod(map(int, sizes))
    other_axes = [axis for axis in range(len(shape)) if axis not in axes]
    is_last = axes[0] == len(other_axes)
    if is_last and (size <= VECTOR or size % VECTOR == 0):
        return False
    if not is_last and size <= _IN_TURN:
        return False
    writer = GraphWriter(graph, f"{out.name}/sum", before=node)
    total = value
    if not is_last:
        total = writer.op("Transpose", total, perm=[*other_axes, *axes])
    if len(axes) > 1:
        total = writer.op("Reshape", total, [*[0] * len(other_axes), size])
    if size % VECTOR:
        total = writer.op("Pad", total, [*[0] * (2 * len(other_axes) + 1), -size % VECTOR])
    keeps_axes = attribute(node, "keepdims", 1)
    is_mean = node.op_type == "ReduceMean"
    last = None if keeps_axes else out
    if is_mean:
        # The mean divides by the size before padding.
        total = writer.op("ReduceSum", total, [-1], keepdims=0)
        total = writer.op("Div", total, np.array(size, value.dtype.numpy()), replaces=last)
    else:
        total = writer.op("ReduceSum", total, [-1], keepdims=0, replaces=last)
    if keeps_axes:
        writer.op("Unsqueeze", total, axes, replaces=out)
    return True


def _axes(node: ir.Node, rank: int) -> list[int]:
    """Return the axes that are summed, sorted; none where they are not constant."""
    axes = array_of(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None or not rank:
        return []
    return sorted(int(axis) % rank for axis in np.ravel(axes))
