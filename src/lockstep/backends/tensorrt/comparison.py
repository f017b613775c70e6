"""Polygraphy's TensorRT runner for engines whose weights are inputs.

Needs tensorrt, cuda-python, polygraphy and a GPU. Polygraphy calls CUDA through the shared library `libcudart.so*`,
which it looks for in LD_LIBRARY_PATH, /usr/local/cuda/lib64 and nvidia-cuda-runtime wheels. cuda-python brings the same
runtime along, and all else here uses that one: Polygraphy is given it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import runtime
from polygraphy.backend.base import BaseRunner
from polygraphy.backend.trt import TrtRunner
from polygraphy.common import TensorMetadata
from polygraphy.cuda import cuda as polygraphy_cuda
from polygraphy.exception import PolygraphyException

from lockstep.artifacts.adapters import IDS, mask_rank, rows_of
from lockstep.artifacts.signature import IO
from lockstep.backends.tensorrt.compat import TENSORRT
from lockstep.errors import CheckError
from lockstep.gpu.cuda import check
from lockstep.onnx_tools.adapter_mask import mask_of
from lockstep.onnx_tools.comparator import metadata, one_line


def open_engine(
    file: Path, inputs: Sequence[IO], weights: Mapping[str, np.ndarray], threads: int | None
) -> Callable[[int], BaseRunner]:
    """Return a function that makes the engine's runner for a profile: see `lockstep.verify.compare.run`."""
    engine = TENSORRT.deserialize(file.read_bytes(), str(file))
    return lambda profile: EngineRunner("engine", str(file), inputs, engine, weights, profile)


class CudaPython:
    """The calls of `polygraphy.cuda.Cuda`, made through cuda-python."""

    def create_stream(self) -> int:
        return int(check(runtime.cudaStreamCreate()))

    def stream_synchronize(self, ptr: int) -> None:
        check(runtime.cudaStreamSynchronize(ptr))

    def destroy_stream(self, ptr: int) -> None:
        check(runtime.cudaStreamDestroy(ptr))

    def malloc(self, nbytes: int) -> int:
        return int(check(runtime.cudaMalloc(nbytes)))

    def free(self, ptr: int) -> None:
        check(runtime.cudaFree(ptr))

    def memcpy(self, dst: int, src: int, nbytes: int, kind: Any, stream_ptr: int | None = None) -> None:
        kind = runtime.cudaMemcpyKind(kind.value)
        check(
            runtime.cudaMemcpy(dst, src, nbytes, kind)
            if stream_ptr is None
            else runtime.cudaMemcpyAsync(dst, src, nbytes, kind, stream_ptr)
        )


class EngineRunner(TrtRunner):
    """Runner of an engine (trt.ICudaEngine) on one of its optimization profiles.

    Weights are fed beside what the caller gives. `inputs` are the graph's: where TensorRT made an input of another
    type, as 8.6 makes int32 of int64, values are cast.
    """

    def __init__(
        self, name: str, where: str, inputs: Sequence[IO], engine: Any, weights: Mapping[str, np.ndarray], profile: int
    ):
        polygraphy_cuda.G_CUDA = CudaPython()  # what `polygraphy.cuda.wrapper()` gives to all
        super().__init__(engine, name=name, optimization_profile=profile)
        self._where, self._declared, self._weights = where, inputs, weights
        tensors = TENSORRT.tensors(engine)
        self._types = {tensor.name: tensor.dtype for tensor in tensors}
        self._masks = {tensor.name: (tensor.shape[1], tensor.dtype) for tensor in tensors if mask_rank(tensor.name)}

    def get_input_metadata_impl(self) -> TensorMetadata:
        return metadata(self._declared)

    def infer_impl(self, feed_dict: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        rows = {slot: rows_of(slot) for slot in self._weights}
        weights = {
            slot: np.concatenate([array, *(feed_dict[name].T for name in rows[slot])])
            for slot, array in self._weights.items()
        }
        in_rows = {name for names in rows.values() for name in names}
        given = {name: array for name, array in feed_dict.items() if name not in in_rows}
        for name, (columns, dtype) in self._masks.items():
            given[name] = mask_of(given.pop(IDS), columns, mask_rank(name), dtype)
        feeds = cast({**given, **weights}, self._types)
        TENSORRT.log.clear()
        try:
            return super().infer_impl(feeds)
        except PolygraphyException as error:
            raise CheckError(
                f"{self._where}: Polygraphy cannot run this engine: {one_line(error)}; TensorRT "
                f"says: {TENSORRT.log.first_error()}"
            ) from error

    def deactivate_impl(self) -> None:
        for array in self.output_allocator.buffers.values():  # Polygraphy leaves them on the device
            array.free()
        super().deactivate_impl()


def cast(arrays: Mapping[str, np.ndarray], types: Mapping[str, np.dtype]) -> dict[str, np.ndarray]:
    """Cast integers to what the engine takes, and float32 where it takes float16; copy nothing else."""
    narrow = lambda name, array: array.dtype == np.float32 and types[name] == np.float16
    return {
        name: array.astype(types[name], copy=False) if array.dtype.kind == "i" or narrow(name, array) else array
        for name, array in arrays.items()
    }
