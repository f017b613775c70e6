"""Simplify data movement in a packed trace.

`merge_movement` lets reshapes and transposes read past others. `put_tokens_first` moves transposes of matrices after
element-wise operators and splits, so that most of them vanish in pairs: convolutions of transformers' layers want
tokens last, and their transposes would otherwise cross from block to block. `unfold_copies` gives the copies of tokens
that are repeated for each expert, `[copies * num_tokens, width]`, a dimension, `[copies, num_tokens, width]`, which
shows that no token meets another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir
import onnx_ir.passes.common as passes

from lockstep.export.axes import ELEMENTWISE
from lockstep.onnx_tools.toolkit import GraphWriter, node_of
from lockstep.onnx_tools.values import array_of, attribute, number, required, shape_of


def merge_movement(graph: ir.Graph, keep: Collection[ir.Value] = ()) -> None:
    """Let reshapes and transposes read past others, but not past values in `keep`, and drop idle ones."""
    for node in list(graph):
        if node.op_type == "Reshape":
            _merge_reshape(graph, node, keep)
        elif node.op_type == "Transpose":
            _merge_transpose(graph, node, keep)


def _merge_reshape(graph: ir.Graph, node: ir.Node, keep: Collection[ir.Value]) -> None:
    """Read the value before earlier reshapes; drop a reshape to the shape that its input has."""
    out = node.outputs[0]
    source = required(node.inputs[0])
    target = array_of(node.inputs[1])
    if target is not None and 0 not in target:  # 0 copies a dimension of the input, so that input must stay
        source = _before_reshapes(source, keep)
        node.replace_input_with(0, source)
    if source.shape is not None and out.shape is not None and same_shape(source.shape, out.shape):
        _replace(graph, node, source, keep)


def _merge_transpose(graph: ir.Graph, node: ir.Node, keep: Collection[ir.Value]) -> None:
    """Join a transpose with the one before it, whose own merge came earlier; drop one that moves nothing."""
    source = required(node.inputs[0])
    perm = list(node.attributes["perm"].as_ints())
    producer = source.producer()
    if source not in keep and producer is not None and producer.op_type == "Transpose":
        perm = [producer.attributes["perm"].as_ints()[axis] for axis in perm]
        source = required(producer.inputs[0])
        node.replace_input_with(0, source)
        node.attributes["perm"] = ir.AttrInt64s("perm", perm)
    if perm == sorted(perm):
        _replace(graph, node, source, keep)


def _before_reshapes(value: ir.Value, keep: Collection[ir.Value]) -> ir.Value:
    while value not in keep:
        producer = value.producer()
        if producer is None or producer.op_type != "Reshape":
            break
        value = required(producer.inputs[0])
    return value


def _replace(graph: ir.Graph, node: ir.Node, value: ir.Value, keep: Collection[ir.Value]) -> None:
    if not node.outputs[0].is_graph_output() and node.outputs[0] not in keep:
        node.outputs[0].replace_all_uses_with(value)
        graph.remove(node, safe=True)


def same_shape(shape: Iterable[object], other: Iterable[object]) -> bool:
    """Return whether two shapes are equal, with at most one dynamic dimension, in the same position."""
    dims = list(shape)
    other_dims = list(other)
    if len(dims) != len(other_dims):
        return False
    num_dynamic = 0
    for dim, other_dim in zip(dims, other_dims):
        if not isinstance(dim, int) or not isinstance(other_dim, int):
            num_dynamic += 1
        elif dim != other_dim:
            return False
    return num_dynamic <= 1


_SWAP = [1, 0]


def put_tokens_first(graph: ir.Graph) -> None:
    """Move transposes of matrices after element-wise operators and splits, in place."""
    for node in list(graph):
        if node.op_type in ELEMENTWISE or node.op_type == "Split":
            _move_transposes_after(graph, node)
    merge_movement(graph)


def _move_transposes_after(graph: ir.Graph, node: ir.Node) -> None:
    """Move the transposes of a node's inputs to its outputs, if no other input has several numbers."""
    sources = [_before_transpose(value) for value in node.inputs]
    moved_inputs = node.inputs[:1] if node.op_type == "Split" else node.inputs  # its second input is sizes
    is_transposed = [source is not value for source, value in zip(sources, node.inputs, strict=True)]
    if not any(is_transposed):
        return
    for value, has_transpose in zip(moved_inputs, is_transposed):
        if not has_transpose:
            array = array_of(value)
            if array is None or array.size != 1:
                return
    for index, source in enumerate(sources):
        node.replace_input_with(index, source)
    if node.op_type == "Split":
        node.attributes["axis"] = ir.AttrInt64("axis", -1 - attribute(node, "axis", 0) % 2)  # the other of two axes
    for output in node.outputs:
        shape = list(shape_of(output))
        back = node_of("Transpose", [output], shape, output.dtype, [ir.AttrInt64s("perm", _SWAP)])
        output.shape = ir.Shape(shape[::-1])
        # All readers but the new transpose, which reads the output itself.
        users = [(user, index) for user, index in output.uses() if user is not back]
        for user, index in users:
            user.replace_input_with(index, back.outputs[0])
        graph.insert_after(node, back)


def _before_transpose(value: ir.Value | None) -> ir.Value:
    """Return the value that a matrix is the transpose of; the value itself if it is none."""
    node = required(value).producer()
    if node is None or node.op_type != "Transpose" or list(node.attributes["perm"].as_ints()) != _SWAP:
        return required(value)
    return required(node.inputs[0])


def unfold_copies(model: ir.Model) -> None:
    """Give the copies that `Tile` makes a dimension, where their product is reshaped to [copies, num_tokens, width]."""
    reshapes = [node for node in model.graph if node.op_type == "Reshape"]
    num_unfolded = sum(_unfold(model.graph, node) for node in reshapes)
    if num_unfolded:
        merge_movement(model.graph)
        passes.RemoveUnusedNodesPass()(model)


def _unfold(graph: ir.Graph, reshape: ir.Node) -> bool:
    """Broadcast tokens over their copies in the product before a reshape; return whether there was such a product."""
    target = array_of(reshape.inputs[1])
    product = required(reshape.inputs[0]).producer()
    if target is None or len(target) != 3 or product is None or product.op_type != "Mul":
        return False
    tiles: list[ir.Node] = []
    factors: list[ir.Value] = []
    for value in map(required, product.inputs):
        maker = value.producer()
        if maker is not None and maker.op_type == "Tile":
            tiles.append(maker)
        else:
            factors.append(value)
    if len(tiles) != 1 or len(shape_of(factors[0])) != 2:
        return False
    repeats = array_of(tiles[0].inputs[1])
    copies = int(target[0])
    if repeats is None or repeats.tolist() != [copies, 1]:
        return False
    tokens = required(tiles[0].inputs[0])
    factor = factors[0]
    out = reshape.outputs[0]
    rows, size = shape_of(tokens)
    width = number(shape_of(factor)[1])
    op = GraphWriter(graph, after=product).op
    dtype = out.dtype
    by_copy = op("Unsqueeze", tokens, [0], shape=[1, rows, size], dtype=dtype)
    unfolded = op("Reshape", factor, [copies, -1, width], shape=[copies, rows, width], dtype=dtype)
    out.replace_all_uses_with(op("Mul", by_copy, unfolded, shape=[copies, rows, size], dtype=dtype))
    return True
