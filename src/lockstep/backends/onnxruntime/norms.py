"""RMS norms as one node.

In: a graph; out: one whose norms are ONNX Runtime's `SimplifiedLayerNormalization`. Its own fusion looks for a division
by the root, and norms here multiply by the root's reciprocal: they would stay seven nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import TensorProto, helper

from lockstep.onnx_tools.rewriter import Rewriter, attributes_of, typed_values

_CHAIN = ("Reciprocal", "Sqrt", "Add", "ReduceMean", "Pow")  # from its end


def fuse_norms(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with its float32 RMS norms fused; itself where it has none."""
    graph = Rewriter(model)
    norms = list(_norms(graph))
    types = typed_values(model) if norms else {}
    fused = False
    for value, epsilon, weight, last in norms:
        (kind, _), (_, shape) = (types.get(name, (TensorProto.UNDEFINED, ())) for name in (value, weight))
        if kind == TensorProto.FLOAT and len(shape) == 1:
            norm = helper.make_node("SimplifiedLayerNormalization", [value, weight], last.output, epsilon=epsilon)
            graph.replace(last, norm)
            fused = True
    # ONNX's checker does not know the operator
    return graph.finish(check=False) if fused else model


def _norms(graph: Rewriter) -> Iterator[tuple[str, float, str, onnx.NodeProto]]:
    """Yield what is normed along the last axis, the epsilon, the weight, and the product with it, of each norm."""
    for reciprocal in (node for node in graph.nodes if node.op_type == _CHAIN[0]):
        chain = [reciprocal]
        while len(chain) < len(_CHAIN) and (before := graph.producers.get(chain[-1].input[0])) is not None:
            chain.append(before)
        inner = [node.output[0] for node in chain]
        if tuple(node.op_type for node in chain) != _CHAIN or any(len(graph.consumers[name]) > 1 for name in inner):
            continue
        _, _, add, mean, power = chain
        if len(mean.input) == 1:  # opset 17, whose axes are an attribute
            continue
        constants = [graph.array(node.input[1]) for node in (add, mean, power)]
        if any(array is None or array.size != 1 for array in constants) or not attributes_of(mean).get("keepdims", 1):
            continue
        epsilon, axis, exponent = (array.item() for array in constants if array is not None)
        (normed,) = graph.consumers[reciprocal.output[0]]
        scaled = graph.consumers[normed.output[0]]
        if (axis, exponent) != (-1, 2) or normed.op_type != "Mul" or power.input[0] not in normed.input:
            continue
        if len(scaled) == 1 and scaled[0].op_type == "Mul":
            (weight,) = (name for name in scaled[0].input if name != normed.output[0])
            yield power.input[0], epsilon, weight, scaled[0]
