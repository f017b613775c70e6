"""Prove that a traced graph keeps tokens apart outside attention.

No value may be carried from one token to another.

In: a packed trace (simplify.pack). Out: nothing, or an InputError that names the first operator that mixes tokens. In a
step the tokens of all requests lie one after another, and a prompt may come in pieces: a value that depends on another
token depends on the other requests and on the cut of the prompt, even when it does so only from some length on, where
no test may look.

Method: the only dimension of a packed trace that is not a fixed number is that of the tokens. Each value is followed
from the inputs: one that depends on tokens must have exactly one such dimension, and each operator has a rule that says
along which axes it mixes. An operator without a rule is refused. Sizes (how many tokens a step has) may shape values,
and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import onnx_ir as ir

from lockstep.errors import InputError
from lockstep.export.known import array_of, axis_of
from lockstep.export.simplify import ELEMENTWISE, REDUCTIONS


class _Mixes(Exception):
    """What an operator does along the tokens."""


def check_independence(graph: ir.Graph, domain: str, model_type: str) -> None:
    """Raise InputError for the first operator but those of `domain` (attention) that mixes tokens."""
    tokens, sizes = set(graph.inputs), _Sizes()
    for node in graph:
        try:
            if node.domain == domain:
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
                _rule(node, tokens)
                used = [output for output in node.outputs if output.uses() or output.is_graph_output()]
                for output in used:
                    _axis(output)
                tokens.update(used)
            elif any(value in sizes for value in node.inputs):
                tokens.update(sizes.follow(node))
        except _Mixes as reason:
            raise InputError(
                f"model type {model_type!r} cannot be split: outside attention its {node.op_type} {reason}; a "
                "request's result would depend on the requests beside it, and on how its prompt is cut"
            ) from None


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
        index = _ints(node, 1)
        if node.op_type == "Gather" and node.inputs[0] in self.dims and index is not None:
            self.dims[node.outputs[0]] = [self.dims[node.inputs[0]][i] for i in index]
        else:
            self.others.update(node.outputs)
        return []


def _known(value: ir.Value | None) -> ir.Shape:
    if value is None or value.shape is None:
        raise _Mixes("gives a value of unknown shape")
    return value.shape


def _axis(value: ir.Value) -> int:
    """Return the axis of the tokens in a value that depends on them."""
    axes = [axis for axis, dim in enumerate(_known(value)) if not isinstance(dim, int)]
    if len(axes) != 1:
        raise _Mixes("combines all tokens into one value" if not axes else "combines each token with each other")
    return axes[0]


def _moving(node: ir.Node, tokens: set[ir.Value]) -> list[tuple[int, ir.Value, int]]:
    """Return (position, value, token axis) of the inputs that depend on tokens."""
    return [(position, value, _axis(value)) for position, value in enumerate(node.inputs) if value in tokens]


def _rule(node: ir.Node, tokens: set[ir.Value]) -> None:
    if any(
        attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attribute in node.attributes.values()
    ):
        raise _Mixes("branches on values of tokens")
    rule = _RULES.get(node.op_type)
    if rule is None or node.domain not in ("", "ai.onnx"):
        raise _Mixes("may mix tokens: it is not known to keep them apart")
    rule(node, _moving(node, tokens))


def _elementwise(node: ir.Node, moving: list) -> None:
    """Check an element-wise operator: all tokens must lie at the same place from the end."""
    if len({len(_known(value)) - axis for _, value, axis in moving}) != 1:
        raise _Mixes("combines each token with each other")


def _along(node: ir.Node, moving: list, axes: list[int]) -> None:
    """Check an operator that mixes along `axes` of its first input; no other may depend on tokens."""
    (position, value, axis), *more = moving
    if position or more:
        raise _Mixes("chooses by the values of tokens")
    if axis in [a % len(_known(value)) for a in axes]:
        raise _Mixes("mixes along the tokens")


def _reduction(node: ir.Node, moving: list) -> None:
    axes = _ints(node, 1)
    if axes is None and "axes" in node.attributes:
        axes = list(node.attributes["axes"].as_ints())
    _along(node, moving, list(range(len(_known(node.inputs[0])))) if not axes else axes)


def _attribute_axis(default: int) -> Callable[[ir.Node, list], None]:
    def rule(node: ir.Node, moving: list) -> None:
        _along(node, moving, [axis_of(node, default)])

    return rule


def _from_axis_on(node: ir.Node, moving: list) -> None:
    """Check a normalisation over an axis and all that follow."""
    rank = len(_known(node.inputs[0]))
    _along(node, moving, list(range(axis_of(node, -1) % rank, rank)))


def _slice(node: ir.Node, moving: list) -> None:
    starts = _ints(node, 1) or []
    _along(
        node,
        moving,
        (_ints(node, 3) if len(node.inputs) > 3 else None) or list(range(len(starts) or len(_known(node.inputs[0])))),
    )


def _concat(node: ir.Node, moving: list) -> None:
    rank = len(_known(node.outputs[0]))
    if len({axis for _, _, axis in moving}) != 1 or moving[0][2] == axis_of(node, 0) % rank:
        raise _Mixes("puts tokens beside others")


def _transpose(node: ir.Node, moving: list) -> None:
    """Check a transpose, which moves whole dimensions."""


def _reshape(node: ir.Node, moving: list) -> None:
    """Check that a reshape keeps what stands before the tokens before them, and what follows each behind it."""
    (position, value, axis), *more = moving
    out = node.outputs[0]
    if position or more:
        raise _Mixes("shapes values by the values of tokens")
    if _product(_known(value)[:axis]) != _product(_known(out)[: _axis(out)]):
        raise _Mixes("moves values from token to token")


def _expand(node: ir.Node, moving: list) -> None:
    (position, value, axis), *more = moving
    if position or more or len(_known(value)) - axis != len(_known(node.outputs[0])) - _axis(node.outputs[0]):
        raise _Mixes("repeats tokens")


def _matmul(node: ir.Node, moving: list) -> None:
    for position, value, axis in moving:
        rank = len(_known(value))
        if axis == (rank - 1 if position == 0 or rank == 1 else rank - 2):
            raise _Mixes("sums over the tokens")
    if len(moving) == 2 and len({len(_known(value)) - axis for _, value, axis in moving}) != 1:
        raise _Mixes("combines each token with each other")


def _gemm(node: ir.Node, moving: list) -> None:
    """Check a Gemm: tokens are the rows of the first factor, and of what is added."""
    if any(position == 1 for position, _, _ in moving) or (
        "transA" in node.attributes and node.attributes["transA"].as_int()
    ):
        raise _Mixes("multiplies tokens with tokens")


def _gather(node: ir.Node, moving: list) -> None:
    """Check a Gather: tokens choose rows of a table, not of tokens; fixed columns may be taken of each token."""
    if len(moving) != 1 or (moving[0][0] == 0 and moving[0][2] == axis_of(node, 0) % len(_known(node.inputs[0]))):
        raise _Mixes("takes tokens by their number")


def _gather_nd(node: ir.Node, moving: list) -> None:
    """Check a GatherND: indices of tokens into a table or, with batch dimensions, into the token's own values."""
    batch = node.attributes["batch_dims"].as_int() if "batch_dims" in node.attributes else 0
    for position, value, axis in moving:
        if (position == 0 and axis >= batch) or (position == 1 and axis == len(_known(value)) - 1):
            raise _Mixes("takes tokens by their number")


