"""The inputs, outputs and slots of an ONNX graph, in the assembly's form."""

from __future__ import annotations

from collections.abc import Collection

import onnx

from lockstep.artifacts.dtypes import onnx_dtype
from lockstep.artifacts.signature import IO, Signature

ACTIVATIONS = "activations"  # the key under which a quantised graph names their type in engines of 16 bits


def declared_activations(model: onnx.ModelProto) -> str | None:
    """Return the type of activations that a quantised graph asks for; None: the backend's."""
    return next((entry.value for entry in model.metadata_props if entry.key == ACTIVATIONS), None)


def signature_of(graph: onnx.GraphProto, slots: Collection[str] = ()) -> Signature:
    """Return the graph's inputs other than constants, its outputs, and the inputs that `slots` names."""
    constants = {tensor.name for tensor in graph.initializer}  # which may be listed as inputs too
    inputs = [io_of(value) for value in graph.input if value.name not in constants]
    return Signature(
        inputs=tuple(io for io in inputs if io.name not in slots),
        outputs=tuple(map(io_of, graph.output)),
        slots=tuple(io for io in inputs if io.name in slots),
    )


def io_of(value: onnx.ValueInfoProto) -> IO:
    """Return an input or output, with the names of its dynamic dimensions."""
    tensor = value.type.tensor_type
    shape = list[int | str]()
    for dim in tensor.shape.dim:
        shape.append(dim.dim_param if dim.HasField("dim_param") else dim.dim_value)
    return IO(value.name, dtype_name(tensor.elem_type), tuple(shape))


def dtype_name(element: int) -> str:
    """Return an ONNX element type by its NumPy name; older ONNX packages say float32 for bfloat16."""
    return onnx_dtype(onnx.TensorProto.DataType.Name(element))
