"""Fused attention over a paged KV cache, [pages, num_kv_heads, 64, head_dim] a layer (step/pages.py), or fp8."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import numpy as np

from lockstep.gpu import cuda
from lockstep.gpu.attention.base import Arrays, Buffer, Call, Calls, Part, PassTokens
from lockstep.gpu.attention.kernel_spec import PAGE, AttentionKernelSpec, DeviceRopeTables, PagedTokens, page_shape
from lockstep.gpu.attention.paged_decode import DecodeAttention, Scratch
from lockstep.gpu.attention.prompt import PromptAttention, PromptCall
from lockstep.gpu.attention.rope_kernel import RopeKernel
from lockstep.gpu.attention.rope_tables import read_rope_tables
from lockstep.gpu.staging import Staging
from lockstep.step.executable import HostExecutable
from lockstep.step.network import LayerAttention
from lockstep.step.pages import PageTables


class FusedAttention:
    """Fused attention of the layers `layers` (by number): see `base.Attention`."""

    def __init__(
        self,
        layers: Mapping[int, LayerAttention],
        dtype: np.dtype,
        fp8: bool,
        tables: PageTables,
        rows: int,
        max_seq_len: int,
        max_verify_tokens: int,
        largest_pass: int,
        wide: bool,
        buffer: Buffer,
        stream: cuda.Stream,
    ):
        """Allocate the cache.

        fp8: of e4m3 numbers. max_verify_tokens: rows of a step that verifies. largest_pass: tokens of a prefill pass.
        """
        self._layers = layers
        self._buffer = buffer
        self._stream = stream
        self._dtype = np.dtype(dtype)
        self._tables = tables
        pages_per_row = -(-max_seq_len // PAGE)
        pages = tables.pool.num_pages
        self.capacity = pages_per_row * PAGE
        self._host_table = np.zeros((rows, pages_per_row), np.int32)
        self._sent = [0] * rows  # pages of each row that the table on the device has
        self._table = cuda.zeros(self._host_table.shape, "i4")
        self._table_staging = Staging(self._table.nbytes, 1)
        self._verified = cuda.zeros((max_verify_tokens, pages_per_row), "i4")  # the page table of each row's slot
        self._verified_staging = Staging(self._verified.nbytes, 1)
        attentions = {id(layer_attention): layer_attention for layer_attention in layers.values()}
        self._rope_tables = {key: _device_rope_tables(each, max_seq_len) for key, each in attentions.items()}
        specs = self._specs = {key: _spec(each, self._dtype, wide, fp8) for key, each in attentions.items()}
        self._decode = {key: DecodeAttention(spec) for key, spec in specs.items()}
        self._rope = {key: RopeKernel(spec) for key, spec in specs.items()}
        self._by_row = {key: DecodeAttention(spec, by_row=True) for key, spec in specs.items() if spec.sinks}
        self._scratch = Scratch(specs.values(), max(rows, max_verify_tokens, largest_pass if self._by_row else 0))
        stored = np.dtype(np.uint8) if fp8 else self._dtype
        self._cache = {}
        for index, cache in ((index, layer_attention.cache) for index, layer_attention in layers.items()):
            dims = cache.head_dim, cache.value_head_dim
            self._cache[index] = tuple(
                cuda.zeros(page_shape(pages, cache.num_kv_heads, dim, fp8), stored, "the KV cache") for dim in dims
            )
        self._prompts = PromptAttention(list(specs.values()), rows, pages, pages_per_row, stream)

    def reserve(self, ends: Mapping[int, int], lengths: np.ndarray) -> bool:
        """Send the page tables of rows that grew; return False: their contents change, not the address."""
        grown = [row for row in ends if len(self._tables[row]) != self._sent[row]]
        for row in grown:
            pages = self._tables[row]
            self._host_table[row, : len(pages)] = pages
            self._sent[row] = len(pages)
        if grown:
            self._table_staging.send(self._stream, [(self._table, self._host_table)])
        return False

    def reset(self, row: int) -> None:
        """Forget the row's pages, whose contents are never read: kernels look at a row's length first."""
        self._sent[row] = 0

    def fork(self, slot: int, other: int, length: int) -> None:
        """Copy the page that is not full; the full ones stand in both tables."""
        self._sent[other] = 0
        full = length // PAGE
        if length % PAGE:
            source = self._tables[slot][full]
            to = self._tables[other][full]
            for array in self._arrays():
                self._stream.copy(array[to : to + 1], array[source : source + 1])

    def save(self, slot: int, length: int) -> np.ndarray:
        """Return the slot's pages, [pages, bytes of all layers] uint8, page-locked; keys are before values."""
        pages = self._tables[slot][: -(-length // PAGE)]
        saved = cuda.pinned((len(pages), self._tables.pool.page_nbytes), "u1")
        for host, array in self._places(saved, pages):
            self._stream.download(host, array)
        return saved

    def restore(self, slot: int, saved: np.ndarray) -> None:
        self._sent[slot] = 0
        for host, array in self._places(saved, self._tables[slot]):
            self._stream.upload(array, host)

    def _places(self, saved: np.ndarray, pages: Sequence[int]) -> Iterator[tuple[np.ndarray, cuda.Array]]:
        """Yield the views of each page of each array, in `saved` and on the device."""
        for row, page in zip(saved, pages):
            at = 0
            for array in self._arrays():
                place = array[page : page + 1]
                yield row[at : at + place.nbytes], place
                at += place.nbytes

    def _arrays(self) -> list[cuda.Array]:
        """Return keys and values of all layers, [pages, ...]; scales of fp8 lie in their pages."""
        return [array for pair in self._cache.values() for array in pair]

    def begin_verify(self, slots: Sequence[int]) -> None:
        """Send the page table of each row's slot."""
        self._verified_staging.send(self._stream, [(self._verified[: len(slots)], self._host_table[list(slots)])])

    def begin(self, tokens: PassTokens) -> None:
        """Send the lengths and pages of chunks."""
        self._prompts.begin(tokens, self._host_table)

    def layout(self, tokens: PassTokens) -> tuple[int, ...] | None:
        if self._by_row and tokens.num_decoding:
            return None
        return self._prompts.layout()

    def decode_calls(self, index: int, values: Arrays, rows: cuda.Array) -> Calls:
        return [self._attend(self._decode, index, *self._tokens(index, values, rows, self._table))]

    def token_calls(self, index: int, values: Arrays, rows: cuda.Array) -> Calls:
        """Return RoPE and the writes to the cache, which rows that decode make once more, to the bit."""
        tokens, _ = self._tokens(index, values, rows, self._table)
        return [self._apply_rope(index, tokens)[1]]

    def parts(self, index: int, values: Arrays, tokens: PassTokens) -> Iterator[Part]:
        count = tokens.decoding.shape[0]
        if count:
            yield Part(("decode", index, count), lambda: self._decode_part(index, values, tokens.decoding))
        key = id(self._layers[index])
        if key in self._by_row:  # cuDNN may have no sinks over pages
            yield Part(None, lambda: self._by_row_part(index, values, tokens))
            return
        for call in self._prompts.planned(self._specs[key], self._layers[index].variant.scale):
            which = None if call.key is None else ("prompts", index, *call.key)
            yield Part(which, functools.partial(self._prompt_part, index, values, tokens.rows, call))

    def _decode_part(self, index: int, values: Arrays, decoding: cuda.Array) -> Calls:
        """Return attention of the rows that decode; that of others is 0, which prompts write over."""
        own = {name: array[: decoding.shape[0]] for name, array in values.items()}
        return self.decode_calls(index, own, decoding)

    def _by_row_part(self, index: int, values: Arrays, tokens: PassTokens) -> Calls:
        of_prompts = slice(tokens.num_decoding, tokens.num_tokens)
        own = {name: array[of_prompts] for name, array in values.items()}
        return [self._attend(self._by_row, index, *self._tokens(index, own, tokens.rows[of_prompts], self._table))]

    def _prompt_part(self, index: int, values: Arrays, rows: cuda.Array, call: PromptCall) -> Calls:
        tokens, out = self._tokens(index, values, rows, self._table)
        query_out, _ = self._apply_rope(index, tokens)
        spec = self._specs[id(self._layers[index])]
        return [("attention", each) for each in self._prompts.calls(spec, call, query_out, tokens, out)]

    def verify_calls(self, index: int, values: Arrays, rows: cuda.Array) -> Calls:
        tokens, out = self._tokens(index, values, rows, self._verified)
        # All keys and values are in the cache before a row looks at those of rows before it.
        _, apply_rope = self._apply_rope(index, tokens)
        return [apply_rope, self._attend(self._decode, index, tokens, out)]

    def _apply_rope(self, index: int, tokens: PagedTokens) -> tuple[cuda.Array, tuple[str, Call]]:
        """Return where the queries with RoPE go, and the call that puts them there and fills the cache."""
        shape = *tokens.query.shape[:2], self._layers[index].cache.head_dim
        query_out = self._buffer("query_out", shape, self._dtype)
        launch = self._rope[id(self._layers[index])].launch
        return query_out, ("rotary and cache", functools.partial(launch, self._stream, tokens, query_out))

    def _tokens(
        self, index: int, values: Arrays, rows: cuda.Array, table: cuda.Array
    ) -> tuple[PagedTokens, cuda.Array]:
        """Return what kernels read of a layer's tokens, and the array that attention goes to."""
        layer_attention, (keys, cached) = self._layers[index], self._cache[index]
        variant = layer_attention.variant
        shape = layer_attention.cache
        total = values["attention"].shape[0]
        tokens = PagedTokens(
            values["query"].reshape(total, variant.num_heads, variant.query_dim),
            values["key"].reshape(total, shape.num_kv_heads, shape.head_dim),
            values["value"].reshape(total, shape.num_kv_heads, shape.value_head_dim),
            *(keys, cached, self._rope_tables[id(layer_attention)], rows, values["position_ids"], table),
        )
        return tokens, values["attention"].reshape(total, variant.num_heads, shape.value_head_dim)

    def _attend(
        self, kernels: Mapping[int, DecodeAttention], index: int, tokens: PagedTokens, out: cuda.Array
    ) -> tuple[str, Call]:
        kernel = kernels[id(self._layers[index])]
        scale = self._layers[index].variant.scale
        return "attention", functools.partial(kernel.launch, self._stream, tokens, out, scale, self._scratch)


def _device_rope_tables(layer_attention: LayerAttention, positions: int) -> DeviceRopeTables:
    """Return the RoPE tables of a layer, on the device."""
    rope = cast(HostExecutable, layer_attention.engines["rotary"])  # the backend loads it with ONNX Runtime
    tables = read_rope_tables(rope, positions, "attention: fused")
    return DeviceRopeTables(_up(tables.own), _up(tables.other), _up(tables.partner))


def _spec(layer_attention: LayerAttention, dtype: np.dtype, wide: bool, fp8: bool) -> AttentionKernelSpec:
    """Return what the kernels of a layer are compiled for."""
    variant = layer_attention.variant
    shape = layer_attention.cache
    (given,) = (io.dtype for io in variant.decode.signature.inputs if io.name == "query")
    heads = variant.num_heads, shape.num_kv_heads, shape.head_dim, shape.value_head_dim
    return AttentionKernelSpec(dtype.name, given, wide, *heads, variant.window, variant.sinks, fp8)


def _up(host: np.ndarray) -> cuda.Array:
    array = cuda.empty(host.shape, host.dtype)
    stream = cuda.Stream()
    stream.upload(array, host)
    stream.synchronize()
    return array
