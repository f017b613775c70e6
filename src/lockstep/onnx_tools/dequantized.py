"""Dequantise weights for a library without `MatMulNBits` and `GatherBlockQuantized`.

In: a graph. Out: one in ONNX's own operators.

Each becomes a blocked `DequantizeLinear` of a weight that is an input of signed int8 or int4 `[out_features,
in_features]`, with scales `[out_features, num_groups]`, and a `Gemm`, or a `Gather` of an embedding. Names of inputs do
not change. `MatMulNBits` counts its integers from the middle of their range: the same bits except the highest of each,
which `SIGN` flips.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from lockstep.errors import CheckError
from lockstep.onnx_tools.rewriter import Rewriter, attributes_of

OPSET = 21  # DequantizeLinear in blocks, and int4
_TYPES = {4: TensorProto.INT4, 8: TensorProto.INT8}
# {dtype of the input: mask that is XORed with the bytes that MatMulNBits reads}
SIGN = {"int4": 0x88, "int8": 0x80}


@dataclass(frozen=True)
class IntegerWeight:
    """A quantised weight [rows, columns] of two slots."""

    data: str
    scales: str
    rows: int
    columns: int
    group_size: int
    bits: int


def embedding_of(graph: Rewriter, node: onnx.NodeProto) -> IntegerWeight | None:
    """Return the weight that a `GatherBlockQuantized` reads; None for another operator, and for experts."""
    if node.op_type != "GatherBlockQuantized" or node.input[0] not in graph.inputs:
        return None
    data, _, scales = node.input
    sizes = attributes_of(node)
    rows, groups, _ = graph.shape(data)
    size = sizes["block_size"]
    return IntegerWeight(data, graph.producers[scales].input[0], rows, groups * size, size, sizes["bits"])


def sign_of(dtype: str, stored: str) -> int:
    """Return the XOR mask that turns integers stored as `stored` into an input of `dtype`."""
    return SIGN.get(dtype, 0) if stored == "uint8" else 0


def dequantize_products(model: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """Return a graph without quantised weights; `model` itself if it has none.

    Raises CheckError for zero points: no library accepts them as inputs.
    """
    graph = Rewriter(model)
    is_changed = False
    for node in graph.nodes:
        if node.op_type != "GatherBlockQuantized":
            continue
        embedding = embedding_of(graph, node)
        if embedding is None:
            raise CheckError(
                f"{where}: expected no experts with quantised weights, found {node.name}; this backend does not take "
                "them, use the backend onnxruntime, or fp16"
            )
        dequantize = _dequantize(graph, node, embedding)
        gather = helper.make_node("Gather", [dequantize.output[0], node.input[1]], node.output, node.name)
        graph.replace(node, dequantize, gather)
        is_changed = True
    for node in graph.nodes:
        if node.op_type != "MatMulNBits":
            continue
        if len(node.input) > 3:
            raise CheckError(
                f"{where}: expected quantised weights whose zero points are the middle, found {node.input[3]!r}; this "
                f"backend takes no zero points as inputs, use the backend onnxruntime"
            )
        sizes = attributes_of(node)
        activation, data, scales = node.input
        weight = IntegerWeight(data, scales, sizes["N"], sizes["K"], sizes["block_size"], sizes["bits"])
        dequantize = _dequantize(graph, node, weight)
        gemm = helper.make_node("Gemm", [activation, dequantize.output[0]], node.output, node.name, transB=1)
        graph.replace(node, dequantize, gemm)
        is_changed = True
    if not is_changed:
        return model
    graph.set_opset(OPSET)
    return graph.finish()


def _dequantize(graph: Rewriter, node: onnx.NodeProto, weight: IntegerWeight) -> onnx.NodeProto:
    """Make the weight an input of signed integers; return the node that dequantises it."""
    shape = [weight.rows, weight.columns]
    graph.replace_input(weight.data, helper.make_tensor_value_info(weight.data, _TYPES[weight.bits], shape))
    inputs = [weight.data, weight.scales]
    out = f"{node.output[0]}/weight"
    name = f"{node.name}/dequantize"
    return helper.make_node("DequantizeLinear", inputs, [out], name, axis=1, block_size=weight.group_size)
