"""Compute the experts that a token chose, where a graph computes all.

In: a graph in which every token goes through all experts, times a score that is zero but for the chosen ones (Llama 4).
Out: one in which each token gathers the weights of its experts, as the graphs of other mixtures do (group_experts.py).
An expert makes zeros of zeros, so both are the same sum.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult
from lockstep.onnx_tools.values import array_of, attribute, maker, required, sizes_of, upstream

_SHAPING = ("Expand", "Reshape", "Tile", "Unsqueeze")


class ChosenExperts(Pass):
    """Gather the weights of a token's experts, where all experts are computed and then summed."""

    def call(self, model: ir.Model) -> PassResult:
        sums = [node for node in model.graph if node.op_type == "ReduceSum" and attribute(node, "keepdims", 1) == 0]
        count = sum(_gather(model.graph, node) for node in sums)
        return PassResult(model, bool(count))


def _gather(graph: ir.Graph, total: ir.Node) -> bool:
    """Rewrite the experts that a sum is over; return whether it is one over experts."""
    axes = array_of(total.inputs[1]) if len(total.inputs) > 1 else None
    summed = required(total.inputs[0])
    second = maker(summed, "MatMul") or maker(getattr(maker(summed, "Cast"), "inputs", [None])[0], "MatMul")
    if axes is None or axes.tolist() != [0] or second is None:
        return False
    products = [node for node in graph if _is_stacked(node) and node.outputs[0] in upstream([summed])]
    first = products[0] if len(products) == 2 and products[1] is second else None
    scaled = None if first is None else maker(first.inputs[0], "Mul")
    if first is None or scaled is None:
        return False
    for value, other in (scaled.inputs, reversed(scaled.inputs)):
        chain = [*_upwards(required(value), "Cast", "Reshape", "Sigmoid", "Transpose")]
        scatter = maker(chain[-1].inputs[0] if chain else None, "ScatterElements")
        top = None if scatter is None else maker(scatter.inputs[1], "TopK")
        tokens = [*_upwards(required(other), *_SHAPING)]
        if scatter is None or top is None or not tokens or all(node.op_type != "Sigmoid" for node in chain):
            continue
        count = array_of(top.inputs[1])
        if count is None:
            continue
        per_token = int(count.reshape(-1)[0])
        writer = GraphWriter(graph, f"{total.outputs[0].name}/chosen", before=first)
        scores = required(scatter.inputs[2])
        for node in reversed(chain):
            if node.op_type in ("Cast", "Sigmoid"):
                scores = writer.copy(node, scores, name=f"{node.name}/chosen")
        rows = writer.op("Unsqueeze", tokens[-1].inputs[0], [1])
        rows = writer.op("Mul", rows, writer.op("Reshape", scores, [-1, per_token, 1]))
        first.replace_input_with(0, writer.op("Reshape", rows, [-1, 1, sizes_of(first.inputs[1])[1]]))
        ids = writer.op("Reshape", scatter.inputs[1], [-1, 1])
        out_features = sizes_of(second.inputs[1])[2]
        for node in products:
            node.replace_input_with(1, writer.op("GatherND", node.inputs[1], ids))
        writer = GraphWriter(graph, f"{total.outputs[0].name}/sum", before=total)
        by_token = writer.op("Reshape", summed, [-1, per_token, out_features])
        writer.op("ReduceSum", by_token, [1], keepdims=0, name=total.name, replaces=total.outputs[0])
        return True
    return False


def _is_stacked(node: ir.Node) -> bool:
    """Return whether a node is a product with the weights of all experts, [num_experts, in_features, out_features]."""
    if node.op_type != "MatMul":
        return False
    stack = required(node.inputs[1])
    return stack.is_graph_input() and len(sizes_of(stack)) == 3 and all(sizes_of(stack))


def _upwards(value: ir.Value, *op_types: str) -> Iterator[ir.Node]:
    """Yield the chain of nodes of these operators that computes a value, the last one first."""
    while (node := maker(value, *op_types)) is not None:
        yield node
        value = required(node.inputs[0])
