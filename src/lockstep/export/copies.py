"""Copies of all tokens, one for each expert, in a dimension of their own.

In: a packed trace in which tokens are repeated one copy behind the other, `[copies * num_tokens, width]`, multiplied
and only then taken apart. Out: the same products on `[copies, num_tokens, width]`, in which the tokens have their own
dimension, so that it can be seen that none meets another.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from lockstep.export.known import array_of, constant, node_of, required, shape_of
from lockstep.export.simplify import merge_movement


def copies_apart(model: ir.Model) -> None:
    """Take apart what `Tile` repeats, where a product of it is reshaped to `[copies, num_tokens, width]`."""
    reshapes = [node for node in model.graph if node.op_type == "Reshape"]
    if sum(_take_apart(model.graph, node) for node in reshapes):
        merge_movement(model.graph)
        passes.RemoveUnusedNodesPass()(model)


def _take_apart(graph: ir.Graph, reshape: ir.Node) -> bool:
    """Let a product of repeated tokens behind which a reshape stands be one of tokens; return whether it was one."""
    target, product = array_of(reshape.inputs[1]), required(reshape.inputs[0]).producer()
    if target is None or len(target) != 3 or product is None or product.op_type != "Mul":
        return False
    factors = [required(value) for value in product.inputs]
    tiles = [value for value in factors if (maker := value.producer()) is not None and maker.op_type == "Tile"]
    others = [value for value in factors if value not in tiles]
    if len(tiles) != 1 or len(shape_of(others[0])) != 2:
        return False
    tile = tiles[0].producer()
    assert tile is not None
    repeats, copies = array_of(tile.inputs[1]), int(target[0])
    if repeats is None or repeats.tolist() != [copies, 1]:
        return False
    tokens, other, out = required(tile.inputs[0]), others[0], reshape.outputs[0]
    (number, size), width = shape_of(tokens), shape_of(other)[1]
    axis = constant(f"{out.name}/axis", np.array([0]))
    shape = constant(f"{out.name}/shape", np.array([copies, -1, width]))
    for value in (axis, shape):
        graph.register_initializer(value)
    once = node_of("Unsqueeze", [tokens, axis], [1, number, size], tokens.dtype)
    apart = node_of("Reshape", [other, shape], [copies, number, width], other.dtype)
    made = node_of("Mul", [once.outputs[0], apart.outputs[0]], [copies, number, size], out.dtype)
    graph.insert_before(reshape, [once, apart, made])
    out.replace_all_uses_with(made.outputs[0])
    return True
