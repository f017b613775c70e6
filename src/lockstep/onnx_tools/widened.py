"""A 16-bit graph computed in fp32.

So ONNX Runtime, which has no bf16 on a CPU, can compute a bf16 graph; and a fp16 graph shows what fp16 does not hold.

What such a run shows is the graph (its operators, their order, what is bound to what), not the rounding of bf16.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper


def widened(model: onnx.ModelProto, narrow: int = TensorProto.BFLOAT16) -> onnx.ModelProto:
    """Return the same graph with float32 wherever it has the type `narrow`; `model` itself where it has none."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    changed = _graph(wide.graph, narrow) + sum(
        _node(node, narrow) for function in wide.functions for node in function.node
    )
    return wide if changed else model


def widened_dtype(dtype: str) -> str:
    return "float32" if dtype == "bfloat16" else dtype


def _graph(graph: onnx.GraphProto, narrow: int) -> int:
    types = [value.type.tensor_type for value in (*graph.input, *graph.output, *graph.value_info)]
    narrow_types = [kind for kind in types if kind.elem_type == narrow]
    for kind in narrow_types:
        kind.elem_type = TensorProto.FLOAT
    changed = len(narrow_types) + sum(_tensor(tensor, narrow) for tensor in graph.initializer)
    return changed + sum(_node(node, narrow) for node in graph.node)


def _node(node: onnx.NodeProto, narrow: int) -> int:
    changed = 0
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.TENSOR:
            changed += _tensor(attribute.t, narrow)
        elif attribute.type == onnx.AttributeProto.GRAPH:
            changed += _graph(attribute.g, narrow)
        # Cast, RandomNormal and their like
        elif attribute.name in ("to", "dtype") and attribute.i == narrow:
            attribute.i = TensorProto.FLOAT
            changed += 1
    return changed


def _tensor(tensor: onnx.TensorProto, narrow: int) -> int:
    if tensor.data_type != narrow:
        return 0
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    return 1
