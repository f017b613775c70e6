"""Arrays by name, each with a row for each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def concatenate_rows(pieces: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the rows of all pieces, which have the same names."""
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def take_rows(arrays: Mapping[str, np.ndarray], rows: np.ndarray | slice) -> dict[str, np.ndarray]:
    return {name: array[rows] for name, array in arrays.items()}
