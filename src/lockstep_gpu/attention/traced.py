"""Attention by the exported graphs, over a cache [rows, num_kv_heads, capacity, head_dim] per layer, which grows."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import cast

import numpy as np

from lockstep.step.network import LayerAttention
from lockstep_gpu import cuda
from lockstep_gpu.attention.base import Arrays, Buffer, Calls, PassTokens, SlicedAttention
from lockstep_gpu.kernels.step_kernels import Kernels
from lockstep_gpu.plan import Chunks
from lockstep_gpu.program import GpuExecutable

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
        self.cache: dict[int, tuple[cuda.Array, cuda.Array]] = {}  # keys and values, by layer

    def reserve(self, lengths_after: Mapping[int, int], lengths: np.ndarray) -> bool:
        used = int(lengths.max())
        needed = max([*lengths_after.values(), used])
        capacity = FIRST_CAPACITY
        while capacity < needed:
            capacity *= 2
        capacity = min(capacity, self._max)
        # Shrink only below a third, so that lengths around a power of two don't reallocate at each step.
        if self.cache and capacity <= self.capacity < 3 * capacity:
            return False
        cache = {}
        for index, layer_attention in self._layers.items():
            shape = layer_attention.cache
            keys = self._rows, shape.num_kv_heads, capacity, shape.head_dim
            values = self._rows, shape.num_kv_heads, capacity, shape.value_head_dim
            what = "the KV cache"
            cache[index] = cuda.zeros(keys, self._dtype, what), cuda.zeros(values, self._dtype, what)
        if used:
            for index, arrays in self.cache.items():
                for old, new in zip(arrays, cache[index]):
                    rows = self._rows * new.shape[1]
                    width = new.shape[3] * new.dtype.itemsize
                    pitch = capacity * width
                    old_pitch = self.capacity * width
                    self._stream.copy_rows(new.address, pitch, old.address, old_pitch, used * width, rows)
        self._stream.synchronize()  # before the old arrays are freed
        self.cache = cache
        self.capacity = capacity
        return True

    def reset(self, row: int) -> None:
        """Clear a row: masked elements have weight 0, but 0 times a stale infinity would be NaN."""
        for arrays in self.cache.values():
            for array in arrays:
                row_array = array[row : row + 1]
                self._stream.fill_zero(row_array.address, row_array.nbytes, row_array.nbytes, 1)

    def begin(self, tokens: PassTokens) -> None:
        """Do nothing: a chunk's first position is the length of its past."""

    def layout(self, tokens: PassTokens) -> None:
        """Return None: the calls of a chunk depend on its row."""

    def _calls(self, index: int, values: Arrays, rows: cuda.Array, chunks: Chunks, captured: bool) -> Calls:
        layer_attention = self._layers[index]
        cached_keys, cached_values = self.cache[index]
        shape = layer_attention.cache
        total = values["attention"].shape[0]
        positions = values["position_ids"]
        new_key = self._buffer("key_out", (total, shape.num_kv_heads, shape.head_dim), self._dtype)
        new_value = self._buffer("value_out", (total, shape.num_kv_heads, shape.value_head_dim), self._dtype)
        calls: Calls = []

        def add(phase: str, tokens: slice, cache_rows: slice, past_lengths: cuda.Array) -> None:
            arrays = {name: values[name][tokens] for name in ("query", "key", "value", "position_ids")}
            arrays["past_key"] = cached_keys[cache_rows]
            arrays["past_value"] = cached_values[cache_rows]
            arrays["past_lengths"] = past_lengths
            # An engine lacks the inputs that its variant does not read, such as positions without RoPE.
            inputs = {name: arrays[name] for name in layer_attention.inputs[phase]}
            outputs = {
                "attention": values["attention"][tokens],
                "key_out": new_key[tokens],
                "value_out": new_value[tokens],
            }
            engine = cast(GpuExecutable, layer_attention.engines[phase])  # of a network of GPU programs
            calls.append(("attention", engine.prepare(inputs, outputs, captured)))

        # The length of a token's past is its position; that of a chunk is the position of its first token.
        if not chunks:
            add("decode", slice(0, total), slice(0, total), positions)
        for row, _start, low, high in chunks:
            add("prefill", slice(low, high), slice(row, row + 1), positions[low : low + 1])
        arrays = new_key, new_value, cached_keys, cached_values, rows, positions
        calls.append(("cache", functools.partial(self._kernels.write_cache, self._stream, *arrays)))
        return calls
