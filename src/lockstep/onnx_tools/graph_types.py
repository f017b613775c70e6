"""Helpers of passes that rewrite ONNX graphs.

They give types and shapes of all values, and remove what is not read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx
from onnx import GraphProto, ModelProto, NodeProto


def typed_values(model: ModelProto) -> dict[str, tuple[int, list[int]]]:
    """Return {name: (element type, shape)} of all values.

    They are those that ONNX's shape inference knows, constants too; 0 stands for a dynamic dimension.
    """
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    types = {value.name: value.type.tensor_type for value in (*graph.input, *graph.value_info, *graph.output)}
    known = {name: (kind.elem_type, [dim.dim_value for dim in kind.shape.dim]) for name, kind in types.items()}
    return known | {tensor.name: (tensor.data_type, [*tensor.dims]) for tensor in graph.initializer}


def prune(graph: GraphProto, wanted: Collection[str]) -> set[str]:
    """Keep the nodes and constants that the `wanted` values come from.

    Returns the names of all that is read, and of what is wanted.
    """
    needed, kept = set(wanted), []
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            kept.append(node)
            needed.update(node.input)
    del graph.node[:]
    graph.node.extend(reversed(kept))
    keep_constants(graph, needed)
    return needed


def replace_nodes(graph: GraphProto, nodes: Iterable[NodeProto]) -> None:
    """Let a graph have these nodes instead, of which some may be its own."""
    copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def keep_constants(graph: GraphProto, names: Collection[str]) -> None:
    """Drop the other constants."""
    kept = [tensor for tensor in graph.initializer if tensor.name in names]
    del graph.initializer[:]
    graph.initializer.extend(kept)
