"""Polygraphy's runner for engines on NumPy arrays, of any backend. It calls them as the runtime does."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata

from lockstep.artifacts.signature import Signature
from lockstep.onnx_tools.comparator import metadata
from lockstep.step.executable import HostExecutable


class HostRunner(BaseRunner):
    """Runs an executable whose weights are bound; `signature` is the graph's."""

    def __init__(self, name: str, signature: Signature, executable: HostExecutable):
        super().__init__(name=name)
        self._signature, self._executable = signature, executable

    def get_input_metadata_impl(self) -> TensorMetadata:
        return metadata(self._signature.inputs)

    def infer_impl(self, feed_dict: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        feeds = {name: np.ascontiguousarray(array) for name, array in feed_dict.items()}
        sizes: dict[int | str, int] = {}
        for io in self._signature.inputs:
            sizes.update(zip(io.shape, feeds[io.name].shape))
        found = {
            io.name: np.empty([sizes[dim] if isinstance(dim, str) else dim for dim in io.shape], io.numpy_dtype)
            for io in self._signature.outputs
        }
        call = self._executable.prepare(feeds, found)
        start = time.perf_counter()
        call()
        self.inference_time = time.perf_counter() - start  # Polygraphy adds them up
        return found
