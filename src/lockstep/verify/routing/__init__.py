"""Choices inside a model, such as a router's experts, and the outputs that follow from near-ties."""

from __future__ import annotations

import onnx

COMPARISONS = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual")
OPERATORS = ("TopK", "ArgMax", *COMPARISONS)


def may_choose(model: onnx.ModelProto) -> bool:
    """Return whether a graph has an operator that may be a router's."""
    return any(node.op_type in OPERATORS for node in model.graph.node)
