"""The interface of attention over a KV cache.

`traced.TracedAttention` runs the exported graphs as engines. It supports any attention variant, but at long contexts
it is three to ten times slower than fused kernels. `fused.FusedAttention` has a paged KV cache: decoding is one kernel
of ours per layer; prompts go through a RoPE kernel and then cuDNN's attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from lockstep.step.executable import Call
from lockstep_gpu import cuda
from lockstep_gpu.plan import Chunks

Arrays = Mapping[str, cuda.Array]
Calls = list[tuple[str, Call]]  # each with the name that its time is reported under
Buffer = Callable[[str, Sequence[int], np.dtype], cuda.Array]  # (name, shape, dtype) -> an array that all steps share


class Part(NamedTuple):
    """Some calls of a pass with chunks.

    key: all that the calls depend on, except array contents, so that a graph of them can be reused; None: it can't.
    """

    key: tuple | None
    make: Callable[[], Calls]


@dataclass(frozen=True)
class PassTokens:
    """The tokens of a pass with chunks: first one for each slot up to the highest that decodes, then the chunks.

    Attributes:
        rows: [num_tokens] int32: the slot whose cache the token goes into, or -1.
        num_decoding: The number of tokens before the chunks; token i is slot i's.
        decoding: int32, of the length of a decode step: the slot's own number if it decodes, else -1.
        chunks: Their packed tokens are counted from `num_decoding`.
    """

    rows: cuda.Array
    num_decoding: int
    decoding: cuda.Array
    chunks: Chunks

    @property
    def num_tokens(self) -> int:
        return self.rows.shape[0]


class Attention(Protocol):
    """The KV cache of some layers, and attention over it, on the stream of a rank's device."""

    capacity: int  # tokens per row; a captured decode graph is valid for this capacity only

    def reserve(self, lengths_after: Mapping[int, int], lengths: np.ndarray) -> bool:
        """Make room for a step.

        lengths_after: by row, its tokens after the step. lengths: the tokens of all rows before it. Returns whether
        arrays moved, which invalidates prepared calls.
        """

    def reset(self, row: int) -> None:
        """Clear a row."""

    def begin(self, tokens: PassTokens) -> None:
        """Prepare a pass, before its first layer."""

    def layout(self, tokens: PassTokens) -> tuple[int, ...] | None:
        """Return what the calls of the current pass depend on besides `Inputs`; None: they can't be reused."""

    def decode_calls(self, index: int, values: Arrays, rows: cuda.Array) -> Calls:
        """Return one layer's calls in a decode step, for a captured graph.

        They write keys and values to the cache and compute `values["attention"]`. Token i is row i's.
        """

    def token_calls(self, index: int, values: Arrays, rows: cuda.Array) -> Calls:
        """Return one layer's first calls in a pass, which depend on the number of tokens only."""

    def parts(self, index: int, values: Arrays, tokens: PassTokens) -> Iterable[Part]:
        """Return one layer's other calls in a pass; values: arrays of the largest pass."""


class PagedAttention(Attention, Protocol):
    """Attention over pages, whose contents can be copied to other slots and to the host."""

    def begin_verify(self, slots: Sequence[int]) -> None:
        """Prepare a step that verifies drafts: row i is a token of slot `slots[i]`."""

    def verify_calls(self, index: int, values: Arrays, rows: cuda.Array) -> Calls:
        """Return one layer's calls in a step that verifies, whose rows are tokens of any slots.

        A row attends to the keys of earlier rows of its slot, and has the bits of a decode step. rows: i at i, or -1.
        """

    def fork(self, slot: int, other: int, length: int) -> None:
        """Copy a slot's tokens after its last full page to the page of another slot; length: the slot's tokens."""

    def save(self, slot: int, length: int) -> np.ndarray:
        """Enqueue copies of the pages of `length` tokens to the host; return the page-locked copies."""

    def restore(self, slot: int, saved: np.ndarray) -> None:
        """Enqueue copies of saved pages into a slot's pages."""


class SlicedAttention:
    """Attention whose calls in a pass can't be reused: one set for rows that decode, one for chunks."""

    def _calls(self, index: int, values: Arrays, rows: cuda.Array, chunks: Chunks, captured: bool) -> Calls:
        """Return one layer's calls; without chunks, token i is row i's. captured: for a captured graph."""
        raise NotImplementedError

    def decode_calls(self, index: int, values: Arrays, rows: cuda.Array) -> Calls:
        return self._calls(index, values, rows, (), captured=True)

    def token_calls(self, index: int, values: Arrays, rows: cuda.Array) -> Calls:
        return []

    def parts(self, index: int, values: Arrays, tokens: PassTokens) -> Iterable[Part]:
        count = tokens.num_decoding
        total = tokens.num_tokens
        for packed, chunks in ((slice(0, count), ()), (slice(count, total), tokens.chunks)):
            if packed.stop > packed.start:
                packed_values = {name: array[packed] for name, array in values.items()}
                rows = tokens.rows[packed]
                yield Part(None, functools.partial(self._calls, index, packed_values, rows, chunks, captured=False))
