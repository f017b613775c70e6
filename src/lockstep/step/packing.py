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
    """Arrays for the tokens of a step, packed: int64 [num_tokens].

    token_ids, position_ids and slots (-1: a row that does not decode, token 0 at position 0).
    """

    token_ids: np.ndarray
    position_ids: np.ndarray
    slots: np.ndarray

    @classmethod
    def empty(cls, num_tokens: int) -> PackedTokens:
        return cls(np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int64), np.full(num_tokens, -1))

    def pack(
        self, decoding: Sequence[Advance], rows: Sequence[int], num_rows: int, chunks: Sequence[Advance]
    ) -> list[tuple[int, int]]:
        """Pack a step: rows that decode, then chunks one after another.

        rows: those of `decoding`, among `num_rows`. Returns the first packed token of each request, and the one behind
        its last: of those that decode, then of the chunks.
        """
        token_ids = self.token_ids
        position_ids = self.position_ids
        slots = self.slots
        if num_rows > len(rows):
            token_ids[:num_rows] = position_ids[:num_rows] = 0
            slots[:num_rows] = -1
        for row, advance in zip(rows, decoding):
            token_ids[row] = advance.tokens[0]
            position_ids[row] = advance.start
            slots[row] = advance.slot
        places = [(row, row + 1) for row in rows]
        low = num_rows
        for chunk in chunks:
            count = len(chunk.tokens)
            high = low + count
            token_ids[low:high] = chunk.tokens
            slots[low:high] = chunk.slot
            position_ids[low:high] = np.arange(chunk.start, chunk.start + count)
            places.append((low, high))
            low = high
        return places

    def adapter_ids(self, adapter_slots: np.ndarray) -> np.ndarray:
        """Return by token the slot of its adapter, or -1.

        adapter_slots: those of the request slots.
        """
        return np.where(self.slots >= 0, adapter_slots[self.slots], -1)


def split(advances: Sequence[Advance]) -> tuple[list[Advance], list[Advance]]:
    """Split a step into what decodes, of one token, and chunks, of several."""
    decoding = [advance for advance in advances if len(advance.tokens) == 1]
    if len(decoding) == len(advances):
        return decoding, []
    return decoding, [advance for advance in advances if len(advance.tokens) > 1]
