"""Round activations to int8, in standard operators.

A row is rounded in groups, those of the weight that it is multiplied with: symmetric, the step is the group's largest
magnitude over 127, to nearest, ties to even. The result is float32. A library whose int8 product rounds in this way
itself gets the product without these nodes.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from lockstep.onnx_tools.toolkit import GraphWriter
from lockstep.onnx_tools.values import maker

_LEVELS = 127.0  # of int8, on each side of zero
_TINY = 1e-30  # the step of a group of zeros
_CHAIN = ("Reshape", "Mul", "Round", "Div", "Reshape")  # from the result of rounding back to its source


def nearest_multiples(
    writer: GraphWriter, activation: ir.Value, columns: int, group_size: int
) -> tuple[ir.Value, ir.Value]:
    """Write an activation [rows, columns] as [rows, num_groups, group_size], and rounded to multiples of the step."""
    groups = writer.op("Reshape", activation, [-1, columns // group_size, group_size])
    largest = writer.op("ReduceMax", writer.op("Abs", groups), [-1], keepdims=1)
    step = writer.op("Max", writer.op("Mul", largest, np.float32(1 / _LEVELS)), np.float32(_TINY))
    return groups, writer.op("Mul", writer.op("Round", writer.op("Div", groups, step)), step)


def rounded(graph: ir.Graph, before: ir.Node, activation: ir.Value, columns: int, group_size: int) -> ir.Value:
    """Round an activation [rows, columns] before a node; return the result, of this shape."""
    writer = GraphWriter(graph, f"{activation.name}/{group_size}", before)
    _, multiples = nearest_multiples(writer, activation, columns, group_size)
    return writer.op("Reshape", multiples, [-1, columns])


def before_rounding(activation: ir.Value | None) -> ir.Value | None:
    """Return the input of `rounded` if an activation is its result; else None."""
    for operator in _CHAIN:
        node = maker(activation, operator)
        if node is None:
            return None
        activation = node.inputs[0]
    return activation
