"""Polygraphy's runner for the engines of any backend on NumPy arrays, as the runtime calls them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata

from lockstep.onnx_tools.comparator import IO, metadata
from lockstep.step.executable import HostExecutable


class HostRunner(BaseRunner):
    """Runs an executable whose weights are bound; `inputs` and `outputs` are the graph's."""

    def __init__(self, name: str, inputs: Sequence[IO], outputs: Sequence[IO], executable: HostExecutable):
        super().__init__(name=name)
        self._inputs, self._outputs, self._executable = inputs, outputs, executable

    def get_input_metadata_impl(self) -> TensorMetadata:
        return metadata(self._inputs)

    def infer_impl(self, feed_dict: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        feeds = {name: np.ascontiguousarray(array) for name, array in feed_dict.items()}
        sizes: dict[int | str, int] = {}
        for io in self._inputs:
            sizes.update(zip(io["shape"], feeds[io["name"]].shape))
        found = {
            io["name"]: np.empty([sizes.get(dim, dim) for dim in io["shape"]], io["dtype"]) for io in self._outputs
        }
        call = self._executable.prepare(feeds, found)
        start = time.perf_counter()
        call()
        self.inference_time = time.perf_counter() - start  # Polygraphy adds them up
        return found
