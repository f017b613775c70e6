"""The calls of a step on the host, bound to buffers for one layout. Running them allocates nothing.

Packed tokens start with the decoding rows, one token per row. The rows of one capacity are contiguous, `low` to `high`,
so that queries, the cache and the attention output are plain slices. A row in between that doesn't decode has a dummy
token, which costs less than gathering; it is at the position after the row's last token, because an engine may write
its key and value to the cache. The chunks of prompts follow.

Each chunk is a separate call that reads only its past, not the row's whole capacity: so its bits depend on its request
only.

Tokens that are verified are packed among the chunks. Each runs the decode attention in a separate call, after which its
key and value are written to the cache: so it has the bits of a decode step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.artifacts.adapters import IDS
from lockstep.artifacts.signature import IO, concrete_shape
from lockstep.step.advance import Observer, PackedTokens
from lockstep.step.executable import Call, HostExecutable
from lockstep.step.kv_cache import CacheRow, KVCache
from lockstep.step.logits_pipeline import most_likely, most_likely_of_ranks, most_likely_of_shard
from lockstep.step.network import Block, LayerAttention, LayerState, Network
from lockstep.step.ranks import RankBlock


@dataclass(frozen=True)
class DecodeRows:
    """Rows `low` to `high`-1 of one capacity of the cache, with one token each."""

    capacity: int
    low: int
    high: int

    @property
    def count(self) -> int:
        return self.high - self.low


@dataclass(frozen=True)
class Chunk:
    """`count` tokens of a request that holds `start` tokens.

    cache_row: of its request. keeps_states: copy the states after the chunk to `HostStep.kept_states`.
    """

    cache_row: CacheRow
    start: int
    count: int
    keeps_states: bool = False

    @property
    def end(self) -> tuple[CacheRow, int]:
        return self.cache_row, self.start + self.count


@dataclass(frozen=True)
class Verified:
    """`count` tokens of a request, each computed as in a decode step. cache_row: of its request."""

    cache_row: CacheRow
    count: int


@dataclass(frozen=True)
class Layout:
    """The packed tokens of a step: decoding rows, then chunks and tokens that are verified.

    num_logits: rows that go through lm_head.
    """

    decoding: tuple[DecodeRows, ...]
    chunks: tuple[Chunk | Verified, ...]
    num_logits: int

    @property
    def is_reusable(self) -> bool:
        """Return whether later steps may have this layout: not with a chunk, which is at its position only once."""
        return all(isinstance(chunk, Verified) for chunk in self.chunks)

    @property
    def num_decode(self) -> int:
        return sum(rows.count for rows in self.decoding)

    @property
    def num_tokens(self) -> int:
        return self.num_decode + sum(chunk.count for chunk in self.chunks)

    def slices(self) -> list[slice]:
        """Return the packed tokens of each of `decoding`, then of each of `chunks`."""
        slices = []
        offset = 0
        for count in (*(rows.count for rows in self.decoding), *(chunk.count for chunk in self.chunks)):
            slices.append(slice(offset, offset + count))
            offset += count
        return slices


class RowAttention:
    """The decode attention of one row of the cache in one layer, bound once for all layouts.

    A call takes a token's query, key, value and position, writes its attention, and writes its key and value to the
    row.
    """

    def __init__(self, layer_attention: LayerAttention, past: tuple[np.ndarray, np.ndarray], dtype: np.dtype):
        signature = layer_attention.variant.decode.signature
        shape = layer_attention.cache
        position = np.zeros(1, np.int64)  # a token's position is the length of its past
        bound = {"past_key": past[0], "past_value": past[1], "past_lengths": position, "position_ids": position}
        self._inputs = {}
        for io in signature.inputs:  # without RoPE there are no positions
            self._inputs[io.name] = bound[io.name] if io.name in bound else _one_token(io)
        self._position = position
        self._attention = _one_token(layer_attention.attention)
        self._new = [np.empty((1, shape.num_kv_heads, dim), dtype) for dim in (shape.head_dim, shape.value_head_dim)]
        outputs = {"attention": self._attention, "key_out": self._new[0], "value_out": self._new[1]}
        self._call = layer_attention.engines["decode"].prepare(self._inputs, outputs)
        self._cached = [array[0].swapaxes(0, 1) for array in past]

    def __call__(self, inputs: Mapping[str, np.ndarray], attention: np.ndarray) -> None:
        for name in ("query", "key", "value"):
            self._inputs[name][:] = inputs[name]
        self._position[:] = inputs["position_ids"]
        self._call()
        attention[:] = self._attention
        for cached, new in zip(self._cached, self._new):
            cached[self._position[0]] = new[0]


def _one_token(io: IO) -> np.ndarray:
    return np.empty([1 if isinstance(dim, str) else dim for dim in io.shape], io.numpy_dtype)


class HostStep:
    """The buffers and bound calls of a layout.

    Fill `tokens`, `adapter_ids` and `logit_rows`, then `run`, then call `logits` or `most_likely`.
    """

    def __init__(
        self,
        network: Network,
        cache: KVCache,
        layout: Layout,
        rows: dict[tuple[int, CacheRow], RowAttention],
        observer: Observer | None = None,
    ):
        """Bind the calls of a layout. rows: the bound attentions by layer and row; new ones are added."""
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
        # New keys and values by `layout.decoding`, then by group of layers: all are written to the cache at the end.
        self._new = [_new_pairs(cache, rows.count) for rows in layout.decoding]
        values = {
            "token_ids": self.tokens.token_ids,
            "position_ids": self.tokens.position_ids,
            "logit_rows": self.logit_rows,
            IDS: self.adapter_ids,
        }
        self.kept_states: dict[tuple[CacheRow, int], list[np.ndarray]] = {}
        for chunk in layout.chunks:
            if isinstance(chunk, Chunk) and chunk.keeps_states:
                self.kept_states[chunk.end] = cache.empty_states()
        self.calls: list[Callable[[], None]] = []
        if observer is not None:
            self.calls.append(functools.partial(observer.step, self.tokens))
        self._add_block(network.embedding, values)
        self._decoded: Mapping[int, np.ndarray] = {}
        # One engine of all layers, if the backend has it and the step is a plain decode step.
        self._layers = None
        if len(layout.decoding) == 1 and not layout.chunks and observer is None:
            self._layers = network.decode_layers
        if self._layers is not None:
            self._add_decode_layers(self._layers, network, values)
        else:
            for index, (block, mixer) in enumerate(network.layers):
                self._add_block(block, values, index)
                if isinstance(mixer, LayerState):
                    self._add_state(index, mixer, values)
                else:
                    self._add_attention(index, mixer, values)
        self._exit = network.exit
        self._before_exit = dict(values)  # for `logits_after`, which runs the exit again for other rows
        self._add_exit(network.exit, values)

    def logits(self) -> np.ndarray:
        self._gather()
        return self._logits

    def most_likely(self) -> np.ndarray:
        """Return `most_likely` of the logits, after `run`; sharded logits are not gathered for it."""
        if not self._parts:
            return most_likely(self._logits.astype(np.float32))
        firsts = np.cumsum([0, *(part.shape[1] for part in self._parts)]).tolist()
        return most_likely_of_ranks([most_likely_of_shard(part, first) for part, first in zip(self._parts, firsts)])

    def run(self, decoded: Mapping[int, np.ndarray]) -> None:
        """Run the step, and write new states. decoded: see `write_decoded`."""
        self._decoded = decoded
        for call in self.calls:
            call()

    def logits_after(self, rows: np.ndarray) -> np.ndarray:
        """Return the logits [num_rows, vocab_size] after packed tokens `rows` [num_rows] int64; call it after `run`."""
        values = {**self._before_exit, "logit_rows": rows}
        dims = {**self._dims, "num_requests": len(rows)}
        inputs = _inputs(self._exit, values)
        outputs = {}
        for io in self._exit.signature.outputs:
            outputs[io.name] = np.empty(concrete_shape(io.shape, dims), io.numpy_dtype)
        self._exit.engine.prepare(inputs, outputs)()
        return outputs["logits"]

    def write_decoded(self, decoded: Mapping[int, np.ndarray]) -> None:
        """Write the decoding rows' new keys and values to the cache.

        decoded: by capacity, the rows that decode, ascending: the others' tokens are dummies.
        """
        if self._layers is not None:
            return  # that engine has written them
        for rows, tokens, new in zip(self.layout.decoding, self.slices, self._new):
            indices = decoded[rows.capacity]
            offsets = indices - rows.low
            starts = self.tokens.position_ids[tokens][offsets]
            for group, (keys, values) in enumerate(new):
                if len(indices) < rows.count:
                    keys = keys[:, offsets]
                    values = values[:, offsets]
                self._cache.write_each(group, rows.capacity, indices, starts, keys, values)

    def _add_block(self, block: Block, values: dict[str, np.ndarray], layer: int | None = None) -> None:
        inputs = _inputs(block, values)
        outputs = {io.name: self._buffer(io) for io in block.signature.outputs}
        self.calls.append(block.engine.prepare(inputs, outputs))
        if self._observer is not None and layer is not None:
            self.calls.append(functools.partial(self._observer.block, "block", layer, inputs, outputs))
        values.update({io.key: outputs[io.name] for io in block.signature.outputs})

    def _add_decode_layers(self, layers: HostExecutable, network: Network, values: dict[str, np.ndarray]) -> None:
        (rows,) = self.layout.decoding
        values["past_lengths"] = self.tokens.position_ids  # a token's position is the length of its past
        inputs = {name: array for name, array in values.items() if name in layers.inputs}
        for index in range(len(network.layers)):
            key, value = self._cache.view(index, rows.capacity, rows.low, rows.high)
            inputs[f"{index}.past_key"] = key
            inputs[f"{index}.past_value"] = value
        outputs = {}
        for io in network.exit.signature.inputs:
            if f"{io.key}_out" in layers.outputs:
                values[io.key] = outputs[f"{io.key}_out"] = self._buffer(io)
        self.calls.append(layers.prepare(inputs, outputs))

    def _add_exit(self, block: Block, values: Mapping[str, np.ndarray]) -> None:
        """Add the last call. Sharded logits are gathered only when `logits` is called."""
        inputs = _inputs(block, values)
        outputs = {io.name: self._buffer(io) for io in block.signature.outputs}
        self._logits = outputs["logits"]
        self._parts: Sequence[np.ndarray] = ()  # each rank's shard of the logits
        self._gather: Call = lambda: None
        if isinstance(block.engine, RankBlock):
            call, parts, self._gather = block.engine.prepare_parts(inputs, outputs)
            self._parts = parts.get("logits", ())
        else:
            call = block.engine.prepare(inputs, outputs)
        self.calls.append(call)
        if self._observer is not None:
            self.calls.append(functools.partial(self._observer.block, "exit", self._num_layers - 1, inputs, outputs))

    def _add_attention(self, index: int, layer_attention: LayerAttention, values: dict[str, np.ndarray]) -> None:
        attention = self._buffer(layer_attention.attention, self.layout.num_tokens)
        cache = self._cache
        slices = self.slices
        group, index_in_group = cache.layers[index]
        for rows, tokens, new in zip(self.layout.decoding, slices, self._new):
            key, value = cache.view(index, rows.capacity, rows.low, rows.high)
            lengths = self.tokens.position_ids[tokens]  # a token's position is the length of its past
            all_keys, all_values = new[group]
            inputs = _token_inputs(values, tokens) | {"past_key": key, "past_value": value, "past_lengths": lengths}
            outputs = {"key_out": all_keys[index_in_group], "value_out": all_values[index_in_group]}
            self._add_call(layer_attention, "decode", inputs, outputs | {"attention": attention[tokens]})
        for chunk, tokens in zip(self.layout.chunks, slices[len(self.layout.decoding) :]):
            if isinstance(chunk, Verified):
                self._add_verified(index, chunk.cache_row, tokens, layer_attention, values, attention)
                continue
            past_key, past_value = self._past(index, chunk, layer_attention)
            inputs = _token_inputs(values, tokens) | {"past_key": past_key, "past_value": past_value}
            inputs["past_lengths"] = np.array([chunk.start], np.int64)
            key, value = self._chunk_buffers(chunk, layer_attention)
            outputs = {"key_out": key, "value_out": value, "attention": attention[tokens]}
            self._add_call(layer_attention, "prefill", inputs, outputs)
            self.calls.append(functools.partial(cache.write, index, chunk.cache_row, chunk.start, key, value))
        values["attention"] = attention

    def _add_state(self, index: int, mixer: LayerState, values: dict[str, np.ndarray]) -> None:
        """Add the calls of a recurrent mixer: of rows that decode, then of each chunk.

        A request's chunks follow one another in the list, and each call starts with the state that the last one wrote.
        """
        output = self._buffer(mixer.attention, self.layout.num_tokens)
        slices = self.slices
        decoding = self.layout.decoding
        for rows, tokens in zip(decoding, slices):
            state = self._cache.state(index, rows.capacity, rows.low, rows.high)
            new = self._add_state_call(mixer, "decode", tokens, values, state, output)
            self.calls.append(functools.partial(self._write_states, rows, state, new))
        for chunk, tokens in zip(self.layout.chunks, slices[len(decoding) :]):
            state = self._cache.state(index, chunk.cache_row.capacity, chunk.cache_row.index, chunk.cache_row.index + 1)
            new = self._add_state_call(mixer, "prefill", tokens, values, state, output)
            self.calls.append(functools.partial(np.copyto, state, new))
            if isinstance(chunk, Chunk) and chunk.end in self.kept_states:
                group, number = self._cache.layers[index]
                self.calls.append(functools.partial(np.copyto, self.kept_states[chunk.end][group][number], new[0]))
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
        """Add a call; return the buffer of its new states, which calls share because they are copied right after."""
        (new,) = self._buffers.setdefault(("state", state.shape), [np.empty(state.shape, state.dtype)])
        inputs = {name: values[name][tokens] for name in mixer.variant.inputs}
        inputs["past_state"] = state
        self.calls.append(mixer.engines[phase].prepare(inputs, {"attention": output[tokens], "state_out": new}))
        return new

    def _write_states(self, rows: DecodeRows, state: np.ndarray, new: np.ndarray) -> None:
        """Write the new states of the rows that decode, and keep those of the rows in between."""
        decoded = self._decoded[rows.capacity] - rows.low
        if len(decoded) == rows.count:
            np.copyto(state, new)
        else:
            state[decoded] = new[decoded]

    def _add_verified(
        self,
        index: int,
        cache_row: CacheRow,
        tokens: slice,
        layer_attention: LayerAttention,
        values: Mapping[str, np.ndarray],
        attention: np.ndarray,
    ) -> None:
        """Add a decode call for each token of a draft, so that a verified token has the bits of a decoded one."""
        row = self._rows.get((index, cache_row))
        if row is None:
            past = self._cache.view(index, cache_row.capacity, cache_row.index, cache_row.index + 1)
            row = self._rows[index, cache_row] = RowAttention(layer_attention, past, self._cache.dtype)
        for number in range(tokens.start, tokens.stop):
            token = slice(number, number + 1)
            self.calls.append(functools.partial(row, _token_inputs(values, token), attention[token]))

    def _past(self, index: int, chunk: Chunk, layer_attention: LayerAttention) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys and values of a chunk's past, copied by a call before it, contiguous.

        A prompt's first chunk has one masked position.
        """
        shape = layer_attention.cache
        length = max(chunk.start, 1)  # graphs take no empty past; `past_lengths` is 0
        pair = self._buffers.get(("past", chunk, shape))
        if pair is None:
            dims = (1, shape.num_kv_heads, length)
            pair = [np.zeros((*dims, dim), self._cache.dtype) for dim in (shape.head_dim, shape.value_head_dim)]
            self._buffers[("past", chunk, shape)] = pair
        if chunk.start:
            row = self._cache.view(index, chunk.cache_row.capacity, chunk.cache_row.index, chunk.cache_row.index + 1)
            for buffer, cached in zip(pair, row):
                self.calls.append(functools.partial(np.copyto, buffer, cached[:, :, :length]))
        return pair[0], pair[1]

    def _add_call(
        self,
        layer_attention: LayerAttention,
        phase: str,
        inputs: Mapping[str, np.ndarray],
        outputs: Mapping[str, np.ndarray],
    ) -> None:
        """Add a call of attention; inputs: all that some variant reads."""
        read = {name: inputs[name] for name in layer_attention.inputs[phase]}
        self.calls.append(layer_attention.engines[phase].prepare(read, outputs))

    def _buffer(self, io: IO, first_dim: int | None = None) -> np.ndarray:
        """Return one of two alternating buffers of a name, because a block reads the value that it replaces."""
        shape = concrete_shape(io.shape, self._dims)
        if first_dim is not None:
            shape = (first_dim, *shape[1:])
        pair = self._buffers.setdefault((io.key, shape, io.dtype), [])  # a recurrence's key is wider than attention's
        if len(pair) < 2:
            pair.append(np.empty(shape, io.numpy_dtype))
            return pair[-1]
        pair.reverse()
        return pair[1]

    def _chunk_buffers(self, chunk: Chunk, layer_attention: LayerAttention) -> tuple[np.ndarray, np.ndarray]:
        """Return buffers for a chunk's new keys and values, which layers share: each layer copies them to the cache."""
        shape = layer_attention.cache
        pair = self._buffers.get((chunk, shape))
        if pair is None:
            dims = (chunk.count, shape.num_kv_heads)
            pair = [np.empty((*dims, dim), self._cache.dtype) for dim in (shape.head_dim, shape.value_head_dim)]
            self._buffers[(chunk, shape)] = pair
        return pair[0], pair[1]


def _new_pairs(cache: KVCache, rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return buffers for the new keys and values of each group of layers, [layers, rows, num_kv_heads, dim]."""
    pairs = []
    for shape, layers in cache.groups:
        dims = layers, rows, shape.num_kv_heads
        keys = np.empty((*dims, shape.head_dim), cache.dtype)
        values = np.empty((*dims, shape.value_head_dim), cache.dtype)
        pairs.append((keys, values))
    return pairs


def _token_inputs(values: Mapping[str, np.ndarray], tokens: slice) -> dict[str, np.ndarray]:
    return {name: values[name][tokens] for name in ("query", "key", "value", "position_ids")}


def _inputs(block: Block, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    inputs = {}
    for io in block.signature.inputs:
        inputs[io.name] = block.adapters[io.name] if io.name in block.adapters else values[io.key]
    return inputs
