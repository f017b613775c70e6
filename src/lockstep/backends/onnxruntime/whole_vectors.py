"""Cosines, sines, logarithms and their like in whole SIMD vectors.

In: a graph; out: one whose rows of their inputs are whole SIMD registers. ONNX Runtime computes the elements behind the
last whole vector of a Cos by another function, which differs in the last bit. Where a row of angles is no multiple of
a vector, which elements these are depends on the number of rows: a request's keys would depend on how many others
decode beside it. So such rows are padded before, and cut behind. Measured so: the operators of `_OPERATORS`; not so:
Exp, Sigmoid, Tanh, Erf, Sqrt, Reciprocal and Softmax.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from lockstep.onnx_tools.rewriter import Rewriter, typed_values

_OPERATORS = ("Cos", "Sin", "Log", "Softplus", "Mish", "Atan")
VECTOR = 4  # float32 numbers, as ONNX Runtime is compiled for x86-64 and AArch64, whatever the CPU has


def pad_angles(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose inputs of these operators are padded; itself where all rows are whole vectors already."""
    graph = Rewriter(model)
    padded = dict[str, str]()
    nodes = [node for node in graph.nodes if node.op_type in _OPERATORS]
    types = typed_values(model) if nodes else {}
    for node in nodes:
        (angles,), (out,), shape = node.input, node.output, types[node.input[0]][1]
        before: list[onnx.NodeProto] = []
        behind: list[onnx.NodeProto] = []
        if len(shape) == 1 and not isinstance(shape[0], int):  # a number of each token: rows of one
            axis = graph.constant(f"{out}/axis", np.array([-1], np.int64))
            before = [helper.make_node("Unsqueeze", [angles, axis], [f"{out}/rows"])]
            behind = [helper.make_node("Squeeze", [f"{out}/row", axis], [out])]
            angles = f"{out}/rows"
            out = f"{out}/row"
            shape = (*shape, 1)
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
        node.input[0] = padded[angles]
        node.output[0] = f"{out}/padded"
        cut = [f"{angles}/first", f"{angles}/size", f"{angles}/axis"]
        slice = helper.make_node("Slice", [node.output[0], *cut], [out])
        graph.replace(node, *before, *pad, node, slice, *behind)
    return graph.finish() if padded else model
