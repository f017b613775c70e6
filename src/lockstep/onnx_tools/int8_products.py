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
import onnx_ir as ir

from lockstep.onnx_tools.int8_rounding import before_rounding, nearest_multiples
from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult, replace
from lockstep.onnx_tools.values import attribute, maker, required


class Int8Products(Pass):
    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        products = [node for node in graph if node.op_type == "MatMulNBits"]
        parts: dict[tuple[ir.Value, int], ir.Value] = {}  # {(activation, group size): its high rows, then its low rows}
        for node in products:
            activation = required(node.inputs[0])
            (out,) = node.outputs
            node.attributes.add(ir.AttrInt64("accuracy_level", 4))
            expert_split = maker(activation, "Split")
            if expert_split is not None and not required(expert_split.inputs[1]).is_initializer():
                # Rows of one expert, in a number that is computed. All experts' rows are split with the first's.
                if expert_split.outputs[0] is activation:
                    _split_expert_rows(graph, expert_split, node)
                continue
            source = before_rounding(activation)
            if source is not None:
                if attribute(node, "N") > 1:  # of one output OpenVINO multiplies the activation as it is
                    node.replace_input_with(0, source)
                continue
            group_size = attribute(node, "block_size")
            key = (activation, group_size)
            if key not in parts:
                parts[key] = _split(graph, node, activation, attribute(node, "K"), group_size)
            writer = GraphWriter(graph, f"{out.name}/parts", before=node)
            product = writer.copy(node, parts[key], *node.inputs[1:])
            replace(out, _add_halves(writer, product, 0))
        return PassResult(model, bool(products))


def _split_expert_rows(graph: ir.Graph, expert_split: ir.Node, first: ir.Node) -> None:
    """Split rows before they are divided by expert, and add both parts where the experts' rows are joined again.

    first: the product of the first expert.
    """
    rows, counts = map(required, expert_split.inputs)
    (join,) = first.outputs[0].consumers()
    (out,) = join.outputs
    group_size = attribute(first, "block_size")
    split = _split(graph, expert_split, rows, attribute(first, "K"), group_size, by_row=True)
    # Each row is two now, and the experts' parts stay whole.
    doubled = GraphWriter(graph, f"{rows.name}/counts", before=expert_split).op("Mul", counts, np.int64(2))
    expert_split.replace_input_with(0, split)
    expert_split.replace_input_with(1, doubled)
    writer = GraphWriter(graph, f"{out.name}/parts", after=join)
    parts_in_a_row = writer.op("Reshape", out, [-1, 2 * attribute(first, "N")])
    replace(out, _add_halves(writer, parts_in_a_row, 1), keep=parts_in_a_row.producer())


def _add_halves(writer: GraphWriter, parts: ir.Value, axis: int) -> ir.Value:
    """Add the halves of `parts` along an axis; ReduceSum takes twice their time."""
    names = [f"{parts.name}/high", f"{parts.name}/low"]
    return writer.op("Add", *writer.several("Split", parts, results=names, axis=axis, num_outputs=2))


def _split(
    graph: ir.Graph, before: ir.Node, activation: ir.Value, columns: int, group_size: int, by_row: bool = False
) -> ir.Value:
    """Split an activation: all rows of `high` first, then `low`; by_row: both parts of each row."""
    writer = GraphWriter(graph, f"{activation.name}/{group_size}", before)
    groups, high = nearest_multiples(writer, activation, columns, group_size)
    joined = writer.op("Concat", high, writer.op("Sub", groups, high), axis=int(by_row))
    return writer.op("Reshape", joined, [-1, columns])
