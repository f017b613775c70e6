"""Compute operators without bfloat16 in ONNX in float32, between casts.

Opset 20 has no bfloat16 for TopK, Sin, Cos, Einsum, Round, Softplus, OneHot, Conv and others; opset 22, which has, is
not supported by all backends. A cast to float32 is exact, so moved or selected numbers stay the same; computed ones are
rounded once, as PyTorch does on a CPU.

In: a traced graph with the types of its values. Out: the same graph, valid by ONNX's schemas.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir

from lockstep.onnx_tools.toolkit import node_of


def widen_unsupported(model: ir.Model) -> None:
    """Put casts around each operator that reads or returns bfloat16 where its schema does not allow it."""
    graph = model.graph
    opset = model.graph.opset_imports[""]
    for node in list(graph):
        if node.domain:
            continue
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        for position, value in enumerate(node.inputs):
            if value is not None and _is_unsupported(value, schema.inputs, position):
                cast = _cast(value, ir.DataType.FLOAT)
                graph.insert_before(node, cast)
                node.replace_input_with(position, cast.outputs[0])
        for position, value in enumerate(node.outputs):
            if _is_unsupported(value, schema.outputs, position):
                cast = _cast(value, ir.DataType.BFLOAT16)
                value.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=True)
                # The cast's result takes the name, which may be that of an output of the graph.
                cast.outputs[0].name = value.name
                value.name = f"{value.name}_float32"
                value.type = ir.TensorType(ir.DataType.FLOAT)
                cast.replace_input_with(0, value)
                graph.insert_after(node, cast)


def _cast(value: ir.Value, dtype: ir.DataType) -> ir.Node:
    return node_of("Cast", [value], value.shape, dtype, [ir.AttrInt64("to", dtype)])


def _is_unsupported(value: ir.Value, parameters: Sequence[onnx.defs.OpSchema.FormalParameter], position: int) -> bool:
    """Return whether a value is bfloat16 and the schema does not allow it; the last parameter may be variadic."""
    parameter = parameters[min(position, len(parameters) - 1)]
    return value.dtype == ir.DataType.BFLOAT16 and "tensor(bfloat16)" not in parameter.types
