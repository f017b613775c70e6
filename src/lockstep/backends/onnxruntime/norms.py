"""RMS norms as one node.

In: a graph; out: one whose norms are ONNX Runtime's `SimplifiedLayerNormalization`. Its own fusion looks for a division
by the root, and norms here multiply by the root's reciprocal: they would stay seven nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult, infer_types
from lockstep.onnx_tools.values import array_of, attribute, required

_CHAIN = ("Reciprocal", "Sqrt", "Add", "ReduceMean", "Pow")  # from its end


class FuseNorms(Pass):
    """Fuse float32 RMS norms. ONNX's checker does not know the operator."""

    def call(self, model: ir.Model) -> PassResult:
        norms = [*_norms(model.graph)]
        if norms:
            infer_types(model)
        is_fused = False
        for value, epsilon, weight, last in norms:
            if value.dtype == ir.DataType.FLOAT and weight.shape is not None and len(weight.shape) == 1:
                writer = GraphWriter(model.graph, before=last)
                (out,) = last.outputs
                writer.op("SimplifiedLayerNormalization", value, weight, epsilon=epsilon, replaces=out)
                is_fused = True
        return PassResult(model, is_fused)


def _norms(graph: ir.Graph) -> Iterator[tuple[ir.Value, float, ir.Value, ir.Node]]:
    """Yield (input, epsilon, weight, product with the weight) of each norm along the last axis.

    A norm is weight * (x * 1 / sqrt(mean(x ** 2) + epsilon)); the chain is the reciprocal and its inputs.
    """
    for reciprocal in graph:
        if reciprocal.op_type != _CHAIN[0]:
            continue
        chain = [reciprocal]
        while len(chain) < len(_CHAIN) and (before := required(chain[-1].inputs[0]).producer()) is not None:
            chain.append(before)
        is_read_once = all(len(node.outputs[0].uses()) == 1 for node in chain)
        if tuple(node.op_type for node in chain) != _CHAIN or not is_read_once:
            continue
        _, _, add, mean, power = chain
        if len(mean.inputs) == 1:  # of all axes
            continue
        constants = [array_of(node.inputs[1]) for node in (add, mean, power)]
        if any(array is None or array.size != 1 for array in constants) or not attribute(mean, "keepdims", 1):
            continue
        epsilon, axis, exponent = (array.item() for array in constants if array is not None)
        value = required(power.inputs[0])
        (normed,) = reciprocal.outputs[0].consumers()
        scaled = normed.outputs[0].consumers()
        if (axis, exponent) != (-1, 2) or normed.op_type != "Mul" or value not in normed.inputs:
            continue
        if len(scaled) == 1 and scaled[0].op_type == "Mul":
            (weight,) = (factor for factor in scaled[0].inputs if factor is not normed.outputs[0])
            yield value, epsilon, required(weight), scaled[0]
