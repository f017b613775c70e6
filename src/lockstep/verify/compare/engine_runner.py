"""Polygraphy's runner for engines of any backend, on NumPy arrays. It calls them as the runtime does."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata

from lockstep.artifacts.signature import Signature
from lockstep.onnx_tools.comparator import metadata
from lockstep.step.executable import Executable, run_once


class EngineRunner(BaseRunner):
    """Runs an executable whose weights are bound, on an optimization profile; `signature` is the graph's."""

    def __init__(self, signature: Signature, executable: Executable, profile: int):
        super().__init__(name="engine")
        self._signature, self._executable, self._profile = signature, executable, profile

    def get_input_metadata_impl(self) -> TensorMetadata:
        return metadata(self._signature.inputs)

    def infer_impl(self, feed_dict: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        sizes: dict[int | str, int] = {}
        for io in self._signature.inputs:
            sizes.update(zip(io.shape, feed_dict[io.name].shape))
        like = {
            io.name: np.empty([sizes[dim] if isinstance(dim, str) else dim for dim in io.shape], io.numpy_dtype)
            for io in self._signature.outputs
        }
        start = time.perf_counter()
        found = run_once(self._executable, feed_dict, like, self._profile)
        self.inference_time = time.perf_counter() - start  # Polygraphy adds them up
        return found