def _by_element(node: ir.Node, moving: list) -> None:
    """Check an operator on elements along one axis: in the others indices and values lie at the same place."""
    axis = axis_of(node, 0) % len(_known(node.inputs[0]))
    if node.op_type == "GatherElements" and [(position, found) for position, _, found in moving] == [(1, axis)]:
        return
    if len({found for _, _, found in moving}) != 1 or moving[0][2] == axis:
        raise _Mixes("takes tokens by their number")


def _scatter_nd(node: ir.Node, moving: list) -> None:
    """Check a ScatterND: slices go where fixed indices name; tokens lie within, at the same place in both."""
    rank, indices = len(_known(node.inputs[0])), _known(node.inputs[1])
    for position, _value, axis in moving:
        if position == 1 or axis < (indices[-1] if position == 0 else len(indices) - 1):
            raise _Mixes("takes tokens by their number")
    if len({len(_known(value)) - axis for _, value, axis in moving}) != 1 or len(_known(node.outputs[0])) != rank:
        raise _Mixes("takes tokens by their number")


def _einsum(node: ir.Node, moving: list) -> None:
    terms, _, result = node.attributes["equation"].as_string().replace(" ", "").partition("->")
    letters = {terms.split(",")[position][axis] for position, _, axis in moving if "." not in terms}
    if len(letters) != 1 or not letters <= set(result):
        raise _Mixes("sums over the tokens")


_RULES: dict[str, Callable[[ir.Node, list], None]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(REDUCTIONS, _reduction),
    "ArgMax": _attribute_axis(0),
    "CumSum": lambda node, moving: _along(node, moving, _ints(node, 1) or [0]),
    "Concat": _concat,
    "Einsum": _einsum,
    "Expand": _expand,
    "Flatten": _reshape,
    "Gather": _gather,
    "GatherElements": _by_element,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "LayerNormalization": _from_axis_on,
    "LogSoftmax": _attribute_axis(-1),
    "MatMul": _matmul,
    "OneHot": _transpose,
    "RMSNormalization": _from_axis_on,
    "Reshape": _reshape,
    "ScatterElements": _by_element,
    "ScatterND": _scatter_nd,
    "Slice": _slice,
    "Softmax": _attribute_axis(-1),
    "Split": _attribute_axis(0),
    "Squeeze": _transpose,
    "TopK": _attribute_axis(-1),
    "Transpose": _transpose,
    "Unsqueeze": _transpose,
}


def _ints(node: ir.Node, position: int) -> list[int] | None:
    """Return a constant input as numbers; None where it is absent or no constant."""
    array = array_of(node.inputs[position] if len(node.inputs) > position else None)
    return None if array is None else np.atleast_1d(array).tolist()


def _product(dims: Iterable[int | ir.SymbolicDim]) -> int | ir.SymbolicDim:
    result: int | ir.SymbolicDim = 1
    for dim in dims:
        result *= dim
    return result
