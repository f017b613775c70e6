"""A bf16 graph as ONNX Runtime can compute it on a CPU: in fp32.

It has no bf16 there.

What such a run shows is the graph (its operators, their order, what is bound to what), not the rounding of bf16.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the same graph with float32 wherever it has bfloat16.

    Inputs, outputs, constants, casts. `model` itself where it has none.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    changed = _graph(made.graph) + sum(_node(node) for function in made.functions for node in function.node)
    return made if changed else model


def widened_dtype(dtype: str) -> str:
    """Return what a graph's dtype becomes."""
    return "float32" if dtype == "bfloat16" else dtype


def _graph(graph: onnx.GraphProto) -> int:
    types = [value.type.tensor_type for value in (*graph.input, *graph.output, *graph.value_info)]
    narrow = [kind for kind in types if kind.elem_type == TensorProto.BFLOAT16]
    for kind in narrow:
        kind.elem_type = TensorProto.FLOAT
    return len(narrow) + sum(map(_tensor, graph.initializer)) + sum(map(_node, graph.node))


def _node(node: onnx.NodeProto) -> int:
    changed = 0
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.TENSOR:
            changed += _tensor(attribute.t)
        elif attribute.type == onnx.AttributeProto.GRAPH:
            changed += _graph(attribute.g)
        # Cast, RandomNormal and their like
        elif attribute.name in ("to", "dtype") and attribute.i == TensorProto.BFLOAT16:
            attribute.i = TensorProto.FLOAT
            changed += 1
    return changed


def _tensor(tensor: onnx.TensorProto) -> int:
    if tensor.data_type != TensorProto.BFLOAT16:
        return 0
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    return 1
