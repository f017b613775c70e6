"""Products of e4m3 numbers (float8_e4m3fn), in a graph's own operators.

A row of activations is rounded to e4m3: its step is its largest magnitude over 448, the largest number of e4m3, to
nearest, ties to even. It is multiplied with a weight of e4m3 in float32, which holds each product exactly, and the sums
are multiplied with the row's step and with the weight's scale.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from lockstep.onnx_tools.rewriter import Rewriter

LARGEST = 448.0
TINY = 1e-30  # the step of a row of zeros
_CHAIN = ("Mul", "Mul", "Gemm", "Cast", "Cast", "Div")  # from what a product gives back to what rounds its rows


def rounding(graph: Rewriter, activation: str) -> list[onnx.NodeProto]:
    """Return what rounds an activation [rows, columns]; `product` takes it from there."""
    largest = graph.constant("fp8/largest", np.array(LARGEST, np.float32))
    tiny = graph.constant("fp8/tiny", np.array(TINY, np.float32))
    last = graph.constant("fp8/last_axis", np.array([-1], np.int64))
    stem = f"{activation}/fp8"
    return [
        helper.make_node("Abs", [activation], [f"{stem}/magnitudes"]),
        helper.make_node("ReduceMax", [f"{stem}/magnitudes", last], [f"{stem}/largest"], keepdims=1),
        helper.make_node("Div", [f"{stem}/largest", largest], [f"{stem}/quotient"]),
        helper.make_node("Max", [f"{stem}/quotient", tiny], [f"{stem}/step"]),
        helper.make_node("Div", [activation, f"{stem}/step"], [f"{stem}/quotients"]),
        helper.make_node("Cast", [f"{stem}/quotients"], [f"{stem}/codes"], to=TensorProto.FLOAT8E4M3FN),
        helper.make_node("Cast", [f"{stem}/codes"], [f"{stem}/rounded"], to=TensorProto.FLOAT),
    ]


def product(activation: str, data: str, scales: str, out: str, name: str) -> list[onnx.NodeProto]:
    """Return the product of an activation that `rounding` rounds with a weight."""
    stem = f"{activation}/fp8"
    return [
        helper.make_node("Cast", [data], [f"{out}/weight"], f"{name}/weight", to=TensorProto.FLOAT),
        helper.make_node("Gemm", [f"{stem}/rounded", f"{out}/weight"], [f"{out}/sums"], name, transB=1),
        helper.make_node("Mul", [f"{out}/sums", f"{stem}/step"], [f"{out}/steps"], f"{name}/steps"),
        helper.make_node("Mul", [f"{out}/steps", scales], [out], f"{name}/scales"),
    ]


def product_of(graph: Rewriter, node: onnx.NodeProto) -> tuple[str, str, str] | None:
    """Return (activation, data, scales) of a product by its last node; None for another node."""
    chain = [node]
    while len(chain) < len(_CHAIN):
        before = graph.producers.get(chain[-1].input[0])
        if before is None:
            return None
        chain.append(before)
    weight = graph.producers.get(chain[2].input[1]) if [each.op_type for each in chain] == [*_CHAIN] else None
    if weight is None or weight.op_type != "Cast" or weight.input[0] not in graph.inputs:
        return None
    is_e4m3 = graph.element(weight.input[0]) == TensorProto.FLOAT8E4M3FN
    return (chain[-1].input[0], weight.input[0], node.input[1]) if is_e4m3 else None
