"""The packing of a step's tokens, which all executors share: rows that decode first, then chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.step.advance import Advance


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """The packed tokens of a step, int64 [num_tokens] each.

    slots: -1 for a row that doesn't decode, which has token 0 at position 0.
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
        """Pack a step: `num_rows` rows that decode, then chunks.

        rows: the rows of `decoding`; others don't decode. Returns the (start, end) of each request's packed tokens,
        first of `decoding`, then of the chunks.
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
        ranges = [(row, row + 1) for row in rows]
        start = num_rows
        for chunk in chunks:
            count = len(chunk.tokens)
            end = start + count
            token_ids[start:end] = chunk.tokens
            slots[start:end] = chunk.slot
            position_ids[start:end] = np.arange(chunk.start, chunk.start + count)
            ranges.append((start, end))
            start = end
        return ranges

    def adapter_ids(self, adapter_slots: np.ndarray) -> np.ndarray:
        """Return the adapter slot of each token, or -1; adapter_slots: by request slot."""
        return np.where(self.slots >= 0, adapter_slots[self.slots], -1)


def next_power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`, a positive number."""
    return 1 << (count - 1).bit_length()


def split(advances: Sequence[Advance]) -> tuple[list[Advance], list[Advance]]:
    """Split a step into advances of one token, which decode, and chunks of several."""
    decoding = [advance for advance in advances if len(advance.tokens) == 1]
    if len(decoding) == len(advances):
        return decoding, []
    return decoding, [advance for advance in advances if len(advance.tokens) > 1]
