"""Adapters' products with the same bits for any number of rows, made in pieces.

In: a graph; out: one that computes them in pieces. ONNX Runtime packs constant matrices once, and then accumulates a
row in one order in any batch. Matrices that change are packed at each call, in pieces whose size depends on how many
threads share the product, and so on the number of rows; and a single row has a special kernel. Both would give a
request that decodes alone other bits than in a batch. So x A is the sum of pieces of at most 128 numbers, which are
never cut further, and the products have a factor, which the kernel of a single row does not support: x A is halved and
the product with B doubled, which is exact. B's pieces need no such rewrite: one of them has all columns of an adapter,
and the columns of other adapters are zero.
"""

from __future__ import annotations

import onnx_ir as ir

from lockstep.artifacts.adapters import A_SUFFIX, B_SUFFIX
from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult
from lockstep.onnx_tools.values import required, sizes_of

PIECE = 128  # the smallest number of products that ONNX Runtime accumulates in one piece

_CONTRIB = "com.microsoft"


class KeepOrder(Pass):
    """Rewrite products with adapters' matrices."""

    def call(self, model: ir.Model) -> PassResult:
        products = [node for node in model.graph if node.op_type == "Gemm"]
        shrinks = [node for node in products if _is_factor(node, A_SUFFIX)]
        for node in products:
            if _is_factor(node, B_SUFFIX):
                (out,) = node.outputs
                writer = GraphWriter(model.graph, before=node)
                writer.copy(node, *node.inputs, alpha=2.0, replaces=out)
        for node in shrinks:
            _in_pieces(model.graph, node)
        if shrinks:
            model.opset_imports.setdefault(_CONTRIB, 1)
        return PassResult(model, bool(shrinks))


def _is_factor(node: ir.Node, suffix: str) -> bool:
    return str(required(node.inputs[1]).name).endswith(suffix)


def _in_pieces(graph: ir.Graph, node: ir.Node) -> None:
    """Write half the product of rows [rows, size] and a matrix [size, columns], in float32."""
    x, a = map(required, node.inputs)
    (out,) = node.outputs
    size, columns = sizes_of(a)
    piece = max(number for number in range(1, PIECE + 1) if size % number == 0)
    dtype = a.dtype
    is_half = dtype != ir.DataType.FLOAT
    writer = GraphWriter(graph, f"{out.name}/pieces", before=node)
    if is_half:
        x = writer.op("Cast", x, to=ir.DataType.FLOAT)
        a = writer.op("Cast", a, to=ir.DataType.FLOAT)
    rows = writer.op("Reshape", x, [-1, size // piece, piece])
    parts = writer.op("Reshape", a, [size // piece, piece, columns])
    rows = writer.op("Transpose", rows, perm=[1, 0, 2])
    sums = writer.op("FusedMatMul", rows, parts, domain=_CONTRIB, alpha=0.5)
    if is_half:
        writer.op("Cast", writer.op("ReduceSum", sums, [0], keepdims=0), to=dtype, replaces=out)
    else:
        writer.op("ReduceSum", sums, [0], keepdims=0, replaces=out)
