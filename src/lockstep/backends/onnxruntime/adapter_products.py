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
from onnx import TensorProto, helper

from lockstep.artifacts.adapters import A_SUFFIX, B_SUFFIX
from lockstep.onnx_tools.rewriter import Rewriter

PIECE = 128  # the least numbers that ONNX Runtime accumulates without a cut

_CONTRIB = "com.microsoft"


def keep_order(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with its products with adapters' matrices rewritten; itself where it has none."""
    graph = Rewriter(model)
    products = [node for node in graph.nodes if node.op_type == "Gemm"]
    shrinks = [node for node in products if node.input[1].endswith(A_SUFFIX)]
    for node in products:
        if node.input[1].endswith(B_SUFFIX):
            node.attribute.append(helper.make_attribute("alpha", 2.0))
    for node in shrinks:
        graph.replace(node, *_in_pieces(graph, node))
    if not shrinks:
        return model
    if _CONTRIB not in {entry.domain for entry in graph.model.opset_import}:
        graph.model.opset_import.append(helper.make_opsetid(_CONTRIB, 1))
    return graph.finish()


def _in_pieces(graph: Rewriter, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return nodes for half the product of rows [rows, size] and a matrix [size, columns], in float32."""
    (x, a), (out,) = node.input, node.output
    (size, columns), element = graph.shape(a), graph.element(a)
    piece = max(number for number in range(1, PIECE + 1) if size % number == 0)
    is_half = element != TensorProto.FLOAT
    wide_x, wide_a, total = (f"{out}/x", f"{out}/a", f"{out}/total") if is_half else (x, a, out)
    casts = [(x, wide_x, TensorProto.FLOAT), (a, wide_a, TensorProto.FLOAT), (total, out, element)]
    nodes = [helper.make_node("Cast", [name], [to], to=dtype) for name, to, dtype in casts] if is_half else []
    shapes = {"rows": [-1, size // piece, piece], "pieces": [size // piece, piece, columns], "axis": [0]}
    for label, shape in shapes.items():
        graph.constant(f"{out}/{label}", np.array(shape, np.int64))
    return [
        *nodes[:2],
        helper.make_node("Reshape", [wide_x, f"{out}/rows"], [f"{out}/x3"]),
        helper.make_node("Transpose", [f"{out}/x3"], [f"{out}/xt"], perm=[1, 0, 2]),
        helper.make_node("Reshape", [wide_a, f"{out}/pieces"], [f"{out}/a3"]),
        helper.make_node("FusedMatMul", [f"{out}/xt", f"{out}/a3"], [f"{out}/parts"], domain=_CONTRIB, alpha=0.5),
        helper.make_node("ReduceSum", [f"{out}/parts", f"{out}/axis"], [total], keepdims=0),
        *nodes[2:],
    ]
