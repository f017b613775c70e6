"""Greedy decoding: logits in, the most likely tokens out.

The logits are those of one rank, or parts of them on several.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def most_likely(logits: np.ndarray) -> np.ndarray:
    """Return the first of the largest logits of each row, [rows] int64.

    logits: [rows, vocab_size]. -1 where the largest is NaN or infinite.
    """
    return np.where(np.isfinite(logits.max(axis=1)), logits.argmax(axis=1), -1)


def largest(part: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest logit of each row of a rank's part, and its token.

    part: logits [rows, columns] of tokens `first` on. Returns (token ids [rows] int32, logits [rows] float32), of equal
    logits the first; infinity for NaN.
    """
    values = np.where(np.isnan(part), np.inf, part.astype(np.float32))
    tokens = values.argmax(axis=1)
    return (first + tokens).astype(np.int32), values[np.arange(len(values)), tokens].astype(np.float32)


def most_likely_of_ranks(found: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return `most_likely` of the logits of all ranks.

    found: `largest` of each rank, in the order in which their tokens follow each other.
    """
    logits = np.stack([values for _, values in found], axis=1)
    tokens = np.stack([ids for ids, _ in found], axis=1).astype(np.int64)
    chosen = logits.argmax(axis=1)[:, None]
    best = np.take_along_axis(logits, chosen, axis=1)
    return np.where(np.isfinite(best), np.take_along_axis(tokens, chosen, axis=1), -1)[:, 0]
