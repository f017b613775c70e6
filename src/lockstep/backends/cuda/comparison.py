"""Blocks of the `cuda` backend as `lockstep compare` runs them; needs cuda-bindings and a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from lockstep.artifacts.signature import IO
from lockstep.backends.cuda.backend import CudaBackend
from lockstep.backends.cuda.program import KernelsExecutable, KernelsProgram

Arrays = Mapping[str, np.ndarray]


def open_engine(file: Path, weights: Arrays) -> Callable[[int, Arrays], Arrays]:
    """Return what runs the engine: see `verify.compare.pair`. Raises InputError without a GPU."""
    CudaBackend().require()
    slots = [IO(name, array.dtype.name, array.shape) for name, array in weights.items()]
    bound = KernelsProgram(file, slots).bind(_Weights(weights), {name: [name] for name in weights})
    return lambda profile, feed: _run(bound, feed)


class _Weights:
    """Weights by slot, as arrays: see `weights.Tensors`."""

    def __init__(self, arrays: Arrays):
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


def _run(bound: KernelsExecutable, feed: Arrays) -> Arrays:
    """Run a block as in the runtime; adapters' A are written to where the block has them."""
    program, rows = bound.program, bound.adapter_rows
    for name, array in rows.items():
        program.device.stream.upload(array, np.ascontiguousarray(feed[name].T))
    program.device.stream.synchronize()
    feed = {name: array for name, array in feed.items() if name not in rows}
    sizes = program.sizes({name: array.shape for name, array in feed.items()})
    outputs = {name: program.filled(name, sizes) for name in program.block.outputs}
    return bound.run_once(feed, {name: np.empty(shape, np.float16) for name, shape in outputs.items()})
