"""Engines of TensorRT-RTX as `lockstep compare` runs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lockstep.backends.tensorrt import comparison
from lockstep.backends.tensorrt.comparison import Arrays
from lockstep.backends.tensorrt_rtx.backend import TensorRTRTXBackend


def open_engine(file: Path, weights: Arrays) -> Callable[[int, Arrays], Arrays]:
    """Return what runs the engine on one of its optimization profiles. Raises InputError without a GPU for it."""
    backend = TensorRTRTXBackend()
    backend.require_gpu()
    return comparison.open_engine(file, weights, backend.library)
