"""Prove that a traced graph keeps tokens apart outside attention.

No value may be carried from one token to another.

In: a packed trace (simplify.pack). Out: nothing, or an InputError that names the first operator that mixes tokens. In a
step the tokens of all requests lie one after another, and a prompt may come in pieces: a value that depends on another
token depends on the other requests and on the cut of the prompt, even when it does so only from some length on, where
no test may look.

Method: the only dimension of a packed trace that is not a fixed number is that of the tokens. Each value is followed
from the inputs: one that depends on tokens must have exactly one such dimension, and what it is made of must have its
own along the axis that goes with it (axes.py). An operator of which that is not known is refused. Sizes (how many
tokens a step has) may shape values, and nothing else.
"""

from __future__ import annotations

import onnx_ir as ir

from lockstep.errors import InputError
from lockstep.export.axes import Operator, axes_of_inputs
from lockstep.export.markers import DOMAIN


class _Mixes(Exception):
    """What an operator does along the tokens."""


def check_independence(graph: ir.Graph, model_type: str) -> None:
    """Raise InputError for the first operator but token mixers that mixes tokens."""
    tokens = set(graph.inputs)
    sizes = _Sizes()
    for node in graph:
        try:
            if node.domain == DOMAIN:
                tokens.update(node.outputs)
            elif node.op_type == "Shape":
                sizes.add_shape(node)
            elif any(value in tokens for value in node.inputs):
                if any(
                    value in sizes
                    for index, value in enumerate(node.inputs)
                    if index not in _SHAPE_INPUTS.get(node.op_type, ())
                ):
                    raise _Mixes("computes with the number of tokens in a step")
                tokens.update(_check_apart(node, tokens))
            elif any(value in sizes for value in node.inputs):
                tokens.update(sizes.follow(node))
        except _Mixes as reason:
            raise InputError(
                f"model type {model_type!r} cannot be split: outside attention its {node.op_type} {reason}; a "
                "request's result would depend on the requests beside it, and on how its prompt is cut"
            ) from None


def _check_apart(node: ir.Node, tokens: set[ir.Value]) -> list[ir.Value]:
    """Return the outputs that are read, whose tokens are each made of the same token of the inputs."""
    used = [output for output in node.outputs if output.uses() or output.is_graph_output()]
    given = [(position, _axis(value)) for position, value in enumerate(node.inputs) if value in tokens]
    is_known = node.domain in ("", "ai.onnx")
    for output in used:
        axes = axes_of_inputs(Operator.of(node), _axis(output)) if is_known else None
        if axes is None:
            raise _Mixes("may mix tokens: it is not known to keep them apart")
        if any(axes[position] != axis for position, axis in given):
            raise _Mixes("mixes along the tokens")
    return used


# Operators that take a shape, and where.
_SHAPE_INPUTS = {"Reshape": (1,), "Expand": (1,)}
_ARITHMETIC = frozenset(
    "Gather Slice Squeeze Unsqueeze Concat Cast Identity Add Sub Mul Div Mod Min Max Reshape".split()
)


class _Sizes:
    """Values computed from the number of tokens of a step: they may say how large something is, and nothing else."""

    def __init__(self) -> None:
        self.dims: dict[ir.Value, list] = {}  # of those that are a shape, or part of one
        self.others: set[ir.Value] = set()

    def __contains__(self, value: ir.Value | None) -> bool:
        if value is None:
            return False
        return value in self.others or any(not isinstance(dim, int) for dim in self.dims.get(value, ()))

    def add_shape(self, node: ir.Node) -> None:
        source = node.inputs[0]
        if source is None or source.shape is None:
            raise _Mixes("takes the size of a value of unknown shape")
        start, end = (node.attributes[name].as_int() if name in node.attributes else None for name in ("start", "end"))
        self.dims[node.outputs[0]] = list(source.shape)[start:end]

    def follow(self, node: ir.Node) -> list[ir.Value]:
        """Note what a node that reads sizes gives; return constants as long as the tokens, to be followed as these."""
        if node.op_type == "ConstantOfShape" and node.inputs[0] in self.dims:
            node.outputs[0].shape = ir.Shape(self.dims[node.inputs[0]])  # what inference may have left open
        if node.op_type in ("ConstantOfShape", "Expand") and (node.op_type != "Expand" or node.inputs[0] not in self):
            return [
                output
                for output in node.outputs
                if output.shape is None or any(not isinstance(dim, int) for dim in output.shape)
            ]
        if node.op_type not in _ARITHMETIC:
            raise _Mixes("computes with the number of tokens in a step")
        index = Operator.of(node).numbers(1)
        if node.op_type == "Gather" and node.inputs[0] in self.dims and index is not None:
            self.dims[node.outputs[0]] = [self.dims[node.inputs[0]][i] for i in index]
        else:
            self.others.update(node.outputs)
        return []


def _axis(value: ir.Value) -> int:
    """Return the axis of the tokens in a value that depends on them."""
    if value.shape is None:
        raise _Mixes("gives a value of unknown shape")
    axes = [axis for axis, dim in enumerate(value.shape) if not isinstance(dim, int)]
    if len(axes) != 1:
        raise _Mixes("mixes along the tokens")
    return axes[0]
