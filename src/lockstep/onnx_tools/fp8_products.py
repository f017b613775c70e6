"""Products of e4m3 numbers (float8_e4m3fn), in standard operators.

A row of activations is rounded to e4m3: its step is its largest magnitude over 448, the largest number of e4m3, to
nearest, ties to even. It is multiplied with a weight of e4m3 in float32, which holds each product exactly, and the sums
are multiplied with the row's step and with the weight's scale.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from lockstep.onnx_tools.rewriter import Emitter, Rewriter

LARGEST = 448.0
TINY = 1e-30  # the step of a row of zeros
_CHAIN = ["Mul", "Mul", "Gemm", "Cast", "Cast", "Div"]  # from a product's result back to the rounding of its rows


def rounding(graph: Rewriter, activation: str) -> list[onnx.NodeProto]:
    """Return nodes that round an activation [rows, columns]; `product` derives the names of their results from it."""
    prefix = f"{activation}/fp8"
    emit = Emitter(graph, prefix)
    largest = emit("ReduceMax", emit("Abs", activation), [-1], keepdims=1)
    step = emit("Max", emit("Div", largest, np.float32(LARGEST)), np.float32(TINY), result=f"{prefix}/step")
    codes = emit("Cast", emit("Div", activation, step), to=TensorProto.FLOAT8E4M3FN)
    emit("Cast", codes, to=TensorProto.FLOAT, result=f"{prefix}/rounded")
    return emit.nodes


def product(emit: Emitter, activation: str, data: str, scales: str, out: str, name: str) -> None:
    """Emit the product with a weight of an activation that `rounding` rounds."""
    prefix = f"{activation}/fp8"
    weight = emit("Cast", data, to=TensorProto.FLOAT)
    sums = emit("Gemm", f"{prefix}/rounded", weight, name=name, transB=1)
    emit("Mul", emit("Mul", sums, f"{prefix}/step"), scales, result=out)


def product_of(graph: Rewriter, node: onnx.NodeProto) -> tuple[str, str, str] | None:
    """Return (activation, data, scales) of a product by its last node; None for another node."""
    chain = [node]
    while len(chain) < len(_CHAIN):
        before = graph.producers.get(chain[-1].input[0])
        if before is None:
            return None
        chain.append(before)
    if [link.op_type for link in chain] != _CHAIN:
        return None
    weight = graph.producers.get(chain[2].input[1])
    if weight is None or weight.op_type != "Cast" or weight.input[0] not in graph.inputs:
        return None
    if graph.element(weight.input[0]) != TensorProto.FLOAT8E4M3FN:
        return None
    return chain[-1].input[0], weight.input[0], node.input[1]
