"""Greedy decoding: the most likely tokens of logits, which may be sharded over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def most_likely(logits: np.ndarray) -> np.ndarray:
    """Return the argmax of each row of logits [rows, vocab_size], int64; -1 if the maximum is NaN or infinite."""
    return np.where(np.isfinite(logits.max(axis=1)), logits.argmax(axis=1), -1)


def largest(part: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (token ids [rows] int32, logits [rows] float32) of the argmax of each row of a rank's shard.

    part: logits [rows, columns] of tokens `first` on. NaN counts as infinity.
    """
    values = np.where(np.isnan(part), np.inf, part.astype(np.float32))
    tokens = values.argmax(axis=1)
    return (first + tokens).astype(np.int32), values[np.arange(len(values)), tokens].astype(np.float32)


def most_likely_of_ranks(by_rank: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return `most_likely` of all ranks' logits; by_rank: `largest` of each rank, in order."""
    logits = np.stack([values for _, values in by_rank], axis=1)
    tokens = np.stack([ids for ids, _ in by_rank], axis=1).astype(np.int64)
    chosen = logits.argmax(axis=1)[:, None]
    best = np.take_along_axis(logits, chosen, axis=1)
    return np.where(np.isfinite(best), np.take_along_axis(tokens, chosen, axis=1), -1)[:, 0]
