"""Quantised weights for a library that has no `MatMulNBits` and no `GatherBlockQuantized`.

In: a graph. Out: one in ONNX's own operators.

Each becomes `DequantizeLinear` in blocks, of a weight that is an input of signed int8 or int4 `[out_features,
in_features]`, with scales `[out_features, num_groups]`, and a `Gemm`, or a `Gather` of an embedding. Names of inputs
stay. `MatMulNBits` counts its integers from the middle of their range: the same bits but for the highest of each, which
`SIGN` turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from lockstep.errors import CheckError
from lockstep.onnx_tools.rewriter import Rewriter, attributes_of

OPSET = 21  # DequantizeLinear in blocks, and int4
_TYPES = {4: TensorProto.INT4, 8: TensorProto.INT8}
# {dtype of the input: what the bytes that MatMulNBits reads are changed by, exclusive or}.
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
    """Return what a `GatherBlockQuantized` reads; None for another operator."""
    if node.op_type != "GatherBlockQuantized" or node.input[0] not in graph.inputs:  # but of experts
        return None
    (data, _, scales), sizes = node.input, attributes_of(node)
    rows, groups, _ = graph.shape(data)
    size = sizes["block_size"]
    return IntegerWeight(data, graph.producers[scales].input[0], rows, groups * size, size, sizes["bits"])


def sign_of(dtype: str, stored: str) -> int:
    """Return the bits that integers stored as `stored` are changed by for an input of `dtype`."""
    return SIGN.get(dtype, 0) if stored == "uint8" else 0


def dequantize_products(model: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """Return a graph without quantised weights; `model` itself where it has none.

    Raises CheckError for zero points of their own: there is no library that takes them as inputs.
    """
    graph = Rewriter(model)
    products = [node for node in graph.nodes if node.op_type == "MatMulNBits"]
    embeddings = [(node, found) for node in graph.nodes if (found := embedding_of(graph, node)) is not None]
    for node in graph.nodes:
        if node.op_type == "GatherBlockQuantized" and node not in [known for known, _ in embeddings]:
            raise CheckError(
                f"{where}: expected no experts with quantised weights, found {node.name}; this backend does not take "
                "them, use the backend onnxruntime, or fp16"
            )
    for node, found in embeddings:
        made = _dequantized(graph, node, found)
        graph.replace(node, made, helper.make_node("Gather", [made.output[0], node.input[1]], node.output, node.name))
    for node in products:
        if len(node.input) > 3:
            raise CheckError(
                f"{where}: expected quantised weights whose zero points are the middle, found {node.input[3]!r}; this "
                f"backend takes no zero points as inputs, use the backend onnxruntime"
            )
        sizes, (activation, data, scales) = attributes_of(node), node.input
        weight = IntegerWeight(data, scales, sizes["N"], sizes["K"], sizes["block_size"], sizes["bits"])
        made = _dequantized(graph, node, weight)
        graph.replace(
            node, made, helper.make_node("Gemm", [activation, made.output[0]], node.output, node.name, transB=1)
        )
    if not products and not embeddings:
        return model
    graph.set_opset(OPSET)
    return graph.finish()


def _dequantized(graph: Rewriter, node: onnx.NodeProto, weight: IntegerWeight) -> onnx.NodeProto:
    """Let the weight be an input of signed integers; return what dequantises it."""
    shape = [weight.rows, weight.columns]
    graph.replace_input(weight.data, helper.make_tensor_value_info(weight.data, _TYPES[weight.bits], shape))
    inputs = [weight.data, weight.scales]
    out = f"{node.output[0]}/weight"
    name = f"{node.name}/dequantize"
    return helper.make_node("DequantizeLinear", inputs, [out], name, axis=1, block_size=weight.group_size)
