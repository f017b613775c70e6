"""Fuse projections that share their input into one product: q, k and v; gate and up.

In: a graph whose weights are inputs (slots). Out: the same graph with one `Gemm(transB=1)` and a Split instead of
several, and for each slot of the new graph the slots that it joins, one after another: a fused weight has the parts'
rows, in order, so that binding concatenates the checkpoint's tensors and nothing is converted.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult, add_input, replace
from lockstep.onnx_tools.values import dtype_of, is_linear, required, sizes_of


class FuseProjections(Pass):
    """Fuse the projections of one value. slots: of the graph; parts: {slot of the new graph: [slots that it joins]}."""

    def __init__(self, slots: Collection[str]):
        self._slots = set(slots)
        self.parts: dict[str, list[str]] = {}

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        self.parts = {str(value.name): [str(value.name)] for value in graph.inputs if value.name in self._slots}
        groups = self._groups(graph)
        for group in groups:
            first = group[0]
            operands = []
            rows: list[int] = []
            for parts in zip(*(node.inputs[1:] for node in group), strict=True):  # the weights, then the biases
                shapes = [sizes_of(part) for part in parts]
                rows = [shape[0] for shape in shapes]
                names = [str(required(part).name) for part in parts]
                dtype = dtype_of(required(parts[0]))
                operands.append(add_input(graph, " + ".join(names), dtype, [sum(rows), *shapes[0][1:]]))
                for name in names:
                    del self.parts[name]
                self.parts[" + ".join(names)] = names
            # Before the first of them: all read one value, so it is computed by then.
            writer = GraphWriter(graph, f"{first.name}/fused", before=first)
            product = writer.op("Gemm", first.inputs[0], *operands, transB=1)
            results = [f"{node.outputs[0].name}/part" for node in group]
            outputs = writer.several("Split", product, rows, results=results, axis=1)
            for node, output in zip(group, outputs, strict=True):
                replace(node.outputs[0], output)
        return PassResult(model, bool(groups))

    def _groups(self, graph: ir.Graph) -> list[list[ir.Node]]:
        """Return groups of two or more products of one value with weights that nothing else reads."""
        groups: dict[tuple[ir.Value | None, int], list[ir.Node]] = {}
        for node in filter(is_linear, graph):
            weight, *bias = map(required, node.inputs[1:])
            is_only_reader = all(value.name in self._slots and len(value.uses()) == 1 for value in (weight, *bias))
            if is_only_reader and all(len(sizes_of(value)) == 1 for value in bias):
                groups.setdefault((node.inputs[0], len(bias)), []).append(node)
        return [group for group in groups.values() if len(group) > 1]
