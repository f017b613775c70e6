"""Products with quantised weights, as OpenVINO's compressed weights.

In: a model whose products read full weights, as inputs (passes.py); out: one that reads quantised weights. OpenVINO
recognises a product whose weight is (integers - zero point) * scales, and keeps the integers in memory; the zero point
must have their type. With int8 activations (the plugin's dynamic quantisation) such a product is fast, and exact but
for the rounding of activations, so these are cut into two int8 parts, as in ONNX Runtime's backend. The parts of one
row are two rows, which matters: OpenVINO has a special kernel for a single row, with other bits. Products also read
MXFP4, as a pair of types; activations are not cut there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.artifacts.quantized import data_name
from lockstep.backends.openvino.library import openvino, replace, tensor_on

if TYPE_CHECKING:
    from lockstep.backends.openvino.passes import Weight

_opset = openvino.opset13


def compress(model: Any, weights: list[Weight]) -> None:
    """Replace the full weights by integers and scales, inputs with the slots' names."""
    inputs = {parameter.output(0).get_any_name(): parameter for parameter in model.get_parameters()}
    for weight in weights:
        full = inputs[weight.full]
        groups = weight.columns // weight.group_size
        scale_kind = openvino.Type.f32
        if weight.is_mxfp4:
            kind = openvino.Type.f4e2m1
            scale_kind = openvino.Type.f8e8m0
        elif weight.bits == 4:
            kind = openvino.Type.u4
        else:
            kind = openvino.Type.u8
        data = _input(str(weight.data.name), kind, [weight.rows, groups, weight.group_size])
        scales = _input(str(weight.scales.name), scale_kind, [weight.rows, groups, 1])
        # OpenVINO recognizes this subgraph (convert, subtract, multiply, reshape), and keeps the weight compressed.
        if weight.is_mxfp4:
            number = _to_float(data)
            factor = _to_float(scales)
        else:
            middle = np.array([1 << weight.bits - 1], np.uint8)
            zero = openvino.op.Constant(tensor_on(middle, [1, 1, 1], kind), False)
            number = _opset.subtract(_to_float(data), _to_float(zero))
            factor = _with_output_factor(scales, full)
        shape = np.array([weight.rows, weight.columns], np.int64)
        dequantized = _opset.reshape(_opset.multiply(number, factor), shape, False)
        model.add_parameters([data, scales])
        replace(full.output(0), dequantized.output(0))
        model.remove_parameter(full)


def _with_output_factor(scales: Any, weight: Any) -> Any:
    """Return the scales with the constant by which outputs of the weight's product are multiplied or divided.

    OpenVINO would multiply the whole weight by it, also where a bias is added first: the weight would become float32,
    and activations stay unrounded.
    """
    product = _only_reader(weight)
    if product is None or product.get_type_name() != "MatMul":
        return scales
    num_outputs = scales.shape[0]
    biased = product
    scaling = _only_reader(product)
    biases = []
    if scaling is not None and scaling.get_type_name() == "Add":
        biases = [port for port in scaling.inputs() if list(port.get_partial_shape()) == [num_outputs]]
        biased = scaling
        scaling = _only_reader(biased)
        if not biases:  # the sum with another tensor
            return scales
    if scaling is None or scaling.get_type_name() not in ("Multiply", "Divide"):
        return scales
    operands = {node.get_type_name(): node for node in (value.get_node() for value in scaling.input_values())}
    constant = operands.get("Constant")
    is_divisor = scaling.input_value(1).get_node().get_type_name() == "Constant"
    if constant is None or (scaling.get_type_name() == "Divide" and not is_divisor):
        return scales
    factors = constant.data.reshape(-1)  # one, or one for each output
    if constant.data.shape not in ((), (1,), (1, 1), (num_outputs,), (1, num_outputs)):
        return scales
    combine = {"Multiply": _opset.multiply, "Divide": _opset.divide}[scaling.get_type_name()]
    replace(scaling.output(0), biased.output(0))
    for port in biases:
        port.replace_source_output(combine(port.get_source_output(), factors).output(0))
    return combine(scales, factors[:, None, None])


def _only_reader(node: Any) -> Any:
    """Return the node that reads a node's output; None if several do."""
    readers = [target.get_node() for target in node.output(0).get_target_inputs()]
    if len(readers) != 1:
        return None
    return readers[0]


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
