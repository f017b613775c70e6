"""The data flow of a packed trace.

It tells which values depend on tokens, which see positions, and where attention may be cut.

In: a graph with its attention nodes, and the names of its weights. Out: for an input of an attention the value to cut
at, and the nodes between the two.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from lockstep.export.known import dtype_of, number, shape_of
from lockstep.export.markers import DOMAIN

_MOVEMENT = {
    "Reshape",
    "Transpose",
    "Slice",
    "Split",
    "Concat",
    "Unsqueeze",
    "Squeeze",
    "Neg",
    "Identity",
    "Expand",
    "Cast",
}


class Flow:
    """The values that depend on tokens, and those that see positions without a weight in between."""

    def __init__(self, graph: ir.Graph, weights: frozenset[str]):
        self.graph = graph
        self.weights = {value for value in graph.initializers.values() if value.name in weights}
        self.positions = next((value for value in graph.inputs if value.name == "position_ids"), None)
        self.tokens = {value for value in graph.inputs if value is not self.positions}
        self.positional: set[ir.Value] = set()
        for node in graph:
            if any(value in self.tokens for value in node.inputs):
                self.tokens.update(node.outputs)
            if (
                node.domain != DOMAIN
                and not self.weighted(node)
                and any(v is self.positions or v in self.positional for v in node.inputs)
            ):
                self.positional.update(node.outputs)

    def weighted(self, node: ir.Node) -> bool:
        return any(value in self.weights for value in node.inputs)

    def position_only(self, value: ir.Value) -> bool:
        """Return whether a value is computed from positions alone, so that every block that needs it computes it."""
        return value in self.positional and value not in self.tokens

    def walk(self, value: ir.Value, stops: Collection[ir.Value] = ()) -> tuple[list[ir.Value], set[ir.Node]]:
        """Return the token values that `value` is made of by positions and movement alone, and the nodes in between."""
        sources: list[ir.Value] = []
        between: set[ir.Node] = set()
        seen: set[ir.Value] = set()
        stack: list[ir.Value | None] = [value]
        while stack:
            reached = stack.pop()
            if reached in seen or reached is None or reached is self.positions:
                continue
            seen.add(reached)
            node = reached.producer()
            moved = (
                reached in self.tokens and node is not None and node.op_type in _MOVEMENT and not self.weighted(node)
            )
            if reached not in stops and (reached in self.positional or moved):
                assert node is not None  # what positions are in was computed
                between.add(node)
                stack.extend(node.inputs)
            elif reached in self.tokens:
                sources.append(reached)
        return sources, between

    def cut_value(self, value: ir.Value) -> ir.Value:
        """Return where to cut for one input of an attention.

        It is the earliest of the single values that hold just the input's numbers in the narrowest type.

        RoPE then falls into the batchless part. Where no such value exists before positions come in (a key
        that is put together from two tensors), the cut is at the attention and RoPE stays batchful.
        """
        width = number(shape_of(value)[1]) * number(shape_of(value)[2])
        _, between = self.walk(value)
        candidates = {
            operand
            for node in between
            for operand in (*node.outputs, *node.inputs)
            if operand is not None and operand in self.tokens and operand not in self.positional
        }
        fitting = [candidate for candidate in candidates if layout_of(candidate, width) is not None]
        order = {output: index for index, node in enumerate(self.graph) for output in node.outputs}
        for candidate in sorted(fitting, key=lambda v: (dtype_of(v).itemsize, order.get(v, -1))):
            sources, _ = self.walk(value, stops={candidate})
            if sources == [candidate]:
                return candidate
        return value


def layout_of(value: ir.Value, width: int) -> str | None:
    """Return "flat" [N, width], "tokens" [N, heads, dim], "heads" [heads, N, dim], or None."""
    if value.shape is None:
        return None
    fixed = [isinstance(dim, int) for dim in value.shape]
    if fixed == [False, True]:
        return "flat" if value.shape[1] == width else None
    if fixed == [False, True, True]:
        return "tokens" if value.shape[1] * value.shape[2] == width else None
    if fixed == [True, False, True]:
        return "heads" if value.shape[0] * value.shape[2] == width else None
    return None
