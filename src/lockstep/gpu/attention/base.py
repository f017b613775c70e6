"""What attention over a KV cache offers to a rank.

Both implementations have one signature: `reserve`, `reset`, `begin`, `calls`. `traced.TracedAttention` runs the
exported graphs as engines: any attention variant, three to ten times slower than fused kernels at long contexts.
`fused.FusedAttention` has a paged cache: rows that decode are one kernel of our own a layer; a prompt's tokens get
their RoPE from a kernel and then go through cuDNN's attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from lockstep.gpu import cuda

SMALLEST_CHUNK = 16  # fused attention takes several tokens of a row as the next power of two, at least this many
LARGEST_BATCH = 4  # prompts that fused attention takes in one call
Arrays = Mapping[str, cuda.Array]
Call = Callable[[], None]
Calls = list[tuple[str, Call]]  # each with the name that its time goes to
Buffer = Callable[[str, Sequence[int], np.dtype], cuda.Array]  # by name, shape and dtype: all steps share it
Chunks = Sequence[tuple[int, int, int, int]]  # (row, start, first packed token, packed token behind the last)


def padded(tokens: int) -> int:
    """Return the size to which fused attention pads a chunk of so many tokens."""
    return max(SMALLEST_CHUNK, 1 << (tokens - 1).bit_length())


class Attention(Protocol):
    """The KV cache of some layers, and attention over it, on the stream of a rank's device."""

    capacity: int  # a decode graph that was captured holds for this capacity only

    def reserve(self, ends: Mapping[int, int], lengths: np.ndarray) -> bool:
        """Make room for a step.

        Row `r` will hold `ends[r]` tokens after the step; lengths: of all rows before it. Returns whether arrays were
        moved that the calls of steps hold.
        """

    def reset(self, row: int) -> None:
        """Forget a row."""

    def begin(self, chunks: Chunks) -> None:
        """Prepare a pass of chunks, before its first layer."""

    def layout(self, chunks: Chunks) -> tuple[int, ...] | None:
        """Return what the calls of a pass of chunks depend on, beside what `begin` sends.

        Calls of a pass are those of any other of this layout whose arrays are as large. None: of this pass alone.
        """

    def calls(self, index: int, values: Arrays, rows: cuda.Array, chunks: Chunks, own: bool) -> Calls:
        """Return the calls of one layer, each with the name that its time goes to.

        They compute attention of the packed tokens ("attention") and write keys and values into the cache. Without
        chunks each token is of a request of its own, that of row `i` at i. own: they are for a captured graph.
        """


class PagedAttention(Attention, Protocol):
    """Attention over pages, whose content can be moved."""

    def begin_verify(self, slots: Sequence[int]) -> None:
        """Prepare a step that verifies drafts: row i is a token of slot `slots[i]`."""

    def verify_calls(self, index: int, values: Arrays, rows: cuda.Array) -> Calls:
        """Return the calls of one layer in a step that verifies: as `calls` of rows that decode, of any slots.

        A row sees what rows before it write. Its bits are those of a step of its own. rows: i at i, or -1.
        """

    def fork(self, slot: int, other: int, length: int) -> None:
        """Copy what a slot of `length` tokens holds behind its full pages to the pages of another."""

    def save(self, slot: int, length: int) -> np.ndarray:
        """Put copies of the pages of `length` tokens on the stream; return their page-locked memory."""

    def restore(self, slot: int, saved: np.ndarray) -> None:
        """Put copies of what `save` gave into a slot's pages on the stream."""
