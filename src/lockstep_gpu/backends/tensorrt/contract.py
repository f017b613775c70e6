"""Check that an engine has its graph's inputs and outputs: names, dtypes, shapes, sizes of profiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx

from lockstep.backends.profiles import Profile
from lockstep.errors import CheckError
from lockstep.onnx_tools.signature import dtype_name
from lockstep.onnx_tools.types import typed_values
from lockstep_gpu.tensor import Tensor


def check_contract(tensors: Sequence[Tensor], model: onnx.ModelProto, profiles: Sequence[Profile], where: str) -> None:
    """Raise CheckError for the first input or output whose name, dtype, shape or sizes are not the graph's."""
    engine_inputs = {tensor.name: tensor for tensor in tensors if tensor.is_input}
    engine_outputs = {tensor.name: tensor for tensor in tensors if not tensor.is_input}
    _check_names("inputs", model.graph.input, engine_inputs, where)
    _check_names("outputs", model.graph.output, engine_outputs, where)
    # Where the first profile has one size, TensorRT gives that size for the dynamic dimensions of outputs, which cannot
    # be checked then.
    one_size = bool(profiles) and any(smallest == largest for smallest, _, largest in profiles[0].values())
    pairs = [(value, engine_inputs[value.name]) for value in model.graph.input]
    pairs += [(value, engine_outputs[value.name]) for value in model.graph.output]
    for value, tensor in pairs:
        tensor_type = value.type.tensor_type
        dtype = dtype_name(tensor_type.elem_type)
        shape = [dim.dim_value for dim in tensor_type.shape.dim]
        engine_shape = list(tensor.shape)
        has_rank = len(engine_shape) == len(shape)
        for axis, dim in enumerate(tensor_type.shape.dim):
            if dim.dim_param:
                shape[axis] = -1
                if one_size and not tensor.is_input and has_rank:
                    engine_shape[axis] = -1
        if (tensor.dtype.name, engine_shape) != (dtype, shape):
            side = "input" if tensor.is_input else "output"
            raise CheckError(
                f"{where}: {side} {tensor.name}: expected {dtype} {shape} as in the assembly, "
                f"found {tensor.dtype.name} {list(tensor.shape)}"
            )
        if tensor.is_input:
            _check_profiles(tensor, [profile.get(tensor.name, (shape, shape, shape)) for profile in profiles], where)


def _check_names(what: str, declared: Iterable[onnx.ValueInfoProto], engine_tensors: Iterable[str], where: str) -> None:
    expected = sorted(value.name for value in declared)
    names = sorted(engine_tensors)
    if names != expected:
        raise CheckError(
            f"{where}: {what}: expected {', '.join(expected)} as in the assembly, found {', '.join(names)}"
        )


def _check_profiles(tensor: Tensor, expected: Sequence[tuple[Sequence[int], ...]], where: str) -> None:
    if len(tensor.profiles) != len(expected):
        raise CheckError(f"{where}: expected {len(expected)} optimization profiles, found {len(tensor.profiles)}")
    for number, (shapes, engine_shapes) in enumerate(zip(expected, tensor.profiles)):
        if tuple(map(tuple, shapes)) != tuple(map(tuple, engine_shapes)):
            raise CheckError(
                f"{where}: input {tensor.name}, profile {number}: expected {_bounds(shapes)}, "
                f"found {_bounds(engine_shapes)}"
            )


def _bounds(shapes: Sequence[Sequence[int]]) -> str:
    if len(shapes) != 3:
        return str(shapes)
    low, best, high = map(list, shapes)
    return f"{low} to {high}, tuned for {best}"


def tensor_types(model: onnx.ModelProto) -> Mapping[str, str]:
    """Return {tensor: dtype} of all tensors, constants too, that ONNX's shape inference knows."""
    return {name: dtype_name(element) for name, (element, _) in typed_values(model).items()}
