"""Products with quantised weights by int8 kernels, ONNX Runtime's or OpenVINO's.

In: a graph; out: one with int8 products. `MatMulNBits` computes on float32 activations with kernels that are slow on a
CPU (8-bit weights: 9 times slower than float32 ones), and fast with `accuracy_level` 4, which rounds the activations to
int8 first, in groups as the weights are. Where the graph rounds them so (w8a8, w4a8), its own nodes for that go. Else
they keep 16 bits: each activation is cut in two parts, both exact there or nearly: `high`, the multiple of its group's
step that is nearest to it, which int8 holds exactly, and `low`, the rest, at most half a step, which int8 holds to
1/254 of that. Both go through the product together, as rows of one batch, and are added behind it: 16 bits in all,
where fp16 has 11. Rows of experts (onnx_tools/group_experts.py) are cut before they are dealt out, the two parts of a
row one behind the other.

OpenVINO's products are made from these: what changes here changes the engines of both backends.
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
    parts: dict[tuple[str, int], str] = {}  # {(activation, group size): both its parts, one behind the other}
    for node in products:
        sizes, activation, (out,) = attributes_of(node), node.input[0], node.output
        node.attribute.append(helper.make_attribute("accuracy_level", 4))
        deal = graph.producers.get(activation)
        if deal is not None and deal.op_type == "Split" and deal.input[1] not in graph.constants:
            if deal.output[0] == activation:
                _split_dealt(graph, deal, node)
            continue
        if (source := before_rounding(graph, activation)) is not None:
            node.input[0] = source
            continue
        split: list[onnx.NodeProto] = []
        if (activation, sizes["block_size"]) not in parts:
            split = _split(graph, activation, sizes["K"], sizes["block_size"])
            parts[activation, sizes["block_size"]] = split[-1].output[0]
        node.input[0] = parts[activation, sizes["block_size"]]
        node.output[0] = f"{out}/parts"
        graph.replace(node, *split, node, *_added(f"{out}/parts", out, 0))
    return graph.finish() if products else model


def _split_dealt(graph: Rewriter, deal: onnx.NodeProto, first: onnx.NodeProto) -> None:
    """Cut the rows that `deal` gives to experts, and add both parts where these are together again.

    first: the product of the first expert.
    """
    sizes, (rows, counts) = attributes_of(first), deal.input
    (together,) = graph.consumers[first.output[0]]
    (out,) = together.output
    split = _split(graph, rows, sizes["K"], sizes["block_size"], beside=True)
    counted = Emitter(graph, f"{rows}/counts")
    beside = Emitter(graph, f"{out}/beside")
    deal.input[:] = [split[-1].output[0], counted("Mul", counts, np.int64(2))]
    together.output[0] = f"{out}/parts"
    graph.replace(deal, *split, *counted.nodes, deal)
    row = beside("Reshape", together.output[0], [-1, 2 * sizes["N"]])
    graph.replace(together, together, *beside.nodes, *_added(row, out, 1))


def _added(parts: str, out: str, axis: int) -> list[onnx.NodeProto]:
    """Return nodes that add the halves of `parts` along an axis; ReduceSum takes twice their time."""
    halves = [f"{out}/of_high", f"{out}/of_low"]
    return [
        helper.make_node("Split", [parts], halves, axis=axis, num_outputs=2),
        helper.make_node("Add", halves, [out]),
    ]


def _split(
    graph: Rewriter, activation: str, columns: int, group_size: int, beside: bool = False
) -> list[onnx.NodeProto]:
    """Return the nodes that give both parts: all rows of `high` first, or `beside` each other those of a row."""
    emit = Emitter(graph, f"{activation}/{group_size}")
    groups, high = nearest_multiples(emit, activation, columns, group_size)
    both = emit("Concat", high, emit("Sub", groups, high), axis=int(beside))
    emit("Reshape", both, [-1, columns])
    return emit.nodes
