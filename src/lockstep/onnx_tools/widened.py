"""Compute a 16-bit graph in fp32.

ONNX Runtime has no bf16 on a CPU, and a fp16 graph in fp32 shows what exceeds fp16. Such a run checks the graph (its
operators, their order and bindings), not the rounding of bf16.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, numpy_helper

from lockstep.onnx_tools.toolkit import Pass, PassResult, infer_types, run_passes
from lockstep.onnx_tools.values import required


def widened(model: onnx.ModelProto, narrow: int = TensorProto.BFLOAT16) -> onnx.ModelProto:
    """Return the same graph with float32 wherever it has the type `narrow`; `model` itself where it has none."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    changes = _widen_graph(wide.graph, narrow)
    for function in wide.functions:  # the token mixers of an uncut graph
        changes += sum(_widen_node(node, narrow) for node in function.node)
    return wide if changes else model


def in_float32(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a graph with float32 for float16 and bfloat16, and without the casts that are none then."""
    return run_passes(widened(widened(model, TensorProto.FLOAT16)), DropCasts())


class DropCasts(Pass):
    """Drop casts of float32 values to float32."""

    def call(self, model: ir.Model) -> PassResult:
        infer_types(model)
        is_changed = False
        for node in model.graph:
            out = node.outputs[0]
            if node.op_type != "Cast" or out.is_graph_output():
                continue
            source = required(node.inputs[0])
            if source.dtype == out.dtype == ir.DataType.FLOAT:
                out.replace_all_uses_with(source)
                is_changed = True
        return PassResult(model, is_changed)


def widened_dtype(dtype: str) -> str:
    return "float32" if dtype == "bfloat16" else dtype


def _widen_graph(graph: onnx.GraphProto, narrow: int) -> int:
    changes = sum(_widen_tensor(tensor, narrow) for tensor in graph.initializer)
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == narrow:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
            changes += 1
    return changes + sum(_widen_node(node, narrow) for node in graph.node)


def _widen_node(node: onnx.NodeProto, narrow: int) -> int:
    changes = 0
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.TENSOR:
            changes += _widen_tensor(attribute.t, narrow)
        elif attribute.type == onnx.AttributeProto.GRAPH:
            changes += _widen_graph(attribute.g, narrow)
        elif attribute.name in ("to", "dtype") and attribute.i == narrow:  # of Cast, RandomNormal etc.
            attribute.i = TensorProto.FLOAT
            changes += 1
    return changes


def _widen_tensor(tensor: onnx.TensorProto, narrow: int) -> int:
    if tensor.data_type != narrow:
        return 0
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    return 1
