"""The inputs and outputs of an engine. Needs no CUDA."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tensor:
    """An input or output of an engine; shape: -1 where dynamic. profiles: (min, opt, max) each, of inputs."""

    name: str
    is_input: bool
    dtype: np.dtype
    shape: tuple[int, ...]
    profiles: tuple[tuple[tuple[int, ...], ...], ...] = ()
