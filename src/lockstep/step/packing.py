"""The packing of a step's tokens: rows that decode in front, then chunks.

It is the same for every executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.step.advance import Advance


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """The tokens of a step, packed; arrays are int64.

    By token, [num_tokens]: token_ids, position_ids and slots (-1: a row that does not decode, token 0 at position 0).
    first, last: packed number of the first and of the last token of each request, [num_requests]: those that decode,
    then the chunks.
    """

    token_ids: np.ndarray
    position_ids: np.ndarray
    slots: np.ndarray
    first: np.ndarray
    last: np.ndarray

    def adapter_ids(self, adapter_slots: np.ndarray) -> np.ndarray:
        """Return by token the slot of its adapter, or -1.

        adapter_slots: those of the request slots.
        """
        return np.where(self.slots >= 0, adapter_slots[self.slots], -1)


def split(advances: Sequence[Advance]) -> tuple[list[Advance], list[Advance]]:
    """Split a step into what decodes, of one token, and chunks, of several."""
    decoding = [advance for advance in advances if len(advance.tokens) == 1]
    return decoding, [advance for advance in advances if len(advance.tokens) > 1]


def pack(decoding: Sequence[Advance], rows: Sequence[int], num_rows: int, chunks: Sequence[Advance]) -> PackedTokens:
    """Pack a step: rows that decode, then chunks one after another.

    rows: those of `decoding`, among `num_rows`.
    """
    counts = [len(chunk.tokens) for chunk in chunks]
    behind = num_rows + np.cumsum(counts, dtype=np.int64)
    first, last = np.array([*rows, *(behind - counts)], np.int64), np.array([*rows, *(behind - 1)], np.int64)
    total = num_rows + sum(counts)
    token_ids, position_ids, slots = np.zeros(total, np.int64), np.zeros(total, np.int64), np.full(total, -1)
    if decoding:
        at = first[: len(decoding)]
        token_ids[at] = [advance.tokens[0] for advance in decoding]
        position_ids[at] = [advance.start for advance in decoding]
        slots[at] = [advance.slot for advance in decoding]
    for low, count, chunk in zip(first[len(decoding) :].tolist(), counts, chunks):
        packed = slice(low, low + count)
        token_ids[packed], slots[packed] = chunk.tokens, chunk.slot
        position_ids[packed] = np.arange(chunk.start, chunk.start + count)
    return PackedTokens(token_ids, position_ids, slots, first, last)
