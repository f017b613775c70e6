"""Products of e4m3 numbers (float8_e4m3fn), in standard operators.

A row of activations is rounded to e4m3: its step is its largest magnitude over 448, the largest number of e4m3, to
nearest, ties to even. It is multiplied with a weight of e4m3 in float32, which holds each product exactly, and the sums
are multiplied with the row's step and with the weight's scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from lockstep.onnx_tools.toolkit import GraphWriter
from lockstep.onnx_tools.values import maker, required

LARGEST = 448.0
TINY = 1e-30  # the step of a row of zeros
_CHAIN = ("Mul", "Gemm", "Cast", "Cast", "Div")  # from the scaled sums of a product back to the rounding of its rows


class Rounded(NamedTuple):
    """An activation [rows, columns] in e4m3 numbers: values in float32, which are to be multiplied with `step`."""

    values: ir.Value
    step: ir.Value


def rounded(graph: ir.Graph, before: ir.Node, activation: ir.Value) -> Rounded:
    prefix = f"{activation.name}/fp8"
    writer = GraphWriter(graph, prefix, before)
    largest = writer.op("ReduceMax", writer.op("Abs", activation), [-1], keepdims=1)
    step = writer.op("Div", largest, np.float32(LARGEST))
    step = writer.op("Max", step, np.float32(TINY), result=f"{prefix}/step")
    codes = writer.op("Cast", writer.op("Div", activation, step), to=ir.DataType.FLOAT8E4M3FN)
    return Rounded(writer.op("Cast", codes, to=ir.DataType.FLOAT, result=f"{prefix}/rounded"), step)


def product(
    writer: GraphWriter, rows: Rounded, data: ir.Value, scales: ir.Value, name: str | None, **settings: Any
) -> ir.Value:
    """Write the product of rounded rows with a weight. name: of its Gemm. settings: of the result, as of `op`."""
    weight = writer.op("Cast", data, to=ir.DataType.FLOAT)
    sums = writer.op("Gemm", rows.values, weight, name=name, transB=1)
    return writer.op("Mul", writer.op("Mul", sums, rows.step), scales, **settings)


def product_of(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """Return (activation, data, scales) of a product by its last node; None for another node."""
    if node.op_type != "Mul":
        return None
    # Up from the scaled sums; the weight is read where the walk passes the Gemm.
    data = None
    activation = node.inputs[0]
    for operator in _CHAIN:
        link = maker(activation, operator)
        if link is None:
            return None
        if operator == "Gemm" and (weight := maker(link.inputs[1], "Cast")) is not None:
            data = weight.inputs[0]
        activation = link.inputs[0]
    if data is None or not data.is_graph_input() or data.dtype != ir.DataType.FLOAT8E4M3FN:
        return None
    return required(activation), data, required(node.inputs[1])
