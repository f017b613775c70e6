"""Cosines and sines in whole SIMD vectors.

In: a graph; out: one whose rows of angles are whole SIMD registers. ONNX Runtime computes the elements behind the last
whole vector of a Cos or Sin by another function, which differs in the last bit. Where a row of angles is no multiple of
a vector, which elements these are depends on the number of rows: a request's keys would depend on how many others
decode beside it. So such rows are padded before, and cut behind.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from lockstep.onnx_tools.rewriter import replace_nodes

VECTOR = 4  # float32 numbers, as ONNX Runtime is compiled for x86-64 and AArch64, whatever the CPU has


def pad_angles(model: onnx.ModelProto) -> bool:
    """Pad the inputs of Cos and Sin, in place; return False where all rows are whole vectors already."""
    inferred = onnx.shape_inference.infer_shapes(model)
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*inferred.graph.value_info, *inferred.graph.input)
    }
    graph, nodes, padded = model.graph, [], {}
    for node in graph.node:
        shape = shapes.get(node.input[0]) if node.op_type in ("Cos", "Sin") else None
        size = shape[-1] if shape else 0
        if not shape or size % VECTOR == 0:
            nodes.append(node)
            continue
        angles, found = node.input[0], node.output[0]
        if angles not in padded:
            padded[angles] = f"{angles}/padded"
            pads = np.zeros(2 * len(shape), np.int64)
            pads[-1] = -size % VECTOR
            graph.initializer.append(numpy_helper.from_array(pads, f"{angles}/pads"))
            nodes.append(helper.make_node("Pad", [angles, f"{angles}/pads"], [padded[angles]]))
            for name, value in (("first", 0), ("size", size), ("axis", -1)):
                graph.initializer.append(numpy_helper.from_array(np.array([value], np.int64), f"{angles}/{name}"))
        node.input[0], node.output[0] = padded[angles], f"{found}/padded"
        cut = [f"{angles}/first", f"{angles}/size", f"{angles}/axis"]
        nodes += [node, helper.make_node("Slice", [node.output[0], *cut], [found])]
    if padded:
        replace_nodes(graph, nodes)
    return bool(padded)
