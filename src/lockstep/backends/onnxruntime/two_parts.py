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
from onnx import helper, numpy_helper

from lockstep.onnx_tools.rewriter import replace_nodes

_LEVELS = 127.0  # of int8, on each side of zero
_TINY = 1e-30  # the step of a group of zeros


def split_activations(model: onnx.ModelProto) -> bool:
    """Rewrite the products with quantised weights, in place; return False where there are none."""
    rewriter = _Rewriter(model.graph)
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        nodes += rewriter.product(node) if node.op_type == "MatMulNBits" else [node]
    replace_nodes(model.graph, nodes)
    return bool(rewriter.parts)


class _Rewriter:
    def __init__(self, graph: onnx.GraphProto):
        self._graph = graph
        self._constants: set[str] = set()
        self.parts: dict[tuple[str, int], str] = {}  # {(activation, group size): both its parts, one behind the other}

    def product(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        sizes = {entry.name: entry.i for entry in node.attribute if entry.name in ("K", "N", "block_size")}
        columns, group_size = sizes["K"], sizes["block_size"]
        activation, out = node.input[0], node.output[0]
        made = [] if (activation, group_size) in self.parts else self._split(activation, columns, group_size)
        product = onnx.NodeProto()
        product.CopyFrom(node)
        product.input[0], product.output[0] = self.parts[activation, group_size], f"{out}/parts"
        product.attribute.append(helper.make_attribute("accuracy_level", 4))
        pair, axis = self._ints("pair", [2, -1, sizes["N"]]), self._ints("first_axis", [0])
        return [
            *made,
            product,
            helper.make_node("Reshape", [f"{out}/parts", pair], [f"{out}/pair"]),
            helper.make_node("ReduceSum", [f"{out}/pair", axis], [out], keepdims=0),
        ]

    def _split(self, activation: str, columns: int, group_size: int) -> list[onnx.NodeProto]:
        stem = f"{activation}/{group_size}"
        self.parts[activation, group_size] = f"{stem}/parts"
        in_groups = self._ints("groups", [-1, columns // group_size, group_size])
        in_rows, last = self._ints("rows", [-1, columns]), self._ints("last_axis", [-1])
        levels, tiny = self._float("levels", 1 / _LEVELS), self._float("tiny", _TINY)
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

    def _ints(self, what: str, values: Sequence[int]) -> str:
        return self._constant(f"two_parts/{what}/{'x'.join(map(str, values))}", np.array(values, np.int64))

    def _float(self, what: str, value: float) -> str:
        return self._constant(f"two_parts/{what}", np.array(value, np.float32))

    def _constant(self, name: str, array: np.ndarray) -> str:
        if name not in self._constants:
            self._constants.add(name)
            self._graph.initializer.append(numpy_helper.from_array(array, name))
        return name
