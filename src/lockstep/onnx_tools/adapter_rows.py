"""Let a layer's own product compute its adapters' first product, too.

A becomes further rows of the layer's weight.

In: a graph whose blocks take adapters, its weight slots and what each is made of. For each y = x W^T and all x A_i of
the layers that are in it, the graph gets one product of x with W and behind it A_i^T, row by row, and a Split. Out: the
graph, and the slots: such a slot is made of its tensors and of the inputs A_i, which it is named by. A kernel that
decodes reads these rows with the others; of its own the first product takes as long as a kernel takes to start.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper

from lockstep.artifacts.adapters import A_SUFFIX, BETWEEN, rows_of
from lockstep.onnx_tools.rewriter import Rewriter, attributes_of


def shrink_in_rows(
    model: onnx.ModelProto, parts: Mapping[str, list[str]]
) -> tuple[onnx.ModelProto, dict[str, list[str]]]:
    """Return a copy with A as rows of weights (but not of such as lie the other way), and its slots' parts."""
    graph, slots = Rewriter(model), dict(parts)
    products = [node for node in graph.nodes if node.op_type == "Gemm"]
    shrinks = {node.input[1]: node for node in products if node.input[1].endswith(A_SUFFIX)}
    for node in products:
        slot = node.input[1]
        names = [part + A_SUFFIX for part in parts.get(slot, ()) if part + A_SUFFIX in shrinks]
        is_transposed = bool(attributes_of(node).get("transB"))
        if not names or not is_transposed or any(shrinks[name].input[0] != node.input[0] for name in names):
            continue
        (rows, deep), columns = graph.shape(slot), [graph.shape(name)[1] for name in names]
        joined = graph.input(BETWEEN.join([slot, *names]), graph.element(slot), [rows + sum(columns), deep])
        slots[joined] = [*slots.pop(slot), *names]
        for name in names:
            graph.replace(shrinks[name])
        (out,) = node.output
        outputs = [out, *(shrinks[name].output[0] for name in names)]
        sizes = graph.constant(f"{out}/sizes", np.array([rows, *columns], np.int64))
        split = helper.make_node("Split", [f"{out}/wide", sizes], outputs, name=f"{out}/parts of rows", axis=1)
        node.input[1], node.output[0] = joined, f"{out}/wide"
        if len(node.input) < 3:
            graph.replace(node, node, split)
            continue
        dtype = helper.tensor_dtype_to_np_dtype(graph.element(slot))
        zeros = graph.constant(f"{out}/no bias", np.zeros(sum(columns), dtype))
        bias = [node.input[2], zeros]
        node.input[2] = f"{out}/bias"
        concat = helper.make_node("Concat", bias, [node.input[2]], name=f"{out}/bias with rows", axis=0)
        graph.replace(node, concat, node, split)
    return graph.finish(), slots


def slot_rows(feeds: Mapping[str, np.ndarray], parts: list[str], slot: str) -> np.ndarray:
    """Return what a slot takes: its parts, one after another; behind them the A that are rows of it, transposed."""
    rows = rows_of(slot)
    return np.concatenate([feeds[part].T if part in rows else feeds[part] for part in parts])
