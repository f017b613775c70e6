"""A graph as ONNX Runtime optimised it.

In: an engine file, which is the saved optimised graph. Out: its operators and its layers as JSON.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

_ONNX_DOMAINS = ("", "ai.onnx")


def operators(model: ModelProto) -> dict[str, Any]:
    """Count the operators of a graph.

    Returns {"operators": how often each stands in the graph, "fused": those of them that ONNX does not know, which the
    optimiser put in, "constants": how many values it folded or was given}.
    """
    counts = Counter(_operator(node) for graph in _graphs(model.graph) for node in graph.node)
    fused = {
        _operator(node) for graph in _graphs(model.graph) for node in graph.node if node.domain not in _ONNX_DOMAINS
    }
    return {
        "operators": dict(sorted(counts.items())),
        "fused": sorted(fused),
        "constants": sum(len(graph.initializer) for graph in _graphs(model.graph)),
    }


def layers(model: ModelProto) -> dict[str, Any]:
    """Return the graph in full.

    {"opsets", "inputs", "outputs", "values": type by name, "constants", "layers": operator, attributes and values by
    number}.
    """
    return {"opsets": {entry.domain: entry.version for entry in model.opset_import}, **_graph(model.graph)}


def _graph(graph: GraphProto) -> dict[str, Any]:
    return {
        "inputs": [f"{value.name} {_type(value)}" for value in graph.input],
        "outputs": [f"{value.name} {_type(value)}" for value in graph.output],
        "values": {value.name: _type(value) for value in graph.value_info},
        "constants": {tensor.name: _tensor(tensor) for tensor in graph.initializer},
        "layers": [_layer(node) for node in graph.node],
    }


def _layer(node: NodeProto) -> dict[str, Any]:
    return {
        "name": node.name,
        "operator": _operator(node),
        "inputs": list(node.input),
        "outputs": list(node.output),
        "attributes": {attribute.name: _attribute(attribute) for attribute in node.attribute},
    }


def _operator(node: NodeProto) -> str:
    return node.op_type if node.domain in _ONNX_DOMAINS else f"{node.domain}.{node.op_type}"


def _type(value: ValueInfoProto) -> str:
    kind = value.type.tensor_type
    dims = [dim.dim_param or (str(dim.dim_value) if dim.HasField("dim_value") else "?") for dim in kind.shape.dim]
    return f"{TensorProto.DataType.Name(kind.elem_type).lower()}[{', '.join(dims)}]"


def _tensor(tensor: TensorProto) -> str:
    array = onnx.numpy_helper.to_array(tensor)
    return f"{array.dtype.name}{list(array.shape)} sha256 {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


def _attribute(attribute: AttributeProto) -> Any:
    return _json(onnx.helper.get_attribute_value(attribute))


def _json(value: Any) -> Any:
    if isinstance(value, GraphProto):
        return _graph(value)
    if isinstance(value, TensorProto):
        return _tensor(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (int, str)):
        return value
    if hasattr(value, "__iter__"):
        return [_json(item) for item in value]
    return str(value)  # a type or a sparse tensor: no operator that the optimiser writes has one


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)
