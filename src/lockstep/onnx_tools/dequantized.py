"""Products with quantised weights for a library that has no `MatMulNBits`.

In: a graph. Out: one in ONNX's own operators.

Each becomes `DequantizeLinear` in blocks, of a weight that is an input of signed int8 or int4 `[out_features,
in_features]`, with scales `[out_features, num_groups]`, and a `Gemm`. Names of inputs stay. `MatMulNBits` counts its
integers from the middle of their range: the same bits but for the highest of each, which `SIGN` turns.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from lockstep.errors import CheckError
from lockstep.onnx_tools.rewriter import Rewriter, attributes_of

OPSET = 21  # DequantizeLinear in blocks, and int4
_TYPES = {4: TensorProto.INT4, 8: TensorProto.INT8}
# {dtype of the input: what the bytes that MatMulNBits reads are changed by, exclusive or}.
SIGN = {"int4": 0x88, "int8": 0x80}


def sign_of(dtype: str, stored: str) -> int:
    """Return the bits that stored integers are changed by for an input of `dtype`.

    stored: their dtype as they are stored. 0: they are not changed.
    """
    return SIGN.get(dtype, 0) if stored == "uint8" else 0


def dequantize_products(model: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """Return a graph without products with quantised weights; `model` itself where it has none.

    Raises CheckError for zero points of their own: there is no library that takes them as inputs.
    """
    graph = Rewriter(model)
    products = [node for node in graph.nodes if node.op_type == "MatMulNBits"]
    for node in products:
        if len(node.input) > 3:
            raise CheckError(
                f"{where}: expected quantised weights whose zero points are the middle, found {node.input[3]!r}; this "
                f"backend takes no zero points as inputs, use the backend onnxruntime"
            )
        sizes, (activation, data, scales) = attributes_of(node), node.input
        element = _TYPES[sizes["bits"]]
        graph.replace_input(data, helper.make_tensor_value_info(data, element, [sizes["N"], sizes["K"]]))
        weight, name = f"{node.output[0]}/weight", f"{node.name}/dequantize"
        graph.replace(
            node,
            helper.make_node(
                "DequantizeLinear", [data, scales], [weight], name, axis=1, block_size=sizes["block_size"]
            ),
            helper.make_node("Gemm", [activation, weight], node.output, node.name, transB=1),
        )
    if not products:
        return model
    graph.set_opset(OPSET)
    return graph.finish()
