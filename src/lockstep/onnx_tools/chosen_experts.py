"""Compute the experts that a token chose, where a graph computes all.

In: a graph in which every token goes through all experts, times a score that is zero but for the chosen ones (Llama 4).
Out: one in which each token gathers the weights of its experts, as the graphs of other mixtures do (group_experts.py).
An expert makes zeros of zeros, so both are the same sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult
from lockstep.onnx_tools.values import array_of, attribute, maker, required, sizes_of, upstream

_SHAPING = ("Expand", "Reshape", "Tile", "Unsqueeze")


@dataclass(frozen=True)
class _AllExperts:
    """Experts that every token goes through.

    Attributes:
        tokens: [num_tokens, in_features].
        per_token: The number of experts that a token chooses.
        scatter: Writes the scores of these, [num_tokens, per_token], among those of all.
        activations: The nodes that follow it, up to the factors of tokens.
        first, second: The products with the weights of all experts.
        total: The sum over experts.
    """

    tokens: ir.Value
    per_token: int
    scatter: ir.Node
    activations: list[ir.Node]
    first: ir.Node
    second: ir.Node
    total: ir.Node


class ChosenExperts(Pass):
    """Gather the weights of a token's experts, where all experts are computed and then summed."""

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        is_changed = False
        for node in [*graph]:
            mixture = _all_experts(graph, node)
            if mixture is not None:
                _gather(graph, mixture)
                is_changed = True
        return PassResult(model, is_changed)


def _all_experts(graph: ir.Graph, total: ir.Node) -> _AllExperts | None:
    """Return the experts that a node sums; None for any other node."""
    if total.op_type != "ReduceSum" or attribute(total, "keepdims", 1) or len(total.inputs) < 2:
        return None
    axes = array_of(total.inputs[1])
    summed = required(total.inputs[0])
    sources = upstream([summed])
    products = [node for node in graph if _is_stacked(node) and node.outputs[0] in sources]
    if axes is None or axes.tolist() != [0] or len(products) != 2:
        return None
    first, second = products
    _, result = _chain(summed, "Cast")
    scaled = maker(first.inputs[0], "Mul")
    if result is not second.outputs[0] or scaled is None:
        return None
    # The first product reads tokens times scores, in either order; scores are scattered, then passed through a sigmoid.
    for factors, rows in (scaled.inputs, reversed(scaled.inputs)):
        activations, scattered = _chain(factors, "Cast", "Reshape", "Sigmoid", "Transpose")
        _, tokens = _chain(rows, *_SHAPING)
        scatter = maker(scattered, "ScatterElements")
        if scatter is None or all(node.op_type != "Sigmoid" for node in activations):
            continue
        choice = maker(scatter.inputs[1], "TopK")
        if choice is None:
            continue
        count = array_of(choice.inputs[1])
        if count is not None:
            return _AllExperts(tokens, count.item(), scatter, activations, first, second, total)
    return None


def _gather(graph: ir.Graph, mixture: _AllExperts) -> None:
    _, ids, scores = map(required, mixture.scatter.inputs)
    name = mixture.total.outputs[0].name
    in_features = sizes_of(mixture.first.inputs[1])[1]
    out_features = sizes_of(mixture.second.inputs[1])[2]
    writer = GraphWriter(graph, f"{name}/chosen", before=mixture.first)
    # The scores of the chosen ones alone, [num_tokens, per_token]; other activations only shape those of all.
    for node in mixture.activations:
        if node.op_type in ("Cast", "Sigmoid"):
            scores = writer.copy(node, scores, name=f"{node.name}/chosen")
    rows = writer.op("Unsqueeze", mixture.tokens, [1])
    rows = writer.op("Mul", rows, writer.op("Reshape", scores, [-1, mixture.per_token, 1]))
    mixture.first.replace_input_with(0, writer.op("Reshape", rows, [-1, 1, in_features]))
    columns = writer.op("Reshape", ids, [-1, 1])
    for node in (mixture.first, mixture.second):
        node.replace_input_with(1, writer.op("GatherND", node.inputs[1], columns))
    writer = GraphWriter(graph, f"{name}/sum", before=mixture.total)
    by_token = writer.op("Reshape", mixture.total.inputs[0], [-1, mixture.per_token, out_features])
    writer.op("ReduceSum", by_token, [1], keepdims=0, name=mixture.total.name, replaces=mixture.total.outputs[0])


def _is_stacked(node: ir.Node) -> bool:
    """Return whether a node is a product with the weights of all experts, [num_experts, in_features, out_features]."""
    if node.op_type != "MatMul":
        return False
    stack = required(node.inputs[1])
    return stack.is_graph_input() and len(sizes_of(stack)) == 3 and all(sizes_of(stack))


def _chain(value: ir.Value | None, *op_types: str) -> tuple[list[ir.Node], ir.Value]:
    """Return the chain of nodes of these operators that computes a value, and what the first one reads."""
    nodes: list[ir.Node] = []
    while (node := maker(value, *op_types)) is not None:
        nodes.insert(0, node)
        value = node.inputs[0]
    return nodes, required(value)
