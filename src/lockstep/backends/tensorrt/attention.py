"""Attention over the KV cache on a GPU: traced, or fused over a paged cache.

Both implementations have one signature: `reserve`, `reset`, `begin`, `calls`.

TracedAttention runs the exported prefill and decode graphs, built as engines like the blocks: any attention variant,
any version, three to ten times slower than fused kernels at long contexts. Its cache is one array a layer, [rows,
num_kv_heads, capacity, head_dim], whose capacity doubles. FusedAttention (fused_attention.py) has a paged cache: rows
that decode are one kernel of our own a layer; a prompt's tokens get their RoPE from a kernel and then go through
cuDNN's attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

import numpy as np

from lockstep.backends.tensorrt import cuda
from lockstep.backends.tensorrt.kernels import Kernels
from lockstep.backends.tensorrt.program import TensorRTExecutable
from lockstep.errors import CheckError
from lockstep.step.network import LayerAttention, Network
from lockstep.step.pages import PAGE_SIZE, PagePool, PageTables

FIRST_CAPACITY = 64
SMALLEST_CHUNK = 16  # fused attention takes several tokens of a row as the next power of two, at least this many
LARGEST_BATCH = 4  # prompts that fused attention takes in one call
Call = Callable[[], None]
Chunks = Sequence[tuple[int, int, int, int]]  # (row, start, first packed token, packed token behind the last)


def padded(tokens: int) -> int:
    """Return the size to which fused attention pads a chunk of so many tokens."""
    return max(SMALLEST_CHUNK, 1 << (tokens - 1).bit_length())


class Attention(Protocol):
    """The KV cache of some layers, and attention over it."""

    capacity: int  # a decode graph that was captured holds for this capacity only

    def reserve(self, ends: Mapping[int, int], lengths: np.ndarray, stream: cuda.Stream) -> bool:
        """Make room for a step.

        Row `r` will hold `ends[r]` tokens after the step; lengths: of all rows before it. Returns whether arrays were
        moved that the calls of steps hold.
        """
        ...

    def reset(self, row: int, stream: cuda.Stream) -> None:
        """Forget a row."""
        ...

    def begin(self, chunks: Chunks, stream: cuda.Stream) -> None:
        """Prepare a pass of chunks, before its first layer."""
        ...

    def calls(
        self,
        index: int,
        layer_attention: LayerAttention,
        values: Mapping[str, cuda.Array],
        rows: cuda.Array,
        chunks: Chunks,
        buffer: Callable[..., cuda.Array],
        stream: cuda.Stream,
        own: bool,
    ) -> list[tuple[str, Call]]:
        """Return the calls of one layer, each with the name that its time goes to.

        They compute attention of the packed tokens ("attention") and write keys and values into the cache. Without
        chunks each token is of a request of its own, that of row `i` at i.
        """
        ...


class PagedAttention(Attention, Protocol):
    """Attention over pages, whose content can be moved."""

    def fork(self, slot: int, other: int, length: int, stream: cuda.Stream) -> None:
        """Copy what a slot holds behind its full pages to the pages of another.

        length: the tokens that `slot` holds.
        """
        ...

    def save(self, slot: int, length: int, stream: cuda.Stream) -> np.ndarray:
        """Put copies of the pages of `length` tokens on the stream.

        Returns the page-locked memory that they go to.
        """
        ...

    def restore(self, slot: int, saved: np.ndarray, stream: cuda.Stream) -> None:
        """Put copies of what `save` gave into a slot's pages on the stream."""
        ...


