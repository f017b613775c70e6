"""Cosines, sines, logarithms and similar functions in whole SIMD vectors.

In: a graph; out: one that pads the rows of their inputs to whole SIMD registers. ONNX Runtime computes the elements
after the last whole vector of a Cos by another function, which differs in the last bit. Where a row of angles is no
multiple of a vector, the number of rows decides which elements these are: a request's keys would depend on the size of
the batch. So such rows are padded before the operator and cut after it. By measurement this concerns the operators of
`_OPERATORS`, not Exp, Sigmoid, Tanh, Erf, Sqrt, Reciprocal and Softmax.
"""

from __future__ import annotations

import onnx_ir as ir

from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult, infer_types
from lockstep.onnx_tools.values import shape_of

_OPERATORS = ("Cos", "Sin", "Log", "Softplus", "Mish", "Atan")
VECTOR = 4  # float32 numbers, as ONNX Runtime is compiled for x86-64 and AArch64, whatever the CPU has


class PadAngles(Pass):
    """Pad the inputs of these operators to whole vectors."""

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        nodes = [node for node in graph if node.op_type in _OPERATORS]
        if nodes:
            infer_types(model)
        padded: dict[ir.Value | None, ir.Value] = {}
        for node in nodes:
            (angles,) = node.inputs
            (out,) = node.outputs
            shape = [*shape_of(angles)]
            is_vector = len(shape) == 1 and not isinstance(shape[0], int)  # one number for each token: rows of one
            if is_vector:
                shape.append(1)
            if not shape or not isinstance(size := shape[-1], int) or size % VECTOR == 0:
                continue
            writer = GraphWriter(graph, f"{out.name}/vectors", before=node)
            if angles not in padded:  # a Cos and a Sin read the same angles
                rows = writer.op("Unsqueeze", angles, [-1]) if is_vector else angles
                padded[angles] = writer.op("Pad", rows, [*[0] * (2 * len(shape) - 1), -size % VECTOR])
            result = writer.copy(node, padded[angles])
            if is_vector:
                writer.op("Squeeze", writer.op("Slice", result, [0], [size], [-1]), [-1], replaces=out)
            else:
                writer.op("Slice", result, [0], [size], [-1], replaces=out)
        return PassResult(model, bool(padded))
