"""A runner for Polygraphy's Comparator of graphs whose weights are inputs, and the switch for its messages.

Needs polygraphy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from polygraphy.backend.onnxrt import OnnxrtRunner
from polygraphy.common import TensorMetadata
from polygraphy.logger import G_LOGGER

from lockstep.artifacts.signature import IO


class BoundRunner(OnnxrtRunner):
    """Polygraphy's ONNX Runtime runner that adds weights to the inputs, and keeps them while it is active."""

    def __init__(self, name: str, inputs: Sequence[IO], session: Any, weights: Callable[[], Mapping[str, np.ndarray]]):
        super().__init__(session, name=name)
        self._declared = inputs
        self._read_weights = weights
        self._weights: Mapping[str, np.ndarray] = {}

    def activate_impl(self) -> None:
        super().activate_impl()
        self._weights = self._read_weights()

    def deactivate_impl(self) -> None:
        self._weights = {}
        super().deactivate_impl()

    def get_input_metadata_impl(self) -> TensorMetadata:
        return metadata(self._declared)

    def infer_impl(self, feed_dict: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return super().infer_impl({**feed_dict, **self._weights})


def metadata(inputs: Sequence[IO]) -> TensorMetadata:
    """Return declared inputs in Polygraphy's form; named dimensions are dynamic."""
    types = TensorMetadata()
    for io in inputs:
        sizes: list[int | None] = []
        for dim in io.shape:
            if isinstance(dim, str):
                sizes.append(None)
            else:
                sizes.append(dim)
        types.add(io.name, io.numpy_dtype, tuple(sizes))
    return types


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Switch off Polygraphy's messages; errors still raise."""
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        yield


def one_line(error: object) -> str:
    return " ".join(str(error).split())
