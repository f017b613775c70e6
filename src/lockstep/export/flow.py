"""Data flow of a packed trace: which values depend on tokens or positions, and where attention may be cut.

In: a graph with its attention nodes, and the names of its weights. Out: for an input of an attention the value to cut
at, and the nodes between the two: RoPE and data movement, which read no weight.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import onnx_ir as ir

from lockstep.export.markers import DOMAIN
from lockstep.onnx_tools.values import dtype_of, number, shape_of

_MOVEMENT = frozenset("Cast Concat Expand Identity Neg Reshape Slice Split Squeeze Transpose Unsqueeze".split())
_SCALING = ("Div", "Mul")  # linear where one operand is of tokens
_LINEAR = (_MOVEMENT - {"Expand"}) | {"Add", "Gather", "Sub"}  # Expand: one head's numbers for all


class Flow:
    """Which values depend on tokens (`tokens`), and which on positions without a weight in between (`positional`)."""

    def __init__(self, graph: ir.Graph, weights: frozenset[str]):
        self.graph = graph
        self.weights = {value for value in graph.initializers.values() if value.name in weights}
        self.positions = next((value for value in graph.inputs if value.name == "position_ids"), None)
        self.tokens = {value for value in graph.inputs if value is not self.positions}
        self.positional: set[ir.Value] = set()
        for node in graph:
            if any(value in self.tokens for value in node.inputs):
                self.tokens.update(node.outputs)
            reads_positions = any(value is self.positions or value in self.positional for value in node.inputs)
            if reads_positions and node.domain != DOMAIN and not self.reads_weight(node):
                self.positional.update(node.outputs)

    def reads_weight(self, node: ir.Node) -> bool:
        return any(value in self.weights for value in node.inputs)

    def is_position_only(self, value: ir.Value) -> bool:
        """Return whether a value depends on positions alone, so that every block that needs it computes it."""
        return value in self.positional and value not in self.tokens

    def walk(self, value: ir.Value, stops: Collection[ir.Value] = ()) -> tuple[list[ir.Value], set[ir.Node]]:
        """Return the token values that `value` is made of by positions and movement alone, and the nodes in between."""
        sources: list[ir.Value] = []
        between: set[ir.Node] = set()
        visited: set[ir.Value] = set()
        stack: list[ir.Value | None] = [value]
        while stack:
            current = stack.pop()
            if current in visited or current is None or current is self.positions:
                continue
            visited.add(current)
            node = current.producer()
            is_moved = node is not None and node.op_type in _MOVEMENT and not self.reads_weight(node)
            is_between = current in self.positional or (is_moved and current in self.tokens)
            if is_between and node is not None and current not in stops:
                between.add(node)
                stack.extend(node.inputs)
            elif current in self.tokens:
                sources.append(current)
        return sources, between

    def cut_value(self, value: ir.Value) -> ir.Value:
        """Return where to cut for one input of an attention: the earliest value with just its numbers.

        Of several the one with the narrowest type is preferred. RoPE then becomes part of the batchless graph. Where no
        such value exists before positions are used (a key that is joined from two tensors), or where more than RoPE
        follows (a norm of its result), the cut is at the attention and RoPE stays in the block.
        """
        width = number(shape_of(value)[1]) * number(shape_of(value)[2])
        _, between = self.walk(value)
        candidates = set()
        for node in between:
            for operand in (*node.outputs, *node.inputs):
                if operand is not None and operand in self.tokens and operand not in self.positional:
                    candidates.add(operand)
        fitting = [candidate for candidate in candidates if layout_of(candidate, width) is not None]
        order: dict[ir.Value, int] = {}  # of values in the graph, so that the choice does not depend on a set's order
        for index, node in enumerate(self.graph):
            order.update(dict.fromkeys(node.outputs, index))
        for candidate in sorted(fitting, key=lambda v: (dtype_of(v).itemsize, order.get(v, -1))):
            sources, between = self.walk(value, stops={candidate})
            if sources == [candidate] and all(self._may_be_rope(node) for node in between):
                return candidate
        return value

    def _may_be_rope(self, node: ir.Node) -> bool:
        """Return whether a node reads positions alone, or is linear in the numbers of tokens, head by head."""
        num_tokens = sum(value in self.tokens for value in node.inputs)
        if node.op_type in _SCALING:
            return num_tokens < 2
        return num_tokens == 0 or node.op_type in _LINEAR


def layout_of(value: ir.Value, width: int) -> str | None:
    """Return "flat" [N, width], "tokens" [N, heads, dim], "heads" [heads, N, dim], or None."""
    if value.shape is None:
        return None
    sizes = [dim for dim in value.shape if isinstance(dim, int)]
    is_fixed = tuple(isinstance(dim, int) for dim in value.shape)
    if math.prod(sizes) != width:
        return None
    layouts = {(False, True): "flat", (False, True, True): "tokens", (True, False, True): "heads"}
    return layouts.get(is_fixed)
