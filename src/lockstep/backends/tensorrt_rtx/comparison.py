"""TensorRT's Polygraphy runner for engines of TensorRT-RTX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from polygraphy.backend.base import BaseRunner

from lockstep.artifacts.signature import IO
from lockstep.backends.tensorrt import comparison
from lockstep.backends.tensorrt_rtx.backend import TensorRTRTXBackend


def open_engine(
    file: Path, inputs: Sequence[IO], weights: Mapping[str, np.ndarray], threads: int | None
) -> Callable[[int], BaseRunner]:
    """Return a function that makes the engine's runner for a profile. Raises InputError without a GPU for it."""
    backend = TensorRTRTXBackend()
    backend.require_gpu()
    return comparison.open_engine(file, inputs, weights, threads, backend.library)
