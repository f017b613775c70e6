"""Round activations to int8, in standard operators.

A row is rounded in groups, those of the weight that it is multiplied with: symmetric, the step is the group's largest
magnitude over 127, to nearest, ties to even. The result is float32. A library whose int8 product rounds in this way
itself gets the product without these nodes.
"""

from __future__ import annotations

import numpy as np
import onnx

from lockstep.onnx_tools.rewriter import Emitter, Rewriter

_LEVELS = 127.0  # of int8, on each side of zero
_TINY = 1e-30  # the step of a group of zeros
_CHAIN = ("Reshape", "Mul", "Round", "Div", "Reshape")  # from the result of rounding back to its source


def nearest_multiples(emit: Emitter, activation: str, columns: int, group_size: int) -> tuple[str, str]:
    """Emit an activation [rows, columns] as [rows, num_groups, group_size], and rounded to multiples of the step."""
    groups = emit("Reshape", activation, [-1, columns // group_size, group_size])
    largest = emit("ReduceMax", emit("Abs", groups), [-1], keepdims=1)
    step = emit("Max", emit("Mul", largest, np.float32(1 / _LEVELS)), np.float32(_TINY))
    return groups, emit("Mul", emit("Round", emit("Div", groups, step)), step)


def rounding(graph: Rewriter, activation: str, columns: int, group_size: int) -> list[onnx.NodeProto]:
    """Return nodes that round an activation [rows, columns]; the last one's result has this shape."""
    emit = Emitter(graph, f"{activation}/{group_size}")
    _, multiples = nearest_multiples(emit, activation, columns, group_size)
    emit("Reshape", multiples, [-1, columns])
    return emit.nodes


def before_rounding(graph: Rewriter, activation: str) -> str | None:
    """Return the input of `rounding` if an activation is its result; else None."""
    for operator in _CHAIN:
        node = graph.producers.get(activation)
        if node is None or node.op_type != operator:
            return None
        activation = node.input[0]
    return activation
