"""Dequantise weights for a library without `MatMulNBits` and `GatherBlockQuantized`.

In: a graph. Out: one in ONNX's own operators.

Each becomes a blocked `DequantizeLinear` of a weight that is an input of signed int8 or int4 `[out_features,
in_features]`, with scales `[out_features, num_groups]`, and a `Gemm`, or a `Gather` of an embedding. Names of inputs do
not change. `MatMulNBits` counts its integers from the middle of their range: the same bits except the highest of each,
which `SIGN` flips.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from lockstep.errors import CheckError
from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult, add_input
from lockstep.onnx_tools.values import attribute, required, sizes_of

OPSET = 21  # DequantizeLinear in blocks, and int4
_TYPES = {4: ir.DataType.INT4, 8: ir.DataType.INT8}


@dataclass(frozen=True)
class IntegerWeight:
    """A quantised weight [rows, columns] of two inputs."""

    data: ir.Value
    scales: ir.Value
    rows: int
    columns: int
    group_size: int
    bits: int


def embedding_of(node: ir.Node) -> IntegerWeight | None:
    """Return the weight that a `GatherBlockQuantized` reads; None for another operator, and for experts."""
    if node.op_type != "GatherBlockQuantized" or not required(node.inputs[0]).is_graph_input():
        return None
    data, _, scales = map(required, node.inputs)
    rows, groups, _ = sizes_of(data)
    size = attribute(node, "block_size")
    stored = required(required(scales.producer()).inputs[0])
    return IntegerWeight(data, stored, rows, groups * size, size, attribute(node, "bits"))


def factor_of(node: ir.Node) -> IntegerWeight:
    """Return the weight of a `MatMulNBits` without zero points."""
    rows, columns, size, bits = (attribute(node, name) for name in ("N", "K", "block_size", "bits"))
    return IntegerWeight(required(node.inputs[1]), required(node.inputs[2]), rows, columns, size, bits)


class DequantizeProducts(Pass):
    """Dequantise weights before products and embeddings. where: the file, for messages.

    Raises CheckError for zero points: no library accepts them as inputs.
    """

    def __init__(self, where: str):
        self._where = where

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        quantized = [node for node in graph if node.op_type in ("GatherBlockQuantized", "MatMulNBits")]
        for node in quantized:
            (out,) = node.outputs
            writer = GraphWriter(graph, f"{out.name}/dequantized", before=node)
            if node.op_type == "GatherBlockQuantized":
                embedding = embedding_of(node)
                if embedding is None:
                    raise CheckError(
                        f"{self._where}: expected no experts with quantised weights, found {node.name}; this backend "
                        "does not take them, use the backend onnxruntime, or fp16"
                    )
                writer.op("Gather", _dequantize(writer, node, embedding), node.inputs[1], name=node.name, replaces=out)
                continue
            if len(node.inputs) > 3:
                raise CheckError(
                    f"{self._where}: expected quantised weights whose zero points are the middle, found "
                    f"{required(node.inputs[3]).name!r}; this backend takes no zero points as inputs, use the backend "
                    "onnxruntime"
                )
            weight = _dequantize(writer, node, factor_of(node))
            writer.op("Gemm", node.inputs[0], weight, name=node.name, transB=1, replaces=out)
        if quantized:  # without ONNX Runtime's domain, which other parsers reject
            model.opset_imports.clear()
            model.opset_imports[""] = OPSET
        return PassResult(model, bool(quantized))


def _dequantize(writer: GraphWriter, node: ir.Node, weight: IntegerWeight) -> ir.Value:
    """Make the weight an input of signed integers; return it dequantised."""
    shape = [weight.rows, weight.columns]
    data = add_input(writer.graph, str(weight.data.name), _TYPES[weight.bits], shape, before=weight.data)
    result = f"{node.outputs[0].name}/weight"
    settings: dict[str, Any] = {"axis": 1, "block_size": weight.group_size}
    return writer.op("DequantizeLinear", data, weight.scales, result=result, name=f"{node.name}/dequantize", **settings)
