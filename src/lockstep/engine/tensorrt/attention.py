"""Attention over the KV cache on a GPU. Both forms have one signature: `reserve`, `reset`, `calls`.

TracedAttention runs the exported prefill and decode graphs, built as engines like the blocks: any kind, any version, three to ten times slower
than fused kernels at long contexts. Its cache is one array a layer, [rows, num_kv_heads, capacity, head_dim], whose capacity doubles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.engine.tensorrt import cuda
from lockstep.engine.tensorrt.kernels import Kernels

FIRST_CAPACITY = 64
Call = Callable[[], None]


def make_attention(network: Any, rows: int, max_seq_len: int, kernels: Kernels) -> TracedAttention:
    """The attention that the engine set was built for."""
    return TracedAttention(network, rows, max_seq_len, kernels)


class TracedAttention:
    """The exported graphs as engines, over a contiguous cache."""

    def __init__(self, network: Any, rows: int, max_seq_len: int, kernels: Kernels):
        self._layers = [kind for _, kind in network.layers]
        self._dtype, self._rows, self._max, self._kernels = network.dtype, rows, max_seq_len, kernels
        self.capacity = 0
        self._cache: list[tuple[cuda.Array, cuda.Array]] = []

    def reserve(self, length: int, lengths: np.ndarray, stream: cuda.Stream) -> bool:
        """Make room for rows of `length` tokens; True when the cache moved, so that plans must be made again."""
        needed = max(length, int(lengths.max()))
        bucket = FIRST_CAPACITY
        while bucket < needed:
            bucket *= 2
        bucket = min(bucket, self._max)
        if self._cache and bucket <= self.capacity < 3 * bucket:
            return False
        used, old, old_capacity = int(lengths.max()), self._cache, self.capacity
        self._cache = []
        for index, kind in enumerate(self._layers):
            pair = []
            for which, dim in enumerate((kind.cache.head_dim, kind.cache.value_head_dim)):
                array = cuda.zeros((self._rows, kind.cache.num_kv_heads, bucket, dim), self._dtype)
                if used:
                    width = dim * array.dtype.itemsize
                    source = old[index][which]
                    stream.copy_rows(array.address, bucket * width, source.address, old_capacity * width, used * width, self._rows * kind.cache.num_kv_heads)
                pair.append(array)
            self._cache.append((pair[0], pair[1]))
        stream.synchronize()  # the old arrays are freed now
        self.capacity = bucket
        return True

    def reset(self, row: int, stream: cuda.Stream) -> None:
        """Clear a row. What it held is masked and weighs 0, but 0 times a stale infinity would be NaN."""
        for array in (array for pair in self._cache for array in pair):
            row_array = array[row : row + 1]
            stream.fill_zero(row_array.address, row_array.nbytes, row_array.nbytes, 1)

    def calls(
        self,
        index: int,
        kind: Any,
        values: Mapping[str, cuda.Array],
        rows: cuda.Array,
        num_decode: int,
        chunks: Sequence[tuple[int, int, int, int]],
        buffer: Callable[..., cuda.Array],
        stream: cuda.Stream,
        own: bool,
    ) -> list[Call]:
        """The calls of one layer: attention of the packed tokens, and their keys and values into the cache."""
        shape, total = kind.cache, values["attention"].shape[0]
        keys, cached = self._cache[index]
        new_key = buffer("key_out", (total, shape.num_kv_heads, shape.head_dim), self._dtype)
        new_value = buffer("value_out", (total, shape.num_kv_heads, shape.value_head_dim), self._dtype)
        calls = []

        def add(phase: str, tokens: slice, past: tuple[cuda.Array, cuda.Array], lengths: cuda.Array) -> None:
            inputs = {name: values[name][tokens] for name in ("query", "key", "value", "position_ids")}
            inputs |= {"past_key": past[0], "past_value": past[1], "past_lengths": lengths}
            inputs = {name: inputs[name] for name in kind.inputs[phase]}
            outputs = {"attention": values["attention"][tokens], "key_out": new_key[tokens], "value_out": new_value[tokens]}
            calls.append(getattr(kind, phase).prepare(inputs, outputs, own))

        if num_decode:
            decoding = slice(0, num_decode)
            add("decode", decoding, (keys[decoding], cached[decoding]), values["position_ids"][decoding])  # a token's position is the length of its past
        for row, start, low, high in chunks:
            past = (keys[row : row + 1], cached[row : row + 1])
            add("prefill", slice(low, high), past, values["position_ids"][low : low + 1])  # likewise: that of a chunk's first token
        positions = values["position_ids"]
        calls.append(lambda: self._kernels.write_cache(stream, new_key, new_value, keys, cached, rows, positions))
        return calls
