"""Engines whose weights are inputs as `lockstep compare` runs them: called as the runtime calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from lockstep.artifacts.adapters import IDS, mask_rank, rows_of
from lockstep.backends.tensorrt.compat import TENSORRT, Library
from lockstep.backends.tensorrt.program import TensorRTProgram
from lockstep.errors import CheckError
from lockstep.gpu import cuda
from lockstep.onnx_tools.adapter_mask import mask_of
from lockstep.onnx_tools.dequantized import sign_of

Arrays = Mapping[str, np.ndarray]


def open_engine(file: Path, weights: Arrays, library: Library = TENSORRT) -> Callable[[int, Arrays], Arrays]:
    """Return what runs the engine on one of its optimization profiles: see `verify.compare.pair`.

    Where TensorRT made an input of another type, as 8.6 makes int32 of int64, values are cast.
    """
    program = TensorRTProgram(library, file, ())
    placed = _upload(program, {slot: array for slot, array in weights.items() if not rows_of(slot)})
    with_rows = {slot: array for slot, array in weights.items() if rows_of(slot)}

    def run(profile: int, feed: Arrays) -> Arrays:
        try:
            given = _upload(program, _host_inputs(program, with_rows, feed))
            return _enqueue(program, profile, {**given, **placed})
        except CheckError as error:
            raise CheckError(f"{file}: {error}") from None

    return run


def _host_inputs(program: TensorRTProgram, with_rows: Arrays, feed: Arrays) -> Arrays:
    """Return what the engine reads: adapters' A are rows of the weights `with_rows` in it, and their ids a mask."""
    given = dict(feed)
    for slot, array in with_rows.items():
        given[slot] = np.concatenate([array, *(given.pop(name).T for name in rows_of(slot))])
    for name, tensor in program.tensors.items():
        if rank := mask_rank(name):
            given[name] = mask_of(given.pop(IDS), tensor.shape[1], rank, tensor.dtype)
    return given


def _enqueue(program: TensorRTProgram, profile: int, given: Mapping[str, cuda.Array]) -> Arrays:
    library = program.library
    # A context of its own for these shapes, as a step has: with the kernels that are compiled for them.
    held = program.new_context(profile, True)
    context, stream = held.native, program.device.stream
    for name in given:
        if name in program.dynamic:
            library.set_input_shape(context, name, given[name].shape)
    outputs = [tensor for tensor in program.tensors.values() if not tensor.is_input]
    made = {tensor.name: cuda.empty(library.shape(context, tensor.name), tensor.dtype) for tensor in outputs}
    found = {name: np.empty(array.shape, array.dtype) for name, array in made.items()}
    for name, array in {**given, **made}.items():
        library.set_tensor_address(context, name, array.address)
    library.enqueue(context, stream.handle)
    for name, array in made.items():
        stream.download(found[name], array)
    stream.synchronize()
    del held  # whose memory had to live until here
    return found


def _upload(program: TensorRTProgram, arrays: Mapping[str, np.ndarray]) -> dict[str, cuda.Array]:
    """Return copies on the device, of the engine's dtypes; integers of quantised weights with their sign."""
    found, stream = {}, program.device.stream
    for name, array in arrays.items():
        dtype = program.tensors[name].dtype
        if sign := sign_of(dtype.name, array.dtype.name):
            host = np.ascontiguousarray(array) ^ np.uint8(sign)
        else:
            host = np.ascontiguousarray(array, dtype)
        found[name] = cuda.empty(host.shape, host.dtype)
        stream.upload(found[name], host)
    stream.synchronize()
    return found
