"""Mappings of names to arrays that have a row for each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def concatenate_rows(pieces: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    if len(pieces) == 1:
        return dict(pieces[0])  # without a copy
    rows = {}
    for name in pieces[0]:
        rows[name] = np.concatenate([piece[name] for piece in pieces])
    return rows


def take_rows(arrays: Mapping[str, np.ndarray], rows: np.ndarray | slice) -> dict[str, np.ndarray]:
    return {name: array[rows] for name, array in arrays.items()}
