"""The types and shapes of a graph's values, as ONNX infers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

Dims = tuple[int | str, ...]  # of a shape: sizes and names, "?" for an unknown one


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    return {item.name: helper.get_attribute_value(item) for item in node.attribute}


def with_types(model: ModelProto) -> ModelProto:
    """Return a copy with the types and shapes that ONNX infers, also after quantised embeddings."""
    declared = ModelProto()
    declared.CopyFrom(model)
    graph = declared.graph
    inputs = {value.name: value for value in graph.input}
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    makers = {}
    for node in graph.node:
        makers.update(dict.fromkeys(node.output, node))
    for node in graph.node:
        if node.op_type == "GatherBlockQuantized":  # unknown to ONNX: its result has a row for each id
            data, ids = node.input[:2]
            if data in makers:  # a Reshape, of a stack of experts
                stored = constants[makers[data].input[1]].tolist()
            else:
                stored = dims_of(inputs[data])
            rows: Sequence[int | str | None] = [None]
            if ids in inputs:
                rows = dims_of(inputs[ids])
            shape = [*rows, *stored[1:-1], int(stored[-1]) * 8 // attributes_of(node)["bits"]]
            graph.value_info.append(helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, shape))
    return onnx.shape_inference.infer_shapes(declared, strict_mode=True, data_prop=True)


def typed_values(model: ModelProto) -> dict[str, tuple[int, Dims]]:
    """Return {name: (element type, shape)} of all values that ONNX can infer, constants too."""
    graph = with_types(model).graph
    values: dict[str, tuple[int, Dims]] = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        values[value.name] = (value.type.tensor_type.elem_type, dims_of(value))
    for tensor in graph.initializer:
        values[tensor.name] = (tensor.data_type, tuple(tensor.dims))
    return values


def dims_of(value: ValueInfoProto) -> Dims:
    dims = list[int | str]()
    for dim in value.type.tensor_type.shape.dim:
        dims.append(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?")
    return tuple(dims)
