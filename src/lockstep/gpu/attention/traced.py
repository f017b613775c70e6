"""Attention by the exported graphs: a cache [rows, num_kv_heads, capacity, head_dim] a layer, which grows."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import cast

import numpy as np

from lockstep.gpu import cuda
from lockstep.gpu.attention.base import Arrays, Buffer, Calls, Chunks, PassTokens, SlicedAttention
from lockstep.gpu.kernels.step_kernels import Kernels
from lockstep.gpu.program import GpuExecutable
from lockstep.step.network import LayerAttention

FIRST_CAPACITY = 64


class TracedAttention(SlicedAttention):
    """The exported attention graphs as engines, over a contiguous cache."""

    def __init__(
        self,
        layers: Mapping[int, LayerAttention],
        dtype: np.dtype,
        rows: int,
        max_seq_len: int,
        kernels: Kernels,
        buffer: Buffer,
        stream: cuda.Stream,
    ):
        self._layers = layers
        self._buffer = buffer
        self._stream = stream
        self._dtype = dtype
        self._rows = rows
        self._max = max_seq_len
        self._kernels = kernels
        self.capacity = 0
        self._cache: dict[int, tuple[cuda.Array, ...]] = {}  # keys and values

    def reserve(self, ends: Mapping[int, int], lengths: np.ndarray) -> bool:
        needed = max([*ends.values(), int(lengths.max())])
        bucket = FIRST_CAPACITY
        while bucket < needed:
            bucket *= 2
        bucket = min(bucket, self._max)
        if self._cache and bucket <= self.capacity < 3 * bucket:
            return False
        grown = {}
        for index, layer_attention in self._layers.items():
            shape = layer_attention.cache
            grown[index] = tuple(
                cuda.zeros((self._rows, shape.num_kv_heads, bucket, dim), self._dtype, "the KV cache")
                for dim in (shape.head_dim, shape.value_head_dim)
            )
        used = int(lengths.max())
        for index, pair in self._cache.items() if used else ():
            for old, new in zip(pair, grown[index]):
                width = new.shape[3] * new.dtype.itemsize
                heads = new.shape[1]
                pitches = bucket * width, old.address, self.capacity * width
                self._stream.copy_rows(new.address, *pitches, used * width, self._rows * heads)
        self._stream.synchronize()  # the old arrays are freed now
        self._cache = grown
        self.capacity = bucket
        return True

    def reset(self, row: int) -> None:
        """Clear a row: masked numbers weigh 0, but 0 times a stale infinity would be NaN."""
        for array in (array for pair in self._cache.values() for array in pair):
            row_array = array[row : row + 1]
            self._stream.fill_zero(row_array.address, row_array.nbytes, row_array.nbytes, 1)

    def begin(self, tokens: PassTokens) -> None:
        """Do nothing: a chunk's first position is the length of its past."""

    def layout(self, tokens: PassTokens) -> None:
        """Return None: the calls of a chunk are of its row."""

    def _calls(self, index: int, values: Arrays, rows: cuda.Array, chunks: Chunks, own: bool) -> Calls:
        layer_attention, (keys, cached) = self._layers[index], self._cache[index]
        shape = layer_attention.cache
        total = values["attention"].shape[0]
        positions = values["position_ids"]
        new_key = self._buffer("key_out", (total, shape.num_kv_heads, shape.head_dim), self._dtype)
        new_value = self._buffer("value_out", (total, shape.num_kv_heads, shape.value_head_dim), self._dtype)
        calls: Calls = []

        def add(phase: str, tokens: slice, in_rows: slice, lengths: cuda.Array) -> None:
            inputs = {name: values[name][tokens] for name in ("query", "key", "value", "position_ids")}
            inputs |= {"past_key": keys[in_rows], "past_value": cached[in_rows], "past_lengths": lengths}
            inputs = {name: inputs[name] for name in layer_attention.inputs[phase]}
            made = {"attention": values["attention"], "key_out": new_key, "value_out": new_value}
            outputs = {name: array[tokens] for name, array in made.items()}
            engine = cast(GpuExecutable, layer_attention.engines[phase])  # of a network of GPU programs
            calls.append(("attention", engine.prepare(inputs, outputs, own)))

        if not chunks:  # a token's position is the length of its past
            add("decode", slice(0, total), slice(0, total), positions)
        for row, _start, low, high in chunks:  # likewise: that of a chunk's first token
            add("prefill", slice(low, high), slice(row, row + 1), positions[low : low + 1])
        arrays = self._stream, new_key, new_value, keys, cached, rows, positions
        calls.append(("cache", functools.partial(self._kernels.write_cache, *arrays)))
        return calls
