"""Products with quantised weights, as OpenVINO's compressed weights.

In: a graph with `MatMulNBits`, or products with decoded MXFP4; out: a model of OpenVINO. It knows a product whose
weight is integers, less their zero point, times scales, and keeps the integers as they are; the zero point has to be of
their type. With int8 activations such a product is fast and exact but for them (the plugin's dynamic quantisation), so
activations are cut in two int8 parts, as ONNX Runtime's backend does. Both parts of a row are two rows at least: one
alone has a kernel of its own, which gives other bits. MXFP4 is a pair of types that products read, too; activations
stay as they are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from lockstep.artifacts.quantized import data_name
from lockstep.backends.openvino.library import openvino, replace, tensor_on
from lockstep.errors import CheckError
from lockstep.onnx_tools.dequantized import IntegerWeight, embedding_of
from lockstep.onnx_tools.int8_products import int8_products
from lockstep.onnx_tools.rewriter import Rewriter, attributes_of

_opset = openvino.opset13


@dataclass(frozen=True)
class Weight(IntegerWeight):
    """full: the input that stands for the weight until `compress`. is_mxfp4: it is codes and shared exponents."""

    full: str
    is_mxfp4: bool = False


def expand(model: onnx.ModelProto, where: str) -> tuple[onnx.ModelProto, list[Weight]]:
    """Let products and embeddings read full weights, as inputs; return the quantised ones, too.

    Raises CheckError for others.
    """
    graph = Rewriter(int8_products(model))
    weights = list[Weight]()
    for node in graph.nodes:
        if (embedding := embedding_of(graph, node)) is not None:
            full = graph.input(f"{embedding.data}/full", TensorProto.FLOAT, [embedding.rows, embedding.columns])
            weights.append(Weight(**vars(embedding), full=full))
            graph.replace(node, helper.make_node("Gather", [full, node.input[1]], node.output, axis=0))
        if node.op_type == "If":
            weights.append(weight := _decoded(graph, node))
            graph.input(weight.full, TensorProto.FLOAT, [weight.rows, weight.columns])
            rows = next(inner.input[0] for inner in _branch(node) if inner.op_type == "Gemm")
            graph.replace(node, helper.make_node("Gemm", [rows, weight.full], node.output, transB=1))
        if node.op_type != "MatMulNBits":
            continue
        size, (x, data, scales, *more) = attributes_of(node), node.input
        if more or not {data, scales} <= graph.inputs.keys():
            raise CheckError(
                f"{where}: {node.name or 'MatMulNBits'}: expected integers and scales that are inputs, and no zero "
                f"points, found {', '.join(node.input)}; export again"
            )
        full = graph.input(f"{data}/full", TensorProto.FLOAT, [size["N"], size["K"]])
        weights.append(Weight(data, scales, size["N"], size["K"], size["block_size"], size["bits"], full))
        graph.replace(node, helper.make_node("Gemm", [x, full], node.output, transB=1))
    return graph.finish(), weights


def _branch(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    return list(attributes_of(node)["then_branch"].node)


def _decoded(graph: Rewriter, node: onnx.NodeProto) -> Weight:
    """Return the weight that a product of `group_experts` decodes, from codes [rows, num_groups, 16]."""
    inputs = [name for inner in _branch(node) for name in inner.input if name in graph.inputs]
    data, scales = sorted(inputs, key=lambda name: -len(graph.shape(name)))
    rows, groups, size = graph.shape(data)
    return Weight(data, scales, rows, groups * size * 2, size * 2, 4, f"{data}/full", is_mxfp4=True)


def compress(model: Any, weights: list[Weight]) -> None:
    """Put integers and scales, inputs of the slots' names, in the place of the full weights."""
    inputs = {parameter.output(0).get_any_name(): parameter for parameter in model.get_parameters()}
    for weight in weights:
        full = inputs[weight.full]
        groups = weight.columns // weight.group_size
        kind = openvino.Type.u4 if weight.bits == 4 else openvino.Type.u8
        scale_kind = openvino.Type.f32
        if weight.is_mxfp4:
            kind = openvino.Type.f4e2m1
            scale_kind = openvino.Type.f8e8m0
        data = _input(weight.data, kind, [weight.rows, groups, weight.group_size])
        scales = _input(weight.scales, scale_kind, [weight.rows, groups, 1])
        if weight.is_mxfp4:
            number = _to_float(data)
            factor = _to_float(scales)
        else:
            middle = np.array([128 if weight.bits == 8 else 8], np.uint8)
            zero = openvino.op.Constant(tensor_on(middle, [1, 1, 1], kind), False)
            number = _opset.subtract(_to_float(data), _to_float(zero))
            factor = scales
        shape = np.array([weight.rows, weight.columns], np.int64)
        dequantized = _opset.reshape(_opset.multiply(number, factor), shape, False)
        model.add_parameters([data, scales])
        replace(full.output(0), dequantized.output(0))
        model.remove_parameter(full)


def group_size(model: Any) -> int:
    """Return the group size of a model's weights; 0 where none is quantised."""
    sizes = {
        value.get_partial_shape()[2].get_length()
        for value in model.inputs
        if value.any_name.partition("[")[0].endswith(data_name(""))
        and value.element_type in (openvino.Type.u4, openvino.Type.u8)
    }
    return max(sizes, default=0)


def _input(name: str, kind: Any, shape: list[int]) -> Any:
    parameter = openvino.op.Parameter(kind, openvino.PartialShape(shape))
    parameter.output(0).set_names({name})
    return parameter


def _to_float(value: Any) -> Any:
    return _opset.convert(value, openvino.Type.f32)
