"""Take a block's room for adapters out of its graph.

What is left computes what the model without adapters does.

In: a canonical graph that `export.lora` made. Out: the same without `adapter_ids`, the inputs that adapters are written
to, and all that is computed from them. For each linear layer the graph has y = base + (own B), and base becomes y.
"""

from __future__ import annotations

import onnx

from lockstep.artifacts.adapters import A_SUFFIX, B_SUFFIX, IDS
from lockstep.onnx_tools.graph_types import prune


def is_expand(node: onnx.NodeProto) -> bool:
    """Return whether a node is the second product of adapters.

    It is added to a layer's own.
    """
    return node.op_type == "Gemm" and node.input[1].endswith(B_SUFFIX)


def without_adapters(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` without room for adapters."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    added = {node.output[0] for node in graph.node if is_expand(node)}
    sums = {
        base: node.output[0]
        for node in graph.node
        if node.op_type == "Add" and added.intersection(node.input)
        for base in node.input
        if base not in added
    }
    kept = [node for node in graph.node if not (node.op_type == "Add" and added.intersection(node.input))]
    for node in kept:
        node.output[:] = [sums.get(name, name) for name in node.output]
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in kept]
    del graph.node[:]
    graph.node.extend(kept)
    prune(graph, [value.name for value in graph.output])
    inputs = [value for value in graph.input if value.name != IDS and not value.name.endswith((A_SUFFIX, B_SUFFIX))]
    del graph.input[:]
    graph.input.extend(inputs)
    del graph.value_info[:]
    onnx.checker.check_model(copy, full_check=True)
    return copy
