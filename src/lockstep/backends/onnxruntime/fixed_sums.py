"""Sums in one order, wherever a row lies.

In: a graph; out: one whose sums give a row the same bits alone and among others. ONNX Runtime adds up rows of more than
4 numbers in whole vectors from the first aligned one on: where a row is no multiple of 4, that is another number for
each place in memory (5, 6, 7 and 10 experts of a token, whose weights are normalised). Along another axis it adds more
than 5 numbers in another order where there is one row alone. So such sums are made along the last axis, padded with
zeros to a multiple of 4; sums of other sizes are left as they are.
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
    # Tokens lie along axis 0, which is never summed.
    if not axes or 0 in axes or not all(isinstance(size, int) for size in sizes):
        return False
    size = math.prod(map(int, sizes))
    rest = [axis for axis in range(len(shape)) if axis not in axes]
    is_last = axes[0] == len(rest)
    if is_last and (size <= VECTOR or size % VECTOR == 0):
        return False
    if not is_last and size <= _IN_TURN:
        return False
    writer = GraphWriter(graph, f"{out.name}/sum", before=node)
    total = value
    if not is_last:
        total = writer.op("Transpose", total, perm=[*rest, *axes])
    if len(axes) > 1:
        total = writer.op("Reshape", total, [*[0] * len(rest), size])
    if size % VECTOR:
        total = writer.op("Pad", total, [*[0] * (2 * len(rest) + 1), -size % VECTOR])
    keeps_axes = attribute(node, "keepdims", 1)
    is_mean = node.op_type == "ReduceMean"
    last = None if keeps_axes else out
    total = writer.op("ReduceSum", total, [-1], keepdims=0, replaces=None if is_mean else last)
    if is_mean:
        total = writer.op("Div", total, np.array(size, value.dtype.numpy()), replaces=last)
    if keeps_axes:
        writer.op("Unsqueeze", total, axes, replaces=out)
    return True


def _axes(node: ir.Node, rank: int) -> list[int]:
    """Return the axes that are summed, sorted; none where the graph does not say them."""
    axes = array_of(node.inputs[1]) if len(node.inputs) > 1 else attribute(node, "axes")
    return [] if axes is None or not rank else sorted(int(axis) % rank for axis in np.ravel(axes))
