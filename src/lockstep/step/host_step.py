"""The calls of one step on the host, bound to buffers, for one layout.

Running them allocates nothing.

Tokens are packed with the decoding rows first, one token a row. Rows of one capacity of the cache lie together, `low`
to `high` without a gap, so that queries, the cache and the attention's result are plain slices; a row in between that
does not decode carries a dummy token, which costs less than gathering. It stands behind what the row holds, for an
engine may put its key and value into the cache. Behind them come the prompts (or chunks), one after another.

A chunk reads just its own past, not the row's whole capacity, and is one call of its own: what it computes depends on
its request alone, to the bit.

Tokens that are verified lie among the chunks. Their attention is that of decoding, one call a token, behind each of
which its key and value go to the cache: so each token's bits are those of a step of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lockstep.artifacts.adapters import IDS
from lockstep.artifacts.signature import IO
from lockstep.step.executable import HostExecutable, Run
from lockstep.step.greedy import largest, most_likely, most_likely_of_ranks
from lockstep.step.kv_cache import CacheRow, KVCache
from lockstep.step.network import Block, LayerAttention, LayerState, Network
from lockstep.step.packing import PackedTokens
from lockstep.step.ranks import RankBlock


@dataclass(frozen=True)
class Rows:
    """Rows `low` to `high`-1 of one capacity of the cache, which bring one token each."""

    capacity: int
    low: int
    high: int

    @property
    def count(self) -> int:
        return self.high - self.low


@dataclass(frozen=True)
class Chunk:
    """`count` tokens of one request, behind the `start` tokens that it holds.

    place: its row of the cache. keeps_states: a copy of the states behind it goes to `HostStep.kept_states`.
    """

    place: CacheRow
    start: int
    count: int
    keeps_states: bool = False

    @property
    def end(self) -> tuple[CacheRow, int]:
        return self.place, self.start + self.count


@dataclass(frozen=True)
class Verified:
    """`count` tokens of one request, each computed as in a step of its own. place: its row of the cache."""

    place: CacheRow
    count: int


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a step lie: decoding rows, then chunks, and tokens that are verified.

    `num_logits` rows reach lm_head.
    """

    decoding: tuple[Rows, ...]
    chunks: tuple[Chunk | Verified, ...]
    num_logits: int

    @property
    def comes_again(self) -> bool:
        """Return whether steps of this layout may follow each other: a chunk's place in its prompt comes once."""
        return all(isinstance(chunk, Verified) for chunk in self.chunks)

    @property
    def num_decode(self) -> int:
        return sum(rows.count for rows in self.decoding)

    @property
    def num_tokens(self) -> int:
        return self.num_decode + sum(chunk.count for chunk in self.chunks)

    def slices(self) -> list[slice]:
        """Return the packed tokens of each of `decoding`, then of each of `chunks`."""
        found = []
        offset = 0
        for count in (*(rows.count for rows in self.decoding), *(chunk.count for chunk in self.chunks)):
            found.append(slice(offset, offset + count))
            offset += count
        return found


class RowAttention:
    """The attention of one row of the cache in one layer, as it decodes: bound once, for all layouts.

    Call it with a token's query, key, value and position; it gives the token's attention, and puts its key and value
    into the row.
    """

    def __init__(self, layer_attention: LayerAttention, past: tuple[np.ndarray, np.ndarray], dtype: np.dtype):
        signature = layer_attention.variant.decode.signature
        shape = layer_attention.cache
        position = np.zeros(1, np.int64)  # a token's position is the length of its past
        own = {"past_key": past[0], "past_value": past[1], "past_lengths": position, "position_ids": position}
        self._inputs = {io.name: own[io.name] if io.name in own else _one_token(io) for io in signature.inputs}
        self._position = position
        self._attention = _one_token(layer_attention.attention)
        self._new = [np.empty((1, shape.num_kv_heads, dim), dtype) for dim in (shape.head_dim, shape.value_head_dim)]
        outputs = {"attention": self._attention, "key_out": self._new[0], "value_out": self._new[1]}
        self._run = layer_attention.engines["decode"].prepare(self._inputs, outputs)
        self._cached = [array[0].swapaxes(0, 1) for array in past]

    def __call__(self, given: Mapping[str, np.ndarray], attention: np.ndarray) -> None:
        for name in ("query", "key", "value"):
            self._inputs[name][:] = given[name]
        self._position[:] = given["position_ids"]
        self._run()
        attention[:] = self._attention
        for cached, new in zip(self._cached, self._new):
            cached[self._position[0]] = new[0]


def _one_token(io: IO) -> np.ndarray:
    """Return a buffer for one token of an input or output."""
    return np.empty([1 if isinstance(dim, str) else dim for dim in io.shape], io.numpy_dtype)


