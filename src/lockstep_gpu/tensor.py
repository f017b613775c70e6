"""An engine's inputs and outputs. Needs no CUDA."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tensor:
    """An input or output of an engine.

    shape: -1 for a dynamic dimension. profiles: the (min, opt, max) shapes of an input in each optimization profile.
    """

    name: str
    is_input: bool
    dtype: np.dtype
    shape: tuple[int, ...]
    profiles: tuple[tuple[tuple[int, ...], ...], ...] = ()
