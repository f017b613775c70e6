"""Give a float32 graph float16 activations: float16 inputs, outputs and products.

Everything else is float32 inside: norms, activation functions and sums of a block round once, where a value leaves the
block. Values that depend on integers alone, such as angles of RoPE, do not change.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from lockstep.onnx_tools.rewriter import Rewriter, typed_values

_PRODUCTS = ("MatMul", "Gemm", "Conv")


def halve_activations(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a graph for float16 activations.

    float32 inputs, weights among them, and outputs become float16, with a Cast on the inner side, and products of them
    read and return float16.
    """
    graph = Rewriter(model)
    types = {name: element for name, (element, _) in typed_values(model).items()}
    inputs = {name for name in graph.inputs if types[name] == TensorProto.FLOAT}
    outputs = {name for name in graph.outputs if types[name] == TensorProto.FLOAT}
    halves = {name: name for name in inputs}
    from_floats = set(inputs)  # values that depend on float inputs

    def inner(name: str) -> str:
        return f"{name}/float" if name in inputs or name in outputs else name

    graph.prepend(*(_cast(name, inner(name), TensorProto.FLOAT) for name in sorted(inputs)))
    graph.append(*(_cast(inner(name), name, TensorProto.FLOAT16) for name in sorted(outputs)))
    for node in graph.nodes:
        operands = list(node.input)
        results = list(node.output)
        is_computed = not from_floats.isdisjoint(operands)
        if is_computed:
            from_floats.update(results)
        nodes: list[onnx.NodeProto] = []
        if node.op_type in _PRODUCTS and is_computed and all(types.get(name) == TensorProto.FLOAT for name in operands):
            for name in operands:
                if name not in halves:
                    halves[name] = f"{name}/half"
                    nodes.append(_cast(inner(name), halves[name], TensorProto.FLOAT16))
            (out,) = results
            node.input[:] = [halves[name] for name in operands]
            node.output[:] = [f"{out}/product"]
            nodes += [node, _cast(f"{out}/product", inner(out), TensorProto.FLOAT)]
        else:
            node.input[:] = map(inner, operands)
            node.output[:] = map(inner, results)
            nodes.append(node)
        graph.replace(node, *nodes)
    for value in (*graph.inputs.values(), *graph.outputs.values()):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    return graph.finish()


def _cast(name: str, to: str, element: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [name], [to], name=f"{to}/cast", to=element)
