"""A Polygraphy runner for engines on a GPU, called as the runtime calls them.

Polygraphy's own runner is for TensorRT alone. Needs tensorrt-rtx, cuda-python, polygraphy and a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata

from lockstep.artifacts.signature import IO
from lockstep.backends.tensorrt.program import TensorRTProgram
from lockstep.backends.tensorrt_rtx.backend import TensorRTRTXBackend
from lockstep.gpu import cuda
from lockstep.onnx_tools.comparator import metadata
from lockstep.onnx_tools.dequantized import sign_of


def open_engine(
    file: Path, inputs: Sequence[IO], weights: Mapping[str, np.ndarray], threads: int | None
) -> Callable[[int], EngineRunner]:
    """Return a function that makes the engine's runner for a profile. Raises InputError without a GPU for it."""
    backend = TensorRTRTXBackend()
    backend.require_gpu()
    program = TensorRTProgram(backend.library, file, ())
    placed = _upload(program, weights)
    return lambda profile: EngineRunner("engine", inputs, program, placed, profile)


class EngineRunner(BaseRunner):
    """Runner of an engine on one of its optimization profiles; weights are on the device."""

    def __init__(
        self, name: str, inputs: Sequence[IO], program: TensorRTProgram, weights: Mapping[str, cuda.Array], profile: int
    ):
        super().__init__(name=name)
        self._declared, self._program, self._weights, self._profile = inputs, program, weights, profile

    def get_input_metadata_impl(self) -> TensorMetadata:
        return metadata(self._declared)

    def infer_impl(self, feed_dict: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        program, library = self._program, self._program.library
        # A context of its own for these shapes, as a step has: with the kernels that are compiled for them.
        held = program.new_context(self._profile, True)
        context = held.native
        given = _upload(program, feed_dict)
        for name, array in given.items():
            library.set_input_shape(context, name, array.shape)
        given |= self._weights
        outputs = [tensor for tensor in program.tensors.values() if not tensor.is_input]
        made = {tensor.name: cuda.empty(library.shape(context, tensor.name), tensor.dtype) for tensor in outputs}
        found = {name: np.empty(array.shape, array.dtype) for name, array in made.items()}
        for name, array in {**given, **made}.items():
            library.set_tensor_address(context, name, array.address)
        start = time.perf_counter()
        library.enqueue(context, program.device.stream.handle)
        for name, array in made.items():
            program.device.stream.download(found[name], array)
        program.device.stream.synchronize()
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
