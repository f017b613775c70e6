"""Compute products with quantised weights by int8 kernels, ONNX Runtime's or OpenVINO's.

In: a graph; out: one with int8 products. On a CPU `MatMulNBits` has slow kernels for float32 activations (8-bit
weights: 9 times slower than float32 ones), and fast ones with `accuracy_level` 4, which round the activations to int8
first, in groups as the weights are. Where the graph rounds them so (w8a8, w4a8), its own nodes for that are dropped.
Else activations keep 16 bits, in two parts: `high`, the nearest multiple of the group's step, which int8 holds exactly,
and `low`, the difference, at most half a step, which int8 holds to 1/254 of that. Both go through the product together,
as rows of one batch, and are added after it: 16 bits in all, where fp16 has 11. Rows of experts
(onnx_tools/group_experts.py) are split before they are sorted by expert, so that both parts of a row stay together.

OpenVINO's products are derived from these: a change here changes the engines of both backends.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from lockstep.onnx_tools.int8_rounding import before_rounding, nearest_multiples
from lockstep.onnx_tools.rewriter import Emitter, Rewriter, attributes_of


def int8_products(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with its products with quantised weights rewritten; itself where it has none."""
    graph = Rewriter(model)
    products = [node for node in graph.nodes if node.op_type == "MatMulNBits"]
    parts: dict[tuple[str, int], str] = {}  # {(activation, group size): its high rows, then its low rows}
    for node in products:
        sizes = attributes_of(node)
        activation = node.input[0]
        (out,) = node.output
        node.attribute.append(helper.make_attribute("accuracy_level", 4))
        expert_split = graph.producers.get(activation)
        if expert_split is not None and expert_split.op_type == "Split":
            if expert_split.input[1] not in graph.constants:  # by expert, so by counts of rows
                if expert_split.output[0] == activation:
                    _split_expert_rows(graph, expert_split, node)
                continue
        source = before_rounding(graph, activation)
        if source is not None:
            node.input[0] = source
            continue
        key = (activation, sizes["block_size"])
        split: list[onnx.NodeProto] = []
        if key not in parts:
            split = _split(graph, activation, sizes["K"], sizes["block_size"])
            parts[key] = split[-1].output[0]
        node.input[0] = parts[key]
        node.output[0] = f"{out}/parts"
        graph.replace(node, *split, node, *_add_halves(f"{out}/parts", out, 0))
    return graph.finish() if products else model


def _split_expert_rows(graph: Rewriter, expert_split: onnx.NodeProto, first: onnx.NodeProto) -> None:
    """Split rows before they are divided by expert, and add both parts where the experts' rows are joined again.

    first: the product of the first expert.
    """
    sizes = attributes_of(first)
    rows, counts = expert_split.input
    (join,) = graph.consumers[first.output[0]]
    (out,) = join.output
    split = _split(graph, rows, sizes["K"], sizes["block_size"], by_row=True)
    doubled = Emitter(graph, f"{rows}/counts")
    reshaped = Emitter(graph, f"{out}/beside")
    expert_split.input[:] = [split[-1].output[0], doubled("Mul", counts, np.int64(2))]
    join.output[0] = f"{out}/parts"
    graph.replace(expert_split, *split, *doubled.nodes, expert_split)
    row = reshaped("Reshape", join.output[0], [-1, 2 * sizes["N"]])
    graph.replace(join, join, *reshaped.nodes, *_add_halves(row, out, 1))


def _add_halves(parts: str, out: str, axis: int) -> list[onnx.NodeProto]:
    """Return nodes that add the halves of `parts` along an axis; ReduceSum takes twice their time."""
    halves = [f"{out}/of_high", f"{out}/of_low"]
    return [
        helper.make_node("Split", [parts], halves, axis=axis, num_outputs=2),
        helper.make_node("Add", halves, [out]),
    ]


def _split(
    graph: Rewriter, activation: str, columns: int, group_size: int, by_row: bool = False
) -> list[onnx.NodeProto]:
    """Return nodes that split an activation: all rows of `high` first, then `low`; by_row: both parts of each row."""
    emit = Emitter(graph, f"{activation}/{group_size}")
    groups, high = nearest_multiples(emit, activation, columns, group_size)
    joined = emit("Concat", high, emit("Sub", groups, high), axis=int(by_row))
    emit("Reshape", joined, [-1, columns])
    return emit.nodes
