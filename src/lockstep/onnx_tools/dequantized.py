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

OPSET = 21  # DequantizeLinear in blocks, and int4
_TYPES = {4: TensorProto.INT4, 8: TensorProto.INT8}
# {dtype of the input: what the bytes that MatMulNBits reads are changed by, exclusive or}.
SIGN = {"int4": 0x88, "int8": 0x80}


def sign_of(dtype: str, stored: str) -> int:
    """Return the bits that stored integers are changed by for an input of `dtype`.

    stored: their dtype as they are stored. 0: they are not changed.
    """
    return SIGN.get(dtype, 0) if stored == "uint8" else 0


def dequantize_products(model: onnx.ModelProto, where: str) -> None:
    """Rewrite the products with quantised weights of a graph, in place.

    Raises CheckError for zero points of their own: there is no library that takes them as inputs.
    """
    shapes: dict[str, tuple[int, list[int]]] = {}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type != "MatMulNBits":
            nodes.append(node)
            continue
        if len(node.input) > 3:
            raise CheckError(
                f"{where}: expected quantised weights whose zero points are the middle, found {node.input[3]!r}; this "
                f"backend takes no zero points as inputs, use the backend onnxruntime"
            )
        sizes = {entry.name: entry.i for entry in node.attribute}
        activation, data, scales = node.input
        shapes[data] = _TYPES[sizes["bits"]], [sizes["N"], sizes["K"]]
        weight, block = f"{node.output[0]}/weight", sizes["block_size"]
        nodes += [
            helper.make_node(
                "DequantizeLinear", [data, scales], [weight], f"{node.name}/dequantize", axis=1, block_size=block
            ),
            helper.make_node("Gemm", [activation, weight], list(node.output), node.name, transB=1),
        ]
    if not shapes:
        return
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    for value in model.graph.input:
        if value.name in shapes:
            value.CopyFrom(helper.make_tensor_value_info(value.name, *shapes[value.name]))
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", OPSET))
    del model.graph.value_info[:]
    onnx.checker.check_model(model, full_check=True)
