"""Let values have their tokens first.

In: a packed trace. Out: the same graph in which transposes of matrices stand behind what is computed element by element
or cut in parts, instead of before it, so that most of them vanish in pairs. Convolutions of transformers' layers want
tokens last, and what stands around them then crosses from block to block with its tokens last.
"""

from __future__ import annotations

import onnx_ir as ir

from lockstep.export.known import array_of, axis_of, node_of, required, shape_of
from lockstep.export.simplify import ELEMENTWISE, merge_movement

_SWAP = [1, 0]


def put_tokens_first(graph: ir.Graph) -> None:
    """Move transposes of matrices behind element-wise operators and splits, in place."""
    for node in list(graph):
        if node.op_type in ELEMENTWISE or node.op_type == "Split":
            _move_behind(graph, node)
    merge_movement(graph)


def _move_behind(graph: ir.Graph, node: ir.Node) -> None:
    sources = [_source(value) for value in node.inputs]
    swapped = [source is not value for source, value in zip(sources, node.inputs, strict=True)]
    if not any(swapped) or any(
        not swap and ((array := array_of(value)) is None or array.size != 1)
        for swap, value in zip(swapped, node.inputs, strict=True)
        if not (node.op_type == "Split" and value is not node.inputs[0])
    ):
        return
    for index, source in enumerate(sources):
        node.replace_input_with(index, source)
    if node.op_type == "Split":
        node.attributes["axis"] = ir.AttrInt64("axis", -1 - axis_of(node, 0) % 2)
    for output in node.outputs:
        shape = list(shape_of(output))
        back = node_of("Transpose", [output], shape, output.dtype, [ir.AttrInt64s("perm", _SWAP)])
        output.shape = ir.Shape(shape[::-1])
        users = [(user, index) for user, index in output.uses() if user is not back]
        for user, index in users:
            user.replace_input_with(index, back.outputs[0])
        graph.insert_after(node, back)


def _source(value: ir.Value | None) -> ir.Value:
    """Return what a matrix is the transpose of; the value itself where it is none."""
    node = required(value).producer()
    if node is None or node.op_type != "Transpose" or list(node.attributes["perm"].as_ints()) != _SWAP:
        return required(value)
    return required(node.inputs[0])
