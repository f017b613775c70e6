"""Activations that are rounded to int8, in a graph's own operators.

A row is rounded in groups, those of the weight that it is multiplied with: symmetric, the step is the group's largest
magnitude over 127, to nearest, ties to even. What comes out is float32. A library whose int8 product rounds in this way
itself is given the product without these nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from lockstep.onnx_tools.rewriter import Rewriter

_LEVELS = 127.0  # of int8, on each side of zero
_TINY = 1e-30  # the step of a group of zeros
_CHAIN = ("Reshape", "Mul", "Round", "Div", "Reshape")  # from what is rounded back to what it is made of


def nearest_multiples(
    graph: Rewriter, activation: str, columns: int, group_size: int
) -> tuple[list[onnx.NodeProto], str]:
    """Return what rounds an activation [rows, columns]; the last node gives it [rows, num_groups, group_size].

    The first gives the activation itself in this shape. Also the constant that brings it back into rows.
    """
    stem = f"{activation}/{group_size}"
    in_groups = ints(graph, "groups", [-1, columns // group_size, group_size])
    in_rows, last = ints(graph, "rows", [-1, columns]), ints(graph, "last_axis", [-1])
    levels = graph.constant("two_parts/levels", np.array(1 / _LEVELS, np.float32))
    tiny = graph.constant("two_parts/tiny", np.array(_TINY, np.float32))
    steps: Sequence[tuple[str, Sequence[str], str]] = (
        ("Reshape", [activation, in_groups], "groups"),
        ("Abs", [f"{stem}/groups"], "magnitudes"),
        ("ReduceMax", [f"{stem}/magnitudes", last], "largest"),
        ("Mul", [f"{stem}/largest", levels], "step"),
        ("Max", [f"{stem}/step", tiny], "positive_step"),
        ("Div", [f"{stem}/groups", f"{stem}/positive_step"], "quotients"),
        ("Round", [f"{stem}/quotients"], "integers"),
        ("Mul", [f"{stem}/integers", f"{stem}/positive_step"], "high"),
    )
    attributes: dict[str, dict[str, Any]] = {"ReduceMax": {"keepdims": 1}}
    nodes = [helper.make_node(op, inputs, [f"{stem}/{out}"], **attributes.get(op, {})) for op, inputs, out in steps]
    return nodes, in_rows


def rounding(graph: Rewriter, activation: str, columns: int, group_size: int) -> list[onnx.NodeProto]:
    """Return what rounds an activation [rows, columns]; the last node gives it in this shape."""
    nodes, in_rows = nearest_multiples(graph, activation, columns, group_size)
    inputs = [nodes[-1].output[0], in_rows]
    return [*nodes, helper.make_node("Reshape", inputs, [f"{activation}/{group_size}/rounded"])]


def before_rounding(graph: Rewriter, activation: str) -> str | None:
    """Return what `rounding` was given where an activation is what it gives; else None."""
    for operator in _CHAIN:
        node = graph.producers.get(activation)
        if node is None or node.op_type != operator:
            return None
        activation = node.input[0]
    return activation


def ints(graph: Rewriter, what: str, values: Sequence[int]) -> str:
    return graph.constant(f"two_parts/{what}/{'x'.join(map(str, values))}", np.array(values, np.int64))