def make_tables(network: Network, num_slots: int, max_seq_len: int, kv_bytes: float | None, free: int) -> PageTables:
    """Return the page tables of all slots, the same on each device.

    kv_bytes: memory of each device for keys and values of all slots, or below 1 the share of what is free; None: for
    the longest requests in all slots, or nine tenths of what is free. free: bytes that the device with the least has
    free. Where some attention is traced, whose cache has no pages, each slot has room for the longest request. Raises
    CheckError where there is room for no page.
    """
    pages, fused = num_slots * -(-max_seq_len // PAGE_SIZE), _fused(network)
    nbytes = PAGE_SIZE * network.dtype.itemsize * sum(network.layers[index][1].cache.size for index in fused)
    if len(fused) < len(network.layers):
        return PageTables(PagePool(pages, nbytes), num_slots, shares=None)
    share = 0.9 if kv_bytes is None else kv_bytes
    room = min(pages * nbytes, int(free * share)) if share < 1 else int(share)
    if room < nbytes:
        raise CheckError(
            f"KV cache: expected room for a page of {PAGE_SIZE} tokens, {nbytes} bytes, found {room} "
            f"({'kv_bytes' if kv_bytes else f'of {free} free on the GPU'}); raise kv_bytes, or end what else uses it"
        )
    return PageTables(PagePool(room // nbytes, nbytes), num_slots)


def _fused(network: Network) -> list[int]:
    """Return the layers whose attention variant was built for fused attention."""
    return [index for index, (_, layer_attention) in enumerate(network.layers) if "rotary" in layer_attention.engines]


def make_attention(
    network: Network, tables: PageTables, num_slots: int, max_seq_len: int, kernels: Kernels, stream: cuda.Stream
) -> list[Attention]:
    """Return for each layer the attention that it was built for, on a device's stream.

    Fused layers share one object, and so do traced ones.
    """
    fused, attentions = set(_fused(network)), [layer_attention for _, layer_attention in network.layers]
    made: dict[bool, Attention] = {}
    for is_fused in sorted({index in fused for index in range(len(attentions))}):
        layers = {
            index: layer_attention for index, layer_attention in enumerate(attentions) if (index in fused) == is_fused
        }
        if is_fused:
            from lockstep.backends.tensorrt.fused_attention import FusedAttention  # loads cuDNN

            made[True] = FusedAttention(layers, network.dtype, tables, num_slots, max_seq_len, kernels, stream)
        else:
            made[False] = TracedAttention(layers, network.dtype, num_slots, max_seq_len, kernels)
    return [made[index in fused] for index in range(len(attentions))]


class TracedAttention:
    """The exported attention graphs as engines, over a contiguous cache."""

    def __init__(
        self, layers: Mapping[int, LayerAttention], dtype: np.dtype, rows: int, max_seq_len: int, kernels: Kernels
    ):
        self._layers = layers
        self._dtype, self._rows, self._max, self._kernels = dtype, rows, max_seq_len, kernels
        self.capacity = 0
        self._cache: dict[int, tuple[cuda.Array, cuda.Array]] = {}

    def reserve(self, ends: Mapping[int, int], lengths: np.ndarray, stream: cuda.Stream) -> bool:
        needed = max([*ends.values(), int(lengths.max())])
        bucket = FIRST_CAPACITY
        while bucket < needed:
            bucket *= 2
        bucket = min(bucket, self._max)
        if self._cache and bucket <= self.capacity < 3 * bucket:
            return False
        make = lambda layer_attention, dim: cuda.zeros(
            (self._rows, layer_attention.cache.num_kv_heads, bucket, dim), self._dtype, "the KV cache"
        )
        grown = {
            index: (
                make(layer_attention, layer_attention.cache.head_dim),
                make(layer_attention, layer_attention.cache.value_head_dim),
            )
            for index, layer_attention in self._layers.items()
        }
        used = int(lengths.max())
        for index, pair in self._cache.items() if used else ():
            for old, new in zip(pair, grown[index]):
                width, heads = new.shape[3] * new.dtype.itemsize, new.shape[1]
                stream.copy_rows(
                    new.address, bucket * width, old.address, self.capacity * width, used * width, self._rows * heads
                )
        stream.synchronize()  # the old arrays are freed now
        self._cache, self.capacity = grown, bucket
        return True

    def reset(self, row: int, stream: cuda.Stream) -> None:
        """Clear a row: masked numbers weigh 0, but 0 times a stale infinity would be NaN."""
        for array in (array for pair in self._cache.values() for array in pair):
            row_array = array[row : row + 1]
            stream.fill_zero(row_array.address, row_array.nbytes, row_array.nbytes, 1)

    def begin(self, chunks: Chunks, stream: cuda.Stream) -> None:
        """Do nothing: a chunk's first position is the length of its past."""

    def calls(
        self,
        index: int,
        layer_attention: LayerAttention,
        values: Mapping[str, cuda.Array],
        rows: cuda.Array,
        chunks: Chunks,
        buffer: Callable[..., cuda.Array],
        stream: cuda.Stream,
        own: bool,
    ) -> list[tuple[str, Call]]:
        shape, total = layer_attention.cache, values["attention"].shape[0]
        keys, cached = self._cache[index]
        new_key = buffer("key_out", (total, shape.num_kv_heads, shape.head_dim), self._dtype)
        new_value = buffer("value_out", (total, shape.num_kv_heads, shape.value_head_dim), self._dtype)
        calls: list[tuple[str, Call]] = []

        def add(phase: str, tokens: slice, past: tuple[cuda.Array, cuda.Array], lengths: cuda.Array) -> None:
            inputs = {name: values[name][tokens] for name in ("query", "key", "value", "position_ids")}
            inputs |= {"past_key": past[0], "past_value": past[1], "past_lengths": lengths}
            inputs = {name: inputs[name] for name in layer_attention.inputs[phase]}
            outputs = {
                "attention": values["attention"][tokens],
                "key_out": new_key[tokens],
                "value_out": new_value[tokens],
            }
            engine = cast(TensorRTExecutable, layer_attention.engines[phase])  # this backend made the network's engines
            calls.append(("attention", engine.prepare(inputs, outputs, own)))

        if not chunks:
            decoding = slice(0, total)
            # a token's position is the length of its past
            add("decode", decoding, (keys[decoding], cached[decoding]), values["position_ids"])
        for row, _start, low, high in chunks:
            past = (keys[row : row + 1], cached[row : row + 1])
            # likewise: that of a chunk's first token
            add("prefill", slice(low, high), past, values["position_ids"][low : low + 1])
        positions = values["position_ids"]
        calls.append(
            ("cache", lambda: self._kernels.write_cache(stream, new_key, new_value, keys, cached, rows, positions))
        )
        return calls
