"""A Polygraphy runner for engines whose weights are inputs, called as the runtime calls them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata

from lockstep.artifacts.adapters import IDS, mask_rank, rows_of
from lockstep.artifacts.signature import IO
from lockstep.backends.tensorrt.compat import TENSORRT, Library
from lockstep.backends.tensorrt.program import TensorRTProgram
from lockstep.errors import CheckError
from lockstep.gpu import cuda
from lockstep.onnx_tools.adapter_mask import mask_of
from lockstep.onnx_tools.comparator import metadata
from lockstep.onnx_tools.dequantized import sign_of


def open_engine(
    file: Path,
    inputs: Sequence[IO],
    weights: Mapping[str, np.ndarray],
    threads: int | None,
    library: Library = TENSORRT,
) -> Callable[[int], BaseRunner]:
    """Return a function that makes the engine's runner for a profile: see `lockstep.verify.compare.run`."""
    program = TensorRTProgram(library, file, ())
    placed = _upload(program, {slot: array for slot, array in weights.items() if not rows_of(slot)})
    with_rows = {slot: array for slot, array in weights.items() if rows_of(slot)}
    return lambda profile: EngineRunner(inputs, program, placed, with_rows, profile)


class EngineRunner(BaseRunner):
    """Runner of an engine on one of its optimization profiles.

    weights: on the device. with_rows: those that have rows for adapters. `inputs` are the graph's: where TensorRT made
    an input of another type, as 8.6 makes int32 of int64, values are cast.
    """

    def __init__(
        self,
        inputs: Sequence[IO],
        program: TensorRTProgram,
        weights: Mapping[str, cuda.Array],
        with_rows: Mapping[str, np.ndarray],
        profile: int,
    ):
        super().__init__(name="engine")
        self._declared, self._program, self._profile = inputs, program, profile
        self._weights, self._with_rows = weights, with_rows

    def get_input_metadata_impl(self) -> TensorMetadata:
        return metadata(self._declared)

    def infer_impl(self, feed_dict: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        try:
            return self._infer(_upload(self._program, self._host_inputs(feed_dict)))
        except CheckError as error:
            raise CheckError(f"{self._program.path}: {error}") from None

    def _host_inputs(self, feed_dict: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return what the engine reads: adapters' A are rows of weights in it, and their ids a mask."""
        given = dict(feed_dict)
        for slot, array in self._with_rows.items():
            given[slot] = np.concatenate([array, *(given.pop(name).T for name in rows_of(slot))])
        for name, tensor in self._program.tensors.items():
            if rank := mask_rank(name):
                given[name] = mask_of(given.pop(IDS), tensor.shape[1], rank, tensor.dtype)
        return given

    def _infer(self, given: dict[str, cuda.Array]) -> dict[str, np.ndarray]:
        program, library = self._program, self._program.library
        # A context of its own for these shapes, as a step has: with the kernels that are compiled for them.
        held = program.new_context(self._profile, True)
        context, stream = held.native, program.device.stream
        for name in given:
            if name in program.dynamic:
                library.set_input_shape(context, name, given[name].shape)
        outputs = [tensor for tensor in program.tensors.values() if not tensor.is_input]
        made = {tensor.name: cuda.empty(library.shape(context, tensor.name), tensor.dtype) for tensor in outputs}
        found = {name: np.empty(array.shape, array.dtype) for name, array in made.items()}
        for name, array in {**given, **self._weights, **made}.items():
            library.set_tensor_address(context, name, array.address)
        start = time.perf_counter()
        library.enqueue(context, stream.handle)
        for name, array in made.items():
            stream.download(found[name], array)
        stream.synchronize()
        del held  # whose memory had to live until here
        self.inference_time = time.perf_counter() - start  # Polygraphy accumulates them
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
