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
import onnx
from onnx import TensorProto, helper

from lockstep.backends.onnxruntime.whole_vectors import VECTOR
from lockstep.onnx_tools.rewriter import Emitter, Rewriter, attributes_of, typed_values

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
_IN_TURN = 5  # numbers along another axis than the last that are added one after another


def fix_sums(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose sums and means are in one order; itself where all of them are already."""
    graph = Rewriter(model)
    nodes = [node for node in graph.nodes if node.op_type in ("ReduceSum", "ReduceMean")]
    types = typed_values(model) if nodes else {}
    fixed = False
    for node in nodes:
        element_type, shape = types.get(node.input[0], (TensorProto.UNDEFINED, ()))
        axes = _axes(graph, node, len(shape))
        sizes = [shape[axis] for axis in axes]
        is_static = all(isinstance(size, int) for size in sizes)
        # Tokens lie along axis 0, which is never summed.
        if element_type not in _FLOATS or not axes or 0 in axes or not is_static:
            continue
        size = math.prod(map(int, sizes))
        rest = [axis for axis in range(len(shape)) if axis not in axes]
        is_last = axes[0] == len(rest)
        if is_last and (size <= VECTOR or size % VECTOR == 0):
            continue
        if not is_last and size <= _IN_TURN:
            continue
        emit = Emitter(graph, f"{node.output[0]}/sum")
        value = node.input[0]
        if not is_last:
            value = emit("Transpose", value, perm=[*rest, *axes])
        if len(axes) > 1:
            value = emit("Reshape", value, [*[0] * len(rest), size])
        if size % VECTOR:
            value = emit("Pad", value, [*[0] * (2 * len(rest) + 1), -size % VECTOR])
        keeps_axes = attributes_of(node).get("keepdims", 1)
        is_mean = node.op_type == "ReduceMean"
        last = {} if keeps_axes else {"result": node.output[0]}
        value = emit("ReduceSum", value, [-1], keepdims=0, **({} if is_mean else last))
        if is_mean:
            divisor = np.array(size, helper.tensor_dtype_to_np_dtype(element_type))
            value = emit("Div", value, divisor, **last)
        if keeps_axes:
            emit("Unsqueeze", value, axes, result=node.output[0])
        graph.replace(node, *emit.nodes)
        fixed = True
    return graph.finish() if fixed else model


def _axes(graph: Rewriter, node: onnx.NodeProto, rank: int) -> list[int]:
    """Return the axes that are summed, sorted; none where the graph does not say them."""
    given = graph.array(node.input[1]) if len(node.input) > 1 else attributes_of(node).get("axes")
    return [] if given is None or not rank else sorted(int(axis) % rank for axis in np.ravel(given))
