"""Products with quantised weights by ONNX Runtime's int8 kernels.

In: a graph; out: one with activations of 16 bits. `MatMulNBits` computes on float32 activations with kernels that are
slow on a CPU (8-bit weights: 9 times slower than float32 ones), and fast with `accuracy_level` 4, which rounds the
activations to int8 first, in groups as the weights are. So each activation is cut in two parts, both exact there or
nearly: `high`, the multiple of its group's step that is nearest to it, which int8 holds exactly, and `low`, the rest,
at most half a step, which int8 holds to 1/254 of that. Both go through the product together, as rows of one batch, and
are added behind it: 16 bits in all, where fp16 has 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from lockstep.onnx_tools.rewriter import Rewriter, attributes_of

_LEVELS = 127.0  # of int8, on each side of zero
_TINY = 1e-30  # the step of a group of zeros


def split_activations(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with its products with quantised weights rewritten; itself where it has none."""
    graph = Rewriter(model)
    products = [node for node in graph.nodes if node.op_type == "MatMulNBits"]
    parts: dict[tuple[str, int], str] = {}  # {(activation, group size): both its parts, one behind the other}
    for node in products:
        sizes, activation, (out,) = attributes_of(node), node.input[0], node.output
        split: list[onnx.NodeProto] = []
        if (activation, sizes["block_size"]) not in parts:
            split = _split(graph, activation, sizes["K"], sizes["block_size"])
            parts[activation, sizes["block_size"]] = split[-1].output[0]
        node.input[0], node.output[0] = parts[activation, sizes["block_size"]], f"{out}/parts"
        node.attribute.append(helper.make_attribute("accuracy_level", 4))
        pair, axis = _ints(graph, "pair", [2, -1, sizes["N"]]), _ints(graph, "first_axis", [0])
        graph.replace(
            node,
            *split,
            node,
            helper.make_node("Reshape", [f"{out}/parts", pair], [f"{out}/pair"]),
            helper.make_node("ReduceSum", [f"{out}/pair", axis], [out], keepdims=0),
        )
    return graph.finish() if products else model


def _split(graph: Rewriter, activation: str, columns: int, group_size: int) -> list[onnx.NodeProto]:
    stem = f"{activation}/{group_size}"
    in_groups = _ints(graph, "groups", [-1, columns // group_size, group_size])
    in_rows, last = _ints(graph, "rows", [-1, columns]), _ints(graph, "last_axis", [-1])
    levels = graph.constant("two_parts/levels", np.array(1 / _LEVELS, np.float32))
    tiny = graph.constant("two_parts/tiny", np.array(_TINY, np.float32))
    steps: Sequence[tuple[str, Sequence[str], str]] = (
        ("Reshape", [activation, in_groups], "groups"),
        ("Abs", [f"{stem}/groups"], "magnitudes"),
        ("ReduceMax", [f"{stem}/magnitudes", last], "largest"),
        ("Mul", [f"{stem}/largest", levels], "step"),
        ("Max", [f"{stem}/step", tiny], "positive_step"),
        ("Div", [f"{stem}/groups", f"{stem}/positive_step"], "quotients"),
        ("Round", [f"{stem}/quotients"], "integers"),
        ("Mul", [f"{stem}/integers", f"{stem}/positive_step"], "high"),
        ("Sub", [f"{stem}/groups", f"{stem}/high"], "low"),
        ("Concat", [f"{stem}/high", f"{stem}/low"], "both"),
        ("Reshape", [f"{stem}/both", in_rows], "parts"),
    )
    attributes: dict[str, dict[str, Any]] = {"ReduceMax": {"keepdims": 1}, "Concat": {"axis": 0}}
    return [helper.make_node(op, inputs, [f"{stem}/{out}"], **attributes.get(op, {})) for op, inputs, out in steps]


def _ints(graph: Rewriter, what: str, values: Sequence[int]) -> str:
    return graph.constant(f"two_parts/{what}/{'x'.join(map(str, values))}", np.array(values, np.int64))
