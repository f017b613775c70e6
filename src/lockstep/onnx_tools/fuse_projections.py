"""Let projections that share their input be one product: q, k and v; gate and up.

In: a graph whose weights are inputs (slots). Out: the same graph with one `Gemm(transB=1)` and a Split in place of
several, and for each slot of the new graph the slots that it is made of, one after another: a fused weight is the
parts' rows, in order, so that binding places the checkpoint's tensors side by side and nothing is converted.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
from onnx import helper

from lockstep.onnx_tools.rewriter import Rewriter, is_linear


def fuse(model: onnx.ModelProto, slots: Collection[str]) -> tuple[onnx.ModelProto, dict[str, list[str]]]:
    """Return a copy with fused projections, and its slots {slot: [slots of `model`]}."""
    graph = Rewriter(model)
    mapping = {name: [name] for name in graph.inputs if name in slots}
    for first, *others in _groups(graph, set(slots)):
        group = [first, *others]
        names = list[str]()
        rows = list[int]()
        for parts in zip(*(node.input[1:] for node in group), strict=True):
            shapes = [graph.shape(part) for part in parts]
            rows = [shape[0] for shape in shapes]
            names.append(graph.input(" + ".join(parts), graph.element(parts[0]), [sum(rows), *shapes[0][1:]]))
            mapping = {slot: made_of for slot, made_of in mapping.items() if slot not in parts}
            mapping[names[-1]] = list(parts)
        whole = f"{first.name}/fused"
        sizes = graph.constant(f"{first.name}/rows", np.array(rows, np.int64))
        outputs = [node.output[0] for node in group]
        graph.replace(
            first,
            helper.make_node("Gemm", [first.input[0], *names], [whole], name=whole, transB=1),
            helper.make_node("Split", [whole, sizes], outputs, name=f"{first.name}/parts", axis=1),
        )
        for node in others:
            graph.replace(node)
    return graph.finish(), mapping


def _groups(graph: Rewriter, slots: set[str]) -> list[list[onnx.NodeProto]]:
    """Return groups of two or more products of one value with weights that nothing else reads."""
    groups: dict[tuple[str, int], list[onnx.NodeProto]] = {}
    for node in filter(is_linear, graph.nodes):
        weight, *bias = node.input[1:]
        alone = all(name in slots and len(graph.consumers[name]) == 1 for name in (weight, *bias))
        if alone and all(len(graph.shape(name)) == 1 for name in bias):
            groups.setdefault((node.input[0], len(bias)), []).append(node)
    return [group for group in groups.values() if len(group) > 1]
