"""Adapters' products with the same bits for any number of rows, made in pieces.

In: a graph; out: one that computes them in pieces. ONNX Runtime packs constant matrices once, and then a row's sums
come in one order whatever stands beside it. Matrices that change are packed at each call, in pieces whose size depends
on how many threads share the product, and so on the number of rows; and a single row has a kernel of its own. Both
would give a request that decodes alone other bits than in a batch. So x A is put together from pieces of at most 128
numbers, which are never cut further, and the products have a factor, for the kernel of a single row has none: x A is
halved and the product with B doubled, which is exact. B's pieces need no care: an adapter's columns lie in one, and
those of others are zero.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from lockstep.artifacts.adapters import A_SUFFIX, B_SUFFIX
from lockstep.onnx_tools.rewriter import replace_nodes

PIECE = 128  # the least numbers that ONNX Runtime accumulates without a cut

_CONTRIB = "com.microsoft"


def keep_order(model: onnx.ModelProto) -> bool:
    """Rewrite the products with adapters' matrices, in place; return False where there are none."""
    graph, nodes, found = model.graph, [], False
    inputs = {value.name: value.type.tensor_type for value in graph.input}
    for node in graph.node:
        matrix = node.input[1] if node.op_type == "Gemm" else ""
        if matrix.endswith(B_SUFFIX):
            node.attribute.append(helper.make_attribute("alpha", 2.0))
        if matrix.endswith(A_SUFFIX):
            found = True
            nodes += _in_pieces(graph, node, inputs[matrix])
        else:
            nodes.append(node)
    if found:
        replace_nodes(graph, nodes)
        model.opset_import.append(helper.make_opsetid(_CONTRIB, 1))
    return found


def _in_pieces(graph: onnx.GraphProto, node: onnx.NodeProto, matrix: onnx.TypeProto.Tensor) -> list[onnx.NodeProto]:
    """Return nodes for half the product of rows [rows, size] and a matrix [size, columns], in float32."""
    x, a, out = node.input[0], node.input[1], node.output[0]
    size, columns = (dim.dim_value for dim in matrix.shape.dim)
    piece = max(number for number in range(1, PIECE + 1) if size % number == 0)
    half = matrix.elem_type != TensorProto.FLOAT
    nodes, wide = [], {x: f"{out}/x", a: f"{out}/a"}
    for name in (x, a) if half else ():
        nodes.append(helper.make_node("Cast", [name], [wide[name]], to=TensorProto.FLOAT))
    shapes = {"rows": [-1, size // piece, piece], "pieces": [size // piece, piece, columns], "axis": [0]}
    for label, shape in shapes.items():
        graph.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), f"{out}/{label}"))
    source = wide if half else {x: x, a: a}
    total = f"{out}/total" if half else out
    nodes += [
        helper.make_node("Reshape", [source[x], f"{out}/rows"], [f"{out}/x3"]),
        helper.make_node("Transpose", [f"{out}/x3"], [f"{out}/xt"], perm=[1, 0, 2]),
        helper.make_node("Reshape", [source[a], f"{out}/pieces"], [f"{out}/a3"]),
        helper.make_node("FusedMatMul", [f"{out}/xt", f"{out}/a3"], [f"{out}/parts"], domain=_CONTRIB, alpha=0.5),
        helper.make_node("ReduceSum", [f"{out}/parts", f"{out}/axis"], [total], keepdims=0),
    ]
    return [*nodes, helper.make_node("Cast", [total], [out], to=matrix.elem_type)] if half else nodes
