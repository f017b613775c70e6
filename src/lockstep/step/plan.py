"""A plan: all calls of one step, bound to buffers, for one layout of requests. Running it allocates nothing.

Tokens are packed with the decoding rows first, one token a row, `low` to `high` without a gap, so that queries, the
cache and the attention's result are plain slices; a row in between that does not decode carries a dummy token of past
length 0, which costs less than gathering. Behind them come the prompts (or chunks), one after another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from lockstep.artifacts.signature import IO
from lockstep.step.kv_cache import KVCache
from lockstep.step.network import Block, Kind, Network


@dataclass(frozen=True)
class Chunk:
    """Several tokens of one request: `count` of them for cache row `row`, behind the `start` that it holds."""

    row: int
    start: int
    count: int


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a step lie: decoding rows `low:high`, then chunks. `num_logits` rows reach lm_head."""

    low: int
    high: int
    chunks: tuple[Chunk, ...]
    num_logits: int

    @property
    def num_decode(self) -> int:
        return self.high - self.low

    @property
    def num_tokens(self) -> int:
        return self.num_decode + sum(chunk.count for chunk in self.chunks)

    def offsets(self) -> list[int]:
        """The first packed token of each chunk."""
        found, offset = [], self.num_decode
        for chunk in self.chunks:
            found.append(offset)
            offset += chunk.count
        return found


class Plan:
    """Buffers and bound calls of a layout. Fill `token_ids`, `position_ids`, `logit_rows`, then `run`, then read
    `logits`."""

    def __init__(self, network: Network, cache: KVCache, layout: Layout):
        self.layout = layout
        self._cache = cache
        self._dims = {"num_tokens": layout.num_tokens, "num_requests": layout.num_logits}
        self._buffers: dict[tuple, list[np.ndarray]] = {}
        self.token_ids = np.zeros(layout.num_tokens, np.int64)
        self.position_ids = np.zeros(layout.num_tokens, np.int64)
        self.logit_rows = np.zeros(layout.num_logits, np.int64)
        self._new = [
            (
                np.empty((count, layout.num_decode, shape.num_kv_heads, shape.head_dim), network.dtype),
                np.empty((count, layout.num_decode, shape.num_kv_heads, shape.value_head_dim), network.dtype),
            )
            for shape, count in cache.group_shapes()
        ]
        values = {"token_ids": self.token_ids, "position_ids": self.position_ids, "logit_rows": self.logit_rows}
        self._calls: list[Callable[[], None]] = []
        self._add_block(network.embedding, values)
        for index, (block, kind) in enumerate(network.layers):
            self._add_block(block, values)
            self._add_attention(index, kind, values)
        self._add_block(network.exit, values)
        self.logits = values["logits"]

    def run(self) -> None:
        for call in self._calls:
            call()

    def write_decoded(self, rows: np.ndarray) -> None:
        """Put the decoding rows' new keys and values at their positions in the cache."""
        if len(rows):
            offsets = rows - self.layout.low
            starts = self.position_ids[offsets]
            for group, (keys, values) in enumerate(self._new):
                if len(rows) < self.layout.num_decode:
                    keys, values = keys[:, offsets], values[:, offsets]
                self._cache.write_each(group, rows, starts, keys, values)

    def _add_block(self, block: Block, values: dict[str, np.ndarray]) -> None:
        inputs = {io.name: values[io.key] for io in block.signature.inputs}
        outputs = {io.name: self._buffer(io) for io in block.signature.outputs}
        self._calls.append(block.run.prepare(inputs, outputs))
        values.update({io.key: outputs[io.name] for io in block.signature.outputs})

    def _add_attention(self, index: int, kind: Kind, values: dict[str, np.ndarray]) -> None:
        attention = self._buffer(kind.attention, self.layout.num_tokens)
        layout, cache = self.layout, self._cache
        if layout.num_decode:
            group, place = cache.place(index)
            keys, new_values = self._new[group]
            past = cache.view(index, layout.low, layout.high)
            lengths = self.position_ids[: layout.num_decode]  # a token's position is the length of its past
            self._add_call(
                kind,
                "decode",
                slice(0, layout.num_decode),
                values,
                past,
                lengths,
                attention,
                keys[place],
                new_values[place],
            )
        for chunk, offset in zip(layout.chunks, layout.offsets()):
            key, value = self._chunk_buffers(chunk, kind)
            past = cache.view(index, chunk.row, chunk.row + 1) if chunk.start else self._no_past(kind)
            lengths = np.array([chunk.start], np.int64)
            self._add_call(
                kind, "prefill", slice(offset, offset + chunk.count), values, past, lengths, attention, key, value
            )
            self._calls.append(functools.partial(cache.write, index, chunk.row, chunk.start, key, value))
        values["attention"] = attention

    def _add_call(
        self,
        kind: Kind,
        phase: str,
        tokens: slice,
        values: Mapping[str, np.ndarray],
        past: tuple[np.ndarray, np.ndarray],
        past_lengths: np.ndarray,
        attention: np.ndarray,
        key_out: np.ndarray,
        value_out: np.ndarray,
    ) -> None:
        inputs = {name: values[name][tokens] for name in ("query", "key", "value", "position_ids")}
        inputs |= {"past_key": past[0], "past_value": past[1], "past_lengths": past_lengths}
        inputs = {name: inputs[name] for name in kind.inputs[phase]}
        outputs = {"attention": attention[tokens], "key_out": key_out, "value_out": value_out}
        self._calls.append(kind.engines[phase].prepare(inputs, outputs))

    def _buffer(self, io: IO, first_dim: int | None = None) -> np.ndarray:
        """Two buffers a name, in turn: a block reads the value that it replaces."""
        shape = tuple(self._dims[dim] if isinstance(dim, str) else dim for dim in io.shape)
        shape = shape if first_dim is None else (first_dim, *shape[1:])
        pair = self._buffers.setdefault((io.key, shape), [])
        if len(pair) < 2:
            pair.append(np.empty(shape, io.numpy_dtype))
            return pair[-1]
        pair.reverse()
        return pair[1]

    def _chunk_buffers(self, chunk: Chunk, kind: Kind) -> tuple[np.ndarray, np.ndarray]:
        """Shared by all layers: each layer's keys and values are written to the cache before the next layer's are
        made."""
        shape = kind.cache
        pair = self._buffers.get((chunk, shape))
        if pair is None:
            dims = (chunk.count, shape.num_kv_heads)
            pair = [np.empty((*dims, dim), self._cache.dtype) for dim in (shape.head_dim, shape.value_head_dim)]
            self._buffers[(chunk, shape)] = pair
        return pair[0], pair[1]

    def _no_past(self, kind: Kind) -> tuple[np.ndarray, np.ndarray]:
        """One masked position: a prompt's first chunk need not look at the whole capacity."""
        shape = kind.cache
        key = np.zeros((1, shape.num_kv_heads, 1, shape.head_dim), self._cache.dtype)
        return key, np.zeros((1, shape.num_kv_heads, 1, shape.value_head_dim), self._cache.dtype)
