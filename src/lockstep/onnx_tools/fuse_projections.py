"""Fuse projections that share their input into one product: q, k and v; gate and up.

In: a graph whose weights are inputs (slots). Out: the same graph with one `Gemm(transB=1)` and a Split instead of
several, and for each slot of the new graph the slots that it joins, one after another: a fused weight has the parts'
rows, in order, so that binding concatenates the checkpoint's tensors and nothing is converted.
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
    for group in _groups(graph, set(slots)):
        first = group[0]
        names: list[str] = []
        rows: list[int] = []
        for parts in zip(*(node.input[1:] for node in group), strict=True):  # the weights, then the biases
            shapes = [graph.shape(part) for part in parts]
            rows = [shape[0] for shape in shapes]
            name = graph.input(" + ".join(parts), graph.element(parts[0]), [sum(rows), *shapes[0][1:]])
            names.append(name)
            mapping = {slot: sources for slot, sources in mapping.items() if slot not in parts}
            mapping[name] = list(parts)
        fused = f"{first.name}/fused"
        sizes = graph.constant(f"{first.name}/rows", np.array(rows, np.int64))
        outputs = [node.output[0] for node in group]
        graph.replace(
            first,
            helper.make_node("Gemm", [first.input[0], *names], [fused], name=fused, transB=1),
            helper.make_node("Split", [fused, sizes], outputs, name=f"{first.name}/parts", axis=1),
        )
        for node in group[1:]:
            graph.replace(node)
    return graph.finish(), mapping


def _groups(graph: Rewriter, slots: set[str]) -> list[list[onnx.NodeProto]]:
    """Return groups of two or more products of one value with weights that nothing else reads."""
    groups: dict[tuple[str, int], list[onnx.NodeProto]] = {}
    for node in filter(is_linear, graph.nodes):
        weight, *bias = node.input[1:]
        is_only_reader = all(name in slots and len(graph.consumers[name]) == 1 for name in (weight, *bias))
        if is_only_reader and all(len(graph.shape(name)) == 1 for name in bias):
            groups.setdefault((node.input[0], len(bias)), []).append(node)
    return [group for group in groups.values() if len(group) > 1]
