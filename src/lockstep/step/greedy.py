"""From logits to the most likely tokens: of one rank, or of several that hold parts of the logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def most_likely(logits: np.ndarray) -> np.ndarray:
    """logits [rows, vocab_size] -> of each row the first of its largest, [rows] int64; -1 where that is NaN or
    infinite."""
    return np.where(np.isfinite(logits.max(axis=1)), logits.argmax(axis=1), -1)


def largest(part: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
    """What a rank tells the others of its logits, part [rows, columns] of tokens `first` on: of each row the first of
    the largest, (token ids [rows] int32, logits [rows] float32); infinity for NaN."""
    values = np.where(np.isnan(part), np.inf, part.astype(np.float32))
    tokens = values.argmax(axis=1)
    return (first + tokens).astype(np.int32), values[np.arange(len(values)), tokens].astype(np.float32)


def most_likely_of_ranks(found: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """`most_likely` of what each rank tells, in their order, whose tokens follow each other."""
    logits = np.stack([values for _, values in found], axis=1)
    tokens = np.stack([ids for ids, _ in found], axis=1).astype(np.int64)
    chosen = logits.argmax(axis=1)[:, None]
    best = np.take_along_axis(logits, chosen, axis=1)
    return np.where(np.isfinite(best), np.take_along_axis(tokens, chosen, axis=1), -1)[:, 0]
