"""A Polygraphy runner for blocks of the `cuda` backend; needs cuda-bindings, polygraphy and a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata

from lockstep.artifacts.signature import IO
from lockstep.backends.cuda.backend import CudaBackend
from lockstep.backends.cuda.program import KernelsExecutable, KernelsProgram
from lockstep.onnx_tools.comparator import metadata


def open_engine(
    file: Path, inputs: Sequence[IO], weights: Mapping[str, np.ndarray], threads: int | None
) -> Callable[[int], BaseRunner]:
    """Return a function that makes the engine's runner: see `verify.compare.run`. Raises InputError without a GPU."""
    CudaBackend().require()
    slots = [IO(name, array.dtype.name, array.shape) for name, array in weights.items()]
    run = KernelsProgram(file, slots).bind(_Arrays(weights), {name: [name] for name in weights})
    return lambda profile: EngineRunner(inputs, run)


class _Arrays:
    """Weights by slot, as arrays: see `weights.Tensors`."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._arrays = arrays

    @property
    def checkpoint(self) -> object:
        return self

    def identity(self, name: str) -> str:
        return name

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def location(self, name: str) -> None:
        return None


class EngineRunner(BaseRunner):
    """Runner of a block, which runs as in the runtime. Adapters' A are written to where the block has them."""

    def __init__(self, inputs: Sequence[IO], run: KernelsExecutable):
        super().__init__(name="engine")
        self._declared, self._run = inputs, run

    def get_input_metadata_impl(self) -> TensorMetadata:
        return metadata(self._declared)

    def infer_impl(self, feed_dict: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        program, began = self._run.program, time.perf_counter()
        for name, rows in self._run.adapter_rows.items():
            program.device.stream.upload(rows, np.ascontiguousarray(feed_dict[name].T))
        program.device.stream.synchronize()
        feed_dict = {name: array for name, array in feed_dict.items() if name not in self._run.adapter_rows}
        sizes = program.sizes({name: array.shape for name, array in feed_dict.items()})
        outputs = {name: program.filled(name, sizes) for name in program.block.outputs}
        found = self._run.run_once(feed_dict, {name: np.empty(shape, np.float16) for name, shape in outputs.items()})
        self.inference_time = time.perf_counter() - began  # Polygraphy accumulates them
        return found
