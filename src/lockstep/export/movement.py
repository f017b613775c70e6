"""Movement of values in a packed trace: what stands where, and what falls away then.

`merge_movement` lets reshapes and transposes read past others. `put_tokens_first` moves transposes of matrices behind
what is computed element by element or cut in parts, so that most of them vanish in pairs: convolutions of transformers'
layers want tokens last, and what stands around them would cross from block to block so. `copies_apart` gives tokens
that are repeated one copy behind the other, one for each expert, `[copies * num_tokens, width]`, multiplied and only
then taken apart, a dimension of their own, `[copies, num_tokens, width]`, so that it can be seen that none meets
another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir
import onnx_ir.passes.common as passes

from lockstep.export.axes import ELEMENTWISE
from lockstep.export.known import GraphWriter, array_of, axis_of, node_of, number, required, shape_of


def merge_movement(graph: ir.Graph, keep: Collection[ir.Value] = ()) -> None:
    """Let reshapes and transposes read past others, but not past values in `keep`, and drop idle ones."""
    for node in list(graph):
        out = node.outputs[0]
        source = node.inputs[0] if node.inputs else None
        if source is None:
            continue
        if node.op_type == "Reshape":
            target = array_of(node.inputs[1])
            if target is not None and 0 not in target:
                while (
                    source not in keep and (producer := source.producer()) is not None and producer.op_type == "Reshape"
                ):
                    source = required(producer.inputs[0])
                node.replace_input_with(0, source)
            if source.shape is not None and out.shape is not None and same_shape(source.shape, out.shape):
                _replace(graph, node, source, keep)
        elif node.op_type == "Transpose":
            perm = list(node.attributes["perm"].as_ints())
            producer = source.producer()
            if source not in keep and producer is not None and producer.op_type == "Transpose":
                perm = [producer.attributes["perm"].as_ints()[p] for p in perm]
                source = required(producer.inputs[0])
                node.replace_input_with(0, source)
                node.attributes["perm"] = ir.AttrInt64s("perm", perm)
            if perm == sorted(perm):
                _replace(graph, node, source, keep)


def _replace(graph: ir.Graph, node: ir.Node, value: ir.Value, keep: Collection[ir.Value]) -> None:
    if not node.outputs[0].is_graph_output() and node.outputs[0] not in keep:
        node.outputs[0].replace_all_uses_with(value)
        graph.remove(node, safe=True)


def same_shape(one: Iterable[object], other: Iterable[object]) -> bool:
    """Return whether two shapes are equal: at most one dimension is dynamic, in the same place."""
    one = list(one)
    other = list(other)
    if len(one) != len(other):
        return False
    dynamic = [not isinstance(a, int) or not isinstance(b, int) for a, b in zip(one, other, strict=True)]
    return sum(dynamic) <= 1 and all(d or a == b for d, a, b in zip(dynamic, one, other, strict=True))


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


def copies_apart(model: ir.Model) -> None:
    """Take apart what `Tile` repeats, where a product of it is reshaped to `[copies, num_tokens, width]`."""
    reshapes = [node for node in model.graph if node.op_type == "Reshape"]
    if sum(_take_apart(model.graph, node) for node in reshapes):
        merge_movement(model.graph)
        passes.RemoveUnusedNodesPass()(model)


def _take_apart(graph: ir.Graph, reshape: ir.Node) -> bool:
    """Let a product of repeated tokens behind which a reshape stands be one of tokens; return whether it was one."""
    target = array_of(reshape.inputs[1])
    product = required(reshape.inputs[0]).producer()
    if target is None or len(target) != 3 or product is None or product.op_type != "Mul":
        return False
    factors = [required(value) for value in product.inputs]
    tiles = [value for value in factors if (maker := value.producer()) is not None and maker.op_type == "Tile"]
    others = [value for value in factors if value not in tiles]
    if len(tiles) != 1 or len(shape_of(others[0])) != 2:
        return False
    tile = tiles[0].producer()
    assert tile is not None
    repeats = array_of(tile.inputs[1])
    copies = int(target[0])
    if repeats is None or repeats.tolist() != [copies, 1]:
        return False
    tokens = required(tile.inputs[0])
    other = others[0]
    out = reshape.outputs[0]
    (rows, size), width = shape_of(tokens), number(shape_of(other)[1])
    op = GraphWriter(graph, f"{out.name}/apart", product).op
    dtype = out.dtype
    once = op("Unsqueeze", tokens, [0], shape=[1, rows, size], dtype=dtype)
    apart = op("Reshape", other, [copies, -1, width], shape=[copies, rows, width], dtype=dtype)
    out.replace_all_uses_with(op("Mul", once, apart, shape=[copies, rows, size], dtype=dtype))
    return True
