"""What attention over a KV cache offers to a rank.

`traced.TracedAttention` runs the exported graphs as engines: any attention variant, three to ten times slower than
fused kernels at long contexts. `fused.FusedAttention` has a paged cache: rows that decode are one kernel of our own a
layer; a prompt's tokens get their RoPE from a kernel and then go through cuDNN's attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from lockstep.gpu import cuda

SMALLEST_CHUNK = 16  # fused attention takes several tokens of a row as the next power of two, at least this many
LARGEST_BATCH = 4  # prompts that fused attention takes in one call
Arrays = Mapping[str, cuda.Array]
Call = Callable[[], None]
Calls = list[tuple[str, Call]]  # each with the name that its time goes to
Buffer = Callable[[str, Sequence[int], np.dtype], cuda.Array]  # by name, shape and dtype: all steps share it
Chunks = Sequence[tuple[int, int, int, int]]  # (row, start, first packed token, packed token behind the last)


class Part(NamedTuple):
    """Some calls of a pass of prompts; key: what they depend on beside array contents, None: on this pass alone."""

    key: tuple | None
    make: Callable[[], Calls]


@dataclass(frozen=True)
class PassTokens:
    """The tokens of a pass of prompts.

    By token, rows [num_tokens] int32: the slot whose cache the token goes into, or -1. num_decoding: tokens in front,
    that of slot i at i, which decode; decoding int32: by slot, the slot itself where it does, else -1, of as many slots
    as a decode step runs. chunks: of the tokens behind these, counted from there.
    """

    rows: cuda.Array
    num_decoding: int
    decoding: cuda.Array
    chunks: Chunks

    @property
    def num_tokens(self) -> int:
        return self.rows.shape[0]


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

    def begin(self, tokens: PassTokens) -> None:
        """Prepare a pass, before its first layer."""

    def layout(self, tokens: PassTokens) -> tuple[int, ...] | None:
        """Return what the calls of the pass that was begun depend on beside `Inputs`; None: on this pass alone."""

    def decode_calls(self, index: int, values: Arrays, rows: cuda.Array) -> Calls:
        """Return the calls of one layer in a decode step, for a captured graph, each with the name its time goes to.

        They compute attention ("attention") and write keys and values into the cache; row i's token is at i.
        """

    def token_calls(self, index: int, values: Arrays, rows: cuda.Array) -> Calls:
        """Return what comes first of one layer in a pass, and depends on the number of its tokens alone."""

    def parts(self, index: int, values: Arrays, tokens: PassTokens) -> Iterable[Part]:
        """Return the rest of one layer in a pass; values: arrays of which the first rows are its tokens'."""


class PagedAttention(Attention, Protocol):
    """Attention over pages, whose content can be moved."""

    def begin_verify(self, slots: Sequence[int]) -> None:
        """Prepare a step that verifies drafts: row i is a token of slot `slots[i]`."""

    def verify_calls(self, index: int, values: Arrays, rows: cuda.Array) -> Calls:
        """Return the calls of one layer in a step that verifies: as `decode_calls`, of any slots.

        A row sees what rows before it write. Its bits are those of a step of its own. rows: i at i, or -1.
        """

    def fork(self, slot: int, other: int, length: int) -> None:
        """Copy what a slot of `length` tokens holds behind its full pages to the pages of another."""

    def save(self, slot: int, length: int) -> np.ndarray:
        """Put copies of the pages of `length` tokens on the stream; return their page-locked memory."""

    def restore(self, slot: int, saved: np.ndarray) -> None:
        """Put copies of what `save` gave into a slot's pages on the stream."""


class SlicedAttention:
    """Attention whose calls in a pass are of that pass alone: of rows that decode, and of chunks."""

    def _calls(self, index: int, values: Arrays, rows: cuda.Array, chunks: Chunks, own: bool) -> Calls:
        """Return the calls of one layer; without chunks row i's token is at i. own: for a captured graph."""
        raise NotImplementedError  # each kind has its own

    def decode_calls(self, index: int, values: Arrays, rows: cuda.Array) -> Calls:
        return self._calls(index, values, rows, (), True)

    def token_calls(self, index: int, values: Arrays, rows: cuda.Array) -> Calls:
        return []

    def parts(self, index: int, values: Arrays, tokens: PassTokens) -> Iterable[Part]:
        count = tokens.num_decoding
        total = tokens.num_tokens
        for some, chunks in ((slice(0, count), ()), (slice(count, total), tokens.chunks)):
            if some.stop > some.start:
                own = {name: array[some] for name, array in values.items()}
                yield Part(None, functools.partial(self._calls, index, own, tokens.rows[some], chunks, False))
