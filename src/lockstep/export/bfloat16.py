"""Operators that have no bfloat16 in ONNX compute in float32, on numbers that are cast.

Opset 20 has none for TopK, Sin, Cos, Einsum, Round, Softplus, OneHot, Conv and others; opset 22, which has, is not in
all backends. A cast to float32 is exact, so what is chosen or moved stays the same number; what is computed is rounded
once, as PyTorch does on a CPU.

In: a traced graph with the types of its values. Out: the same graph, whose operators take what ONNX's schemas allow.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir

from lockstep.export.known import node_of

_TYPE = "tensor(bfloat16)"


def widen_unsupported(model: ir.Model) -> None:
    """Put casts around each operator whose schema has no bfloat16 where it reads or gives some."""
    graph = model.graph
    opset = model.graph.opset_imports[""]
    for node in list(graph):
        if node.domain:
            continue
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        for place, value in enumerate(node.inputs):
            if value is not None and _is_refused(value, schema.inputs, place):
                cast = _cast(value, ir.DataType.FLOAT)
                graph.insert_before(node, cast)
                node.replace_input_with(place, cast.outputs[0])
        for place, value in enumerate(node.outputs):
            if _is_refused(value, schema.outputs, place):
                cast = _cast(value, ir.DataType.BFLOAT16)
                value.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=True)
                cast.outputs[0].name = value.name
                value.name = f"{value.name}_float32"
                value.type = ir.TensorType(ir.DataType.FLOAT)
                cast.replace_input_with(0, value)
                graph.insert_after(node, cast)


def _cast(value: ir.Value, dtype: ir.DataType) -> ir.Node:
    return node_of("Cast", [value], value.shape, dtype, [ir.AttrInt64("to", dtype)])


def _is_refused(value: ir.Value, formal: Sequence[onnx.defs.OpSchema.FormalParameter], place: int) -> bool:
    """Return whether a value is bfloat16 where a schema's parameter, of which the last may be many, has none."""
    return value.dtype == ir.DataType.BFLOAT16 and _TYPE not in formal[min(place, len(formal) - 1)].types