class Observer(Protocol):
    """Is shown what passes between the blocks of a step, while it runs; arrays are read at once."""

    def step(self, tokens: PackedTokens) -> None: ...

    def block(self, part: str, layer: int, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
        """Show a block. part: "block" before the attention of `layer`, or "exit", whose rows are `logit_rows`."""


class HostStep:
    """Buffers and bound calls of a layout.

    Fill `tokens`, `adapter_ids`, `logit_rows`, then `run`, then ask for `logits`, or just for
    `most_likely`.
    """

    def __init__(
        self,
        network: Network,
        cache: KVCache,
        layout: Layout,
        rows: dict[tuple[int, CacheRow], RowAttention],
        decode_layers: HostExecutable | None,
        observer: Observer | None = None,
    ):
        """Bind the calls of a layout. rows: by layer, those that are bound already; new ones are added."""
        self._observer = observer
        self._num_layers = len(network.layers)
        self.layout = layout
        self.slices = layout.slices()
        self._rows = rows
        self._cache = cache
        self._dims = {"num_tokens": layout.num_tokens, "num_requests": layout.num_logits}
        self._buffers: dict[tuple, list[np.ndarray]] = {}
        self.tokens = PackedTokens.empty(layout.num_tokens)
        self.adapter_ids = np.full(layout.num_tokens, -1, np.int64)
        self.logit_rows = np.zeros(layout.num_logits, np.int64)
        # new keys and values of the rows that decode: of each of `layout.decoding`, for each group of layers
        self._new = [
            [
                (
                    np.empty((count, rows.count, shape.num_kv_heads, shape.head_dim), network.dtype),
                    np.empty((count, rows.count, shape.num_kv_heads, shape.value_head_dim), network.dtype),
                )
                for shape, count in cache.group_shapes()
            ]
            for rows in layout.decoding
        ]
        tokens = self.tokens
        logit_rows = self.logit_rows
        values = {"token_ids": tokens.token_ids, "position_ids": tokens.position_ids, "logit_rows": logit_rows}
        values[IDS] = self.adapter_ids
        self.kept_states = {
            chunk.end: cache.empty_states()
            for chunk in layout.chunks
            if isinstance(chunk, Chunk) and chunk.keeps_states
        }
        self._calls: list[Callable[[], None]] = []
        if observer is not None:
            self._calls.append(functools.partial(observer.step, self.tokens))
        self._add_block(network.embedding, values)
        self._decoded: Mapping[int, np.ndarray] = {}
        self._layers = decode_layers if len(layout.decoding) == 1 and not layout.chunks else None
        if self._layers is not None:
            self._add_decode_layers(self._layers, network, values)
        for index, (block, mixer) in enumerate(network.layers if self._layers is None else ()):
            self._add_block(block, values, index)
            if isinstance(mixer, LayerState):
                self._add_state(index, mixer, values)
            else:
                self._add_attention(index, mixer, values)
        self._exit = network.exit
        self._before_exit = dict(values)
        self._add_exit(network.exit, values)

    def logits(self) -> np.ndarray:
        """Return the logits [num_logits, vocab_size], after `run`."""
        self._gather()
        return self._logits

    def most_likely(self) -> np.ndarray:
        """Return the token `greedy.most_likely` of each row of the logits, after `run`.

        Ranks that have parts of the logits tell their own tokens, and no logits are gathered.
        """
        if not self._parts:
            return most_likely(self._logits.astype(np.float32))
        firsts = np.cumsum([0, *(part.shape[1] for part in self._parts)]).tolist()
        return most_likely_of_ranks([largest(part, first) for part, first in zip(self._parts, firsts)])

    def run(self, decoded: Mapping[int, np.ndarray]) -> None:
        """Run the step. decoded: as of `write_decoded`, of which new states are written as they come."""
        self._decoded = decoded
        for call in self._calls:
            call()

    def logits_behind(self, rows: np.ndarray) -> np.ndarray:
        """Return the logits behind any packed tokens, after `run`.

        rows: int64 [num_rows]. Returns [num_rows, vocab_size].
        """
        values = {**self._before_exit, "logit_rows": rows}
        dims = {**self._dims, "num_requests": len(rows)}
        inputs = _inputs(self._exit, values)
        outputs = {
            io.name: np.empty([dims[dim] if isinstance(dim, str) else dim for dim in io.shape], io.numpy_dtype)
            for io in self._exit.signature.outputs
        }
        self._exit.run.prepare(inputs, outputs)()
        return outputs["logits"]

    def write_decoded(self, decoded: Mapping[int, np.ndarray]) -> None:
        """Write the decoding rows' new keys and values to the cache.

        They go to the rows' positions. decoded: by capacity, the rows that decode, ascending.
        """
        if self._layers is not None:
            return  # which wrote them
        for part, tokens, new in zip(self.layout.decoding, self.slices, self._new):
            rows = decoded[part.capacity]
            offsets = rows - part.low
            starts = self.tokens.position_ids[tokens][offsets]
            for group, (keys, values) in enumerate(new):
                if len(rows) < part.count:
                    keys = keys[:, offsets]
                    values = values[:, offsets]
                self._cache.write_each(group, part.capacity, rows, starts, keys, values)

    def _add_block(self, block: Block, values: dict[str, np.ndarray], layer: int | None = None) -> None:
        inputs = _inputs(block, values)
        outputs = {io.name: self._buffer(io) for io in block.signature.outputs}
        self._calls.append(block.run.prepare(inputs, outputs))
        if self._observer is not None and layer is not None:
            self._calls.append(functools.partial(self._observer.block, "block", layer, inputs, outputs))
        values.update({io.key: outputs[io.name] for io in block.signature.outputs})

    def _add_decode_layers(self, layers: HostExecutable, network: Network, values: dict[str, np.ndarray]) -> None:
        (part,) = self.layout.decoding
        values["past_lengths"] = self.tokens.position_ids  # a token's position is the length of its past
        inputs = {name: array for name, array in values.items() if name in layers.inputs}
        for index in range(len(network.layers)):
            key, value = self._cache.view(index, part.capacity, part.low, part.high)
            inputs |= {f"{index}.past_key": key, f"{index}.past_value": value}
        ends = [io for io in network.exit.signature.inputs if f"{io.key}_out" in layers.outputs]
        values.update({io.key: self._buffer(io) for io in ends})
        self._calls.append(layers.prepare(inputs, {f"{io.key}_out": values[io.key] for io in ends}))

    def _add_exit(self, block: Block, values: Mapping[str, np.ndarray]) -> None:
        """Add the last call; parts of the logits are gathered when they are asked for."""
        outputs = {io.name: self._buffer(io) for io in block.signature.outputs}
        self._logits = outputs["logits"]
        self._parts: Sequence[np.ndarray] = ()  # of the logits, by rank, where each has one
        self._gather: Run = _no_gather
        if isinstance(block.run, RankBlock):
            call, parts, self._gather = block.run.prepare_parts(_inputs(block, values), outputs)
            self._parts = parts.get("logits", ())
        else:
            call = block.run.prepare(_inputs(block, values), outputs)
        self._calls.append(call)
        if self._observer is not None:
            shown = self._num_layers - 1, _inputs(block, values), outputs
            self._calls.append(functools.partial(self._observer.block, "exit", *shown))

    def _add_attention(self, index: int, layer_attention: LayerAttention, values: dict[str, np.ndarray]) -> None:
        attention = self._buffer(layer_attention.attention, self.layout.num_tokens)
        cache = self._cache
        slices = self.slices
        group, index_in_group = cache.layer(index)
        for part, tokens, new in zip(self.layout.decoding, slices, self._new):
            past = cache.view(index, part.capacity, part.low, part.high)
            lengths = self.tokens.position_ids[tokens]  # a token's position is the length of its past
            keys, new_values = (array[index_in_group] for array in new[group])
            self._add_call(layer_attention, "decode", tokens, values, past, lengths, attention, keys, new_values)
        for chunk, tokens in zip(self.layout.chunks, slices[len(self.layout.decoding) :]):
            if isinstance(chunk, Verified):
                self._add_verified(index, chunk.place, tokens, layer_attention, values, attention)
                continue
            key, value = self._chunk_buffers(chunk, layer_attention)
            past = self._past(index, chunk, layer_attention)
            lengths = np.array([chunk.start], np.int64)
            self._add_call(layer_attention, "prefill", tokens, values, past, lengths, attention, key, value)
            self._calls.append(functools.partial(cache.write, index, chunk.place, chunk.start, key, value))
        values["attention"] = attention

    def _add_state(self, index: int, mixer: LayerState, values: dict[str, np.ndarray]) -> None:
        """Add the calls of a mixer with a state: rows that decode, then each chunk behind the one before it."""
        output = self._buffer(mixer.attention, self.layout.num_tokens)
        slices = self.slices
        decoding = self.layout.decoding
        for part, tokens in zip(decoding, slices):
            state = self._cache.state(index, part.capacity, part.low, part.high)
            new = self._add_state_call(mixer, "decode", tokens, values, state, output)
            self._calls.append(functools.partial(self._write_states, part, state, new))
        for chunk, tokens in zip(self.layout.chunks, slices[len(decoding) :]):
            state = self._cache.state(index, chunk.place.capacity, chunk.place.row, chunk.place.row + 1)
            new = self._add_state_call(mixer, "prefill", tokens, values, state, output)
            self._calls.append(functools.partial(np.copyto, state, new))
            if isinstance(chunk, Chunk) and chunk.end in self.kept_states:
                group, number = self._cache.layer(index)
                self._calls.append(functools.partial(np.copyto, self.kept_states[chunk.end][group][number], new[0]))
        values["attention"] = output

    def _add_state_call(
        self,
        mixer: LayerState,
        phase: str,
        tokens: slice,
        values: Mapping[str, np.ndarray],
        state: np.ndarray,
        output: np.ndarray,
    ) -> np.ndarray:
        """Add a call; return the buffer of its new states, shared by calls of this shape: each is written at once."""
        (new,) = self._buffers.setdefault(("state", state.shape), [np.empty(state.shape, state.dtype)])
        inputs = {**{name: values[name][tokens] for name in mixer.variant.inputs}, "past_state": state}
        self._calls.append(mixer.engines[phase].prepare(inputs, {"attention": output[tokens], "state_out": new}))
        return new

    def _write_states(self, part: Rows, state: np.ndarray, new: np.ndarray) -> None:
        """Write the new states of the rows that decode; those in between stay as they are."""
        rows = self._decoded[part.capacity] - part.low
        if len(rows) == part.count:
            np.copyto(state, new)
        else:
            state[rows] = new[rows]

    def _add_verified(
        self,
        index: int,
        place: CacheRow,
        tokens: slice,
        layer_attention: LayerAttention,
        values: Mapping[str, np.ndarray],
        attention: np.ndarray,
    ) -> None:
        row = self._rows.get((index, place))
        if row is None:
            past = self._cache.view(index, place.capacity, place.row, place.row + 1)
            row = self._rows[index, place] = RowAttention(layer_attention, past, self._cache.dtype)
        for number in range(tokens.start, tokens.stop):
            token = slice(number, number + 1)
            given = {name: values[name][token] for name in ("query", "key", "value", "position_ids")}
            self._calls.append(functools.partial(row, given, attention[token]))

    def _past(self, index: int, chunk: Chunk, layer_attention: LayerAttention) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys and values that a chunk looks at.

        They are a contiguous copy of its past, made by a call before it; for a prompt's first chunk one masked
        position.
        """
        shape = layer_attention.cache
        length = max(chunk.start, 1)
        pair = self._buffers.get(("past", chunk, shape))
        if pair is None:
            dims = (1, shape.num_kv_heads, length)
            pair = [np.zeros((*dims, dim), self._cache.dtype) for dim in (shape.head_dim, shape.value_head_dim)]
            self._buffers[("past", chunk, shape)] = pair
        if chunk.start:
            row = self._cache.view(index, chunk.place.capacity, chunk.place.row, chunk.place.row + 1)
            for own, cached in zip(pair, row):
                self._calls.append(functools.partial(np.copyto, own, cached[:, :, :length]))
        return pair[0], pair[1]

    def _add_call(
        self,
        layer_attention: LayerAttention,
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
        inputs = {name: inputs[name] for name in layer_attention.inputs[phase]}
        outputs = {"attention": attention[tokens], "key_out": key_out, "value_out": value_out}
        self._calls.append(layer_attention.engines[phase].prepare(inputs, outputs))

    def _buffer(self, io: IO, first_dim: int | None = None) -> np.ndarray:
        """Return one of two buffers of a name, in turn.

        A block reads the value that it replaces.
        """
        shape = tuple(self._dims[dim] if isinstance(dim, str) else dim for dim in io.shape)
        shape = shape if first_dim is None else (first_dim, *shape[1:])
        pair = self._buffers.setdefault((io.key, shape, io.dtype), [])  # a recurrence's key is wider than attention's
        if len(pair) < 2:
            pair.append(np.empty(shape, io.numpy_dtype))
            return pair[-1]
        pair.reverse()
        return pair[1]

    def _chunk_buffers(self, chunk: Chunk, layer_attention: LayerAttention) -> tuple[np.ndarray, np.ndarray]:
        """Return the buffers of a chunk's new keys and values, shared by all layers.

        Each layer's are written to the cache before the next layer's are made.
        """
        shape = layer_attention.cache
        pair = self._buffers.get((chunk, shape))
        if pair is None:
            dims = (chunk.count, shape.num_kv_heads)
            pair = [np.empty((*dims, dim), self._cache.dtype) for dim in (shape.head_dim, shape.value_head_dim)]
            self._buffers[(chunk, shape)] = pair
        return pair[0], pair[1]


def _no_gather() -> None:
    """Do nothing: the logits are whole."""


def _inputs(block: Block, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what a block reads: values of the step, and the arrays of adapters."""
    own = block.adapters
    return {io.name: own[io.name] if io.name in own else values[io.key] for io in block.signature.inputs}
