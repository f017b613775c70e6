"""Take a block's room for adapters out of its graph.

What is left computes what the model without adapters does.

In: a canonical graph that `export.lora` made. Out: the same without `adapter_ids`, the inputs that adapters are written
to, and all that is computed from them. For each linear layer the graph has y = base + (own B), and base becomes y.
"""

from __future__ import annotations

import onnx

from lockstep.artifacts.adapters import B_SUFFIX
from lockstep.onnx_tools.rewriter import Rewriter


def is_expand(node: onnx.NodeProto) -> bool:
    """Return whether a node is the second product of adapters, which is added to a layer's own."""
    return node.op_type == "Gemm" and node.input[1].endswith(B_SUFFIX)


def without_adapters(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` without room for adapters."""
    graph = Rewriter(model)
    for expand in filter(is_expand, graph.nodes):
        (total,) = graph.consumers[expand.output[0]]
        (base,) = (name for name in total.input if name != expand.output[0])
        graph.producers[base].output[:] = [
            total.output[0] if name == base else name for name in graph.producers[base].output
        ]
        graph.replace(total)
    return graph.finish()
