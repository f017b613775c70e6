"""ONNX Runtime's engines beside their graphs.

An engine is a graph too, of any size. Needs polygraphy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from lockstep.onnx_tools.comparator import IO, BoundRunner
from lockstep.onnx_tools.sessions import open_session


def open_engine(
    file: Path, inputs: Sequence[IO], weights: Mapping[str, np.ndarray], threads: int | None
) -> Callable[[int], BoundRunner]:
    """Return a function that makes the engine's runner for an optimization profile.

    See `lockstep.verify.compare.run`.
    """
    session = open_session(file, threads)
    return lambda profile: BoundRunner("engine", inputs, session, weights)
