"""From logits to the most likely tokens."""

from __future__ import annotations

import numpy as np


def most_likely(logits: np.ndarray) -> np.ndarray:
    """logits [rows, vocab_size] -> of each row the first of its largest, [rows] int64; -1 where that is NaN or
    infinite."""
    return np.where(np.isfinite(logits.max(axis=1)), logits.argmax(axis=1), -1)
