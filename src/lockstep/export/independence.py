"""Prove that a traced graph does not mix tokens outside attention.

In: a packed trace (simplify.pack). Out: nothing, or an InputError that names the first operator that mixes tokens. In a
step the tokens of all requests lie one after another, and a prompt may be chunked: a value that depends on another
token depends on the other requests and on the chunks of the prompt, even when it does so only from some length on,
which no test may reach.

Method: the only dimension of a packed trace that is not a fixed number is that of the tokens. Values are followed from
the inputs: one that depends on tokens must have exactly one such dimension, and the values that it depends on must have
theirs along the corresponding axis (axes.py). An unknown operator is rejected. Sizes (how many tokens a step has) may
only be used as shapes.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from lockstep.errors import InputError
from lockstep.export.axes import Operator, axes_of_inputs
from lockstep.export.markers import DOMAIN


class _MixesError(Exception):
    """How an operator mixes tokens."""


def check_independence(graph: ir.Graph, model_type: str) -> None:
    """Raise InputError for the first operator other than token mixers that mixes tokens."""
    tokens = set(graph.inputs)
    sizes = _Sizes()
    for node in graph:
        try:
            if node.domain == DOMAIN:
                tokens.update(node.outputs)
            elif node.op_type == "Shape":
                sizes.add_shape(node)
            elif any(value in tokens for value in node.inputs):
                shape_inputs = _SHAPE_INPUTS.get(node.op_type, ())
                for index, value in enumerate(node.inputs):
                    if value in sizes and index not in shape_inputs:
                        raise _MixesError("computes with the number of tokens in a step")
                tokens.update(_check_node(node, tokens))
            elif any(value in sizes for value in node.inputs):
                tokens.update(sizes.follow(node))
        except _MixesError as reason:
            raise InputError(
                f"model type {model_type!r} cannot be split: outside attention its {node.op_type} {reason}; a "
                "request's result would depend on the other requests of its steps, and on how its prompt is cut"
            ) from None


def _check_node(node: ir.Node, tokens: set[ir.Value]) -> list[ir.Value]:
    """Return a node's outputs that are read. Raises _MixesError where one depends on other tokens of the inputs."""
    used = [output for output in node.outputs if output.uses() or output.is_graph_output()]
    input_axes = [(position, _token_axis(value)) for position, value in enumerate(node.inputs) if value in tokens]
    for output in used:
        axes = None
        if node.domain in ("", "ai.onnx"):
            axes = axes_of_inputs(Operator.of(node), _token_axis(output))
        if axes is None:
            raise _MixesError("may mix tokens: it is not known to keep them apart")
        if any(axes[position] != axis for position, axis in input_axes):
            raise _MixesError("mixes along the tokens")
    return used


# {operator: positions of its inputs that are shapes}
_SHAPE_INPUTS = {"Reshape": (1,), "Expand": (1,)}
_ARITHMETIC = frozenset(
    "Gather Slice Squeeze Unsqueeze Concat Cast Identity Add Sub Mul Div Mod Min Max Reshape".split()
)


class _Sizes:
    """Values computed from the number of tokens of a step, which may only be used as shapes."""

    def __init__(self) -> None:
        self.dims: dict[ir.Value, list] = {}  # of values that are a shape, or a slice of one
        self.others: set[ir.Value] = set()

    def __contains__(self, value: ir.Value | None) -> bool:
        if value is None:
            return False
        return value in self.others or _has_dynamic_dim(self.dims.get(value, ()))

    def add_shape(self, node: ir.Node) -> None:
        source = node.inputs[0]
        if source is None or source.shape is None:
            raise _MixesError("takes the size of a value of unknown shape")
        attributes = {name: attribute.as_int() for name, attribute in node.attributes.items()}
        self.dims[node.outputs[0]] = list(source.shape)[attributes.get("start") : attributes.get("end")]

    def follow(self, node: ir.Node) -> list[ir.Value]:
        """Record the outputs of a node that reads sizes; return constants with a token dimension, to be followed."""
        if node.op_type == "ConstantOfShape" and node.inputs[0] in self.dims:
            node.outputs[0].shape = ir.Shape(self.dims[node.inputs[0]])  # which inference may have left open
        if node.op_type == "ConstantOfShape" or (node.op_type == "Expand" and node.inputs[0] not in self):
            return [output for output in node.outputs if output.shape is None or _has_dynamic_dim(output.shape)]
        if node.op_type not in _ARITHMETIC:
            raise _MixesError("computes with the number of tokens in a step")
        index = Operator.of(node).numbers(1)
        if node.op_type == "Gather" and node.inputs[0] in self.dims and index is not None:
            dims = self.dims[node.inputs[0]]
            self.dims[node.outputs[0]] = [dims[i] for i in index]
        else:
            self.others.update(node.outputs)
        return []


def _has_dynamic_dim(dims: Iterable[object]) -> bool:
    return any(not isinstance(dim, int) for dim in dims)


def _token_axis(value: ir.Value) -> int:
    """Return the axis of the tokens in a value that depends on them."""
    if value.shape is None:
        raise _MixesError("gives a value of unknown shape")
    axes = [axis for axis, dim in enumerate(value.shape) if not isinstance(dim, int)]
    if len(axes) != 1:
        raise _MixesError("mixes along the tokens")
    return axes[0]
