"""Attention by the exported graphs, as engines, over a contiguous cache.

The cache is one array a layer, [rows, num_kv_heads, capacity, head_dim], whose capacity doubles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import numpy as np

from lockstep.gpu import cuda
from lockstep.gpu.attention.base import Call, Chunks
from lockstep.gpu.kernels.step_kernels import Kernels
from lockstep.gpu.program import GpuExecutable
from lockstep.step.network import LayerAttention

FIRST_CAPACITY = 64


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

    def layout(self, chunks: Chunks) -> None:
        """Return None: the calls of a chunk are of its row."""

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
            engine = cast(GpuExecutable, layer_attention.engines[phase])  # of a network of GPU programs
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
