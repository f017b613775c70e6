"""Cosines and sines in whole SIMD vectors.

In: a graph; out: one whose rows of angles are whole SIMD registers. ONNX Runtime computes the elements behind the last
whole vector of a Cos or Sin by another function, which differs in the last bit. Where a row of angles is no multiple of
a vector, which elements these are depends on the number of rows: a request's keys would depend on how many others
decode beside it. So such rows are padded before, and cut behind.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from lockstep.onnx_tools.rewriter import Rewriter, typed_values

VECTOR = 4  # float32 numbers, as ONNX Runtime is compiled for x86-64 and AArch64, whatever the CPU has


def pad_angles(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose inputs of Cos and Sin are padded; itself where all rows are whole vectors already."""
    graph, padded = Rewriter(model), dict[str, str]()
    nodes = [node for node in graph.nodes if node.op_type in ("Cos", "Sin")]
    types = typed_values(model) if nodes else {}
    for node in nodes:
        (angles,), (out,), shape = node.input, node.output, types[node.input[0]][1]
        size = shape[-1] if shape else 0
        if not isinstance(size, int) or size % VECTOR == 0:
            continue
        pad: list[onnx.NodeProto] = []
        if angles not in padded:
            padded[angles] = f"{angles}/padded"
            pads = np.zeros(2 * len(shape), np.int64)
            pads[-1] = -size % VECTOR
            pad = [helper.make_node("Pad", [angles, graph.constant(f"{angles}/pads", pads)], [padded[angles]])]
            for name, value in (("first", 0), ("size", size), ("axis", -1)):
                graph.constant(f"{angles}/{name}", np.array([value], np.int64))
        node.input[0], node.output[0] = padded[angles], f"{out}/padded"
        cut = [f"{angles}/first", f"{angles}/size", f"{angles}/axis"]
        graph.replace(node, *pad, node, helper.make_node("Slice", [node.output[0], *cut], [out]))
    return graph.finish() if padded else model
