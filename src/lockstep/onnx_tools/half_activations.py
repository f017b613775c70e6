"""Give a float32 graph float16 activations.

What it takes and gives is float16, and so are its products.

The rest stays float32 inside: norms, activation functions and sums of a block round once, where a value leaves it. What
is made of integers alone, such as angles of RoPE, is left as it is.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from lockstep.onnx_tools.graph_types import typed_values

_PRODUCTS = ("MatMul", "Gemm", "Conv")


def halve_activations(model: onnx.ModelProto) -> None:
    """Rewrite a graph for float16 activations, in place.

    float32 inputs and outputs become float16, with a Cast on the inner side, and products of them read and give
    float16. Weights are inputs, and become float16 too.
    """
    graph = model.graph
    types = {name: element for name, (element, _) in typed_values(model).items()}
    given = {value.name for value in graph.input if value.type.tensor_type.elem_type == TensorProto.FLOAT}
    results = {value.name for value in graph.output if value.type.tensor_type.elem_type == TensorProto.FLOAT}

    def inner(name: str) -> str:
        return f"{name}/float" if name in given or name in results else name

    halves: dict[str, str] = {name: name for name in given}
    of_floats = set(given)  # what is computed from float inputs
    nodes = [_cast(name, inner(name), TensorProto.FLOAT) for name in sorted(given)]
    for node in graph.node:
        floats = [name for name in node.input if types.get(name) == TensorProto.FLOAT]
        computed = not of_floats.isdisjoint(node.input)
        if computed:
            of_floats.update(node.output)
        if node.op_type in _PRODUCTS and computed and len(floats) == len(node.input):
            for name in floats:
                if name not in halves:
                    halves[name] = f"{name}/half"
                    nodes.append(_cast(inner(name), halves[name], TensorProto.FLOAT16))
            (out,) = node.output
            made = onnx.NodeProto()
            made.CopyFrom(node)
            made.input[:], made.output[:] = [halves[name] for name in node.input], [f"{out}/product"]
            nodes += [made, _cast(f"{out}/product", inner(out), TensorProto.FLOAT)]
        else:
            made = onnx.NodeProto()
            made.CopyFrom(node)
            made.input[:], made.output[:] = [inner(name) for name in node.input], [inner(name) for name in node.output]
            nodes.append(made)
    nodes += [_cast(inner(name), name, TensorProto.FLOAT16) for name in sorted(results)]
    read = {name for node in nodes for name in node.input}
    del graph.node[:]
    graph.node.extend(node for node in nodes if node.output[0] in read or node.output[0] in results | _names(graph))
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    del graph.value_info[:]
    onnx.checker.check_model(model, full_check=True)


def _names(graph: onnx.GraphProto) -> set[str]:
    return {value.name for value in graph.output}


def _cast(name: str, to: str, element: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [name], [to], name=f"{to}/cast", to=element)
