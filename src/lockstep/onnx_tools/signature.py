"""What an ONNX graph takes and gives, as the assembly writes it."""

from __future__ import annotations

from collections.abc import Collection

import onnx

from lockstep.artifacts.dtypes import onnx_dtype
from lockstep.artifacts.signature import IO, Signature


def signature_of(graph: onnx.GraphProto, slots: Collection[str] = ()) -> Signature:
    """Return the graph's inputs that are no constants, its outputs, and those inputs that `slots` names."""
    constants = {tensor.name for tensor in graph.initializer}
    given = [io_of(value) for value in graph.input if value.name not in constants]
    return Signature(
        inputs=tuple(io for io in given if io.name not in slots),
        outputs=tuple(map(io_of, graph.output)),
        slots=tuple(io for io in given if io.name in slots),
    )


def io_of(value: onnx.ValueInfoProto) -> IO:
    """Return an input or output; its dynamic dimensions by name."""
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_param if dim.HasField("dim_param") else dim.dim_value for dim in tensor.shape.dim)
    return IO(value.name, dtype_name(tensor.elem_type), shape)


def dtype_name(element: int) -> str:
    """Return an ONNX element type as NumPy calls it; older ONNX packages give float32 for bfloat16."""
    return onnx_dtype(onnx.TensorProto.DataType.Name(element))
