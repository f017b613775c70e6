"""Fused attention over a paged KV cache, [pages, num_kv_heads, 64, head_dim] per layer (step/pages.py), or fp8."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from lockstep.step.executable import Call, HostExecutable
from lockstep.step.network import LayerAttention
from lockstep.step.pages import PageTables
from lockstep_gpu import cuda
from lockstep_gpu.attention.base import Arrays, Buffer, Calls, Part, PassTokens
from lockstep_gpu.attention.kernel_spec import PAGE, AttentionKernelSpec, DeviceRopeTables, PagedTokens, page_shape
from lockstep_gpu.attention.page_kernels import RopeKernel
from lockstep_gpu.attention.paged_decode import DecodeAttention, Scratch
from lockstep_gpu.attention.prompt import PromptAttention, PromptCall
from lockstep_gpu.attention.rope_tables import read_rope_tables
from lockstep_gpu.plan import MAX_VERIFY_TOKENS, StepLimits
from lockstep_gpu.staging import Staging


@dataclass(frozen=True)
class _Variant:
    """What the layers of an attention variant share.

    by_row: the decode kernel for prompts, where cuDNN has no attention of this variant.
    """

    spec: AttentionKernelSpec
    scale: float
    rope_tables: DeviceRopeTables
    rope: RopeKernel
    decode: DecodeAttention
    by_row: DecodeAttention | None

    @classmethod
    def of(cls, layer_attention: LayerAttention, dtype: np.dtype, wide: bool, fp8: bool, max_seq_len: int) -> _Variant:
        # Backends load the graph of RoPE with ONNX Runtime.
        graph = cast(HostExecutable, layer_attention.engines["rotary"])
        tables = read_rope_tables(graph, max_seq_len, "attention: fused")
        spec = _spec(layer_attention, dtype, wide, fp8, tables.separate)
        by_row = None
        if spec.by_row:
            by_row = DecodeAttention(spec, by_row=True)
        rope_tables = DeviceRopeTables(*map(_upload, tables.arrays()))
        scale = layer_attention.variant.scale
        return cls(spec, scale, rope_tables, RopeKernel(spec), DecodeAttention(spec), by_row)


class FusedAttention:
    """Fused attention of the layers `layers` (by number): see `base.Attention`."""

    def __init__(
        self,
        layers: Mapping[int, LayerAttention],
        dtype: np.dtype,
        fp8: bool,
        tables: PageTables,
        limits: StepLimits,
        wide: bool,
        buffer: Buffer,
        stream: cuda.Stream,
    ):
        """Allocate the cache; fp8: of e4m3 numbers. wide: positions are int64."""
        self._layers = layers
        self._buffer = buffer
        self._stream = stream
        self._dtype = np.dtype(dtype)
        self._tables = tables
        rows = limits.num_slots
        pages_per_row = -(-limits.max_seq_len // PAGE)
        pages = tables.pool.num_pages
        self.capacity = pages_per_row * PAGE
        self._host_table = np.zeros((rows, pages_per_row), np.int32)
        self._sent = [0] * rows  # pages of each row that are in the device's page table
        self.table = cuda.zeros(self._host_table.shape, "i4")
        self._table_staging = Staging(self.table.nbytes, 1)
        self._verify_table = cuda.zeros((MAX_VERIFY_TOKENS, pages_per_row), "i4")  # row i: that of its token's slot
        self._verify_staging = Staging(self._verify_table.nbytes, 1)
        # Layers of one variant have one `LayerAttention`.
        variants = {}
        for layer_attention in layers.values():
            if id(layer_attention) not in variants:
                variant = _Variant.of(layer_attention, self._dtype, wide, fp8, limits.max_seq_len)
                variants[id(layer_attention)] = variant
        self._variants = {index: variants[id(layer_attention)] for index, layer_attention in layers.items()}
        specs = [variant.spec for variant in variants.values()]
        self._has_by_row = any(spec.by_row for spec in specs)
        scratch_rows = max(rows, MAX_VERIFY_TOKENS)
        if self._has_by_row:  # prompts run the decode kernel too
            scratch_rows = max(scratch_rows, limits.largest_pass)
        self._scratch = Scratch(specs, scratch_rows)
        cache_dtype = np.dtype(np.uint8) if fp8 else self._dtype
        self._cache: dict[int, tuple[cuda.Array, cuda.Array]] = {}
        for index, layer_attention in layers.items():
            shape = layer_attention.cache
            key_shape = page_shape(pages, shape.num_kv_heads, shape.head_dim, fp8)
            value_shape = page_shape(pages, shape.num_kv_heads, shape.value_head_dim, fp8)
            what = "the KV cache"
            self._cache[index] = cuda.zeros(key_shape, cache_dtype, what), cuda.zeros(value_shape, cache_dtype, what)
        self._prompts = PromptAttention(specs, rows, pages, pages_per_row, stream)

    def reserve(self, lengths_after: Mapping[int, int], lengths: np.ndarray) -> bool:
        """Upload the page tables of rows that grew; return False: no array moved."""
        grown = [row for row in lengths_after if len(self._tables[row]) != self._sent[row]]
        for row in grown:
            pages = self._tables[row]
            self._host_table[row, : len(pages)] = pages
            self._sent[row] = len(pages)
        if grown:
            self._table_staging.send(self._stream, [(self.table, self._host_table)])
        return False

    def reset(self, row: int) -> None:
        """Forget a row's pages. Their contents need no clearing: kernels never read past a row's length."""
        self._sent[row] = 0

    def fork(self, slot: int, other: int, length: int) -> None:
        """Copy the last page if it isn't full; the full pages are in both page tables."""
        self._sent[other] = 0
        full = length // PAGE
        if length % PAGE:
            source = self._tables[slot][full]
            to = self._tables[other][full]
            for array in self._arrays():
                self._stream.copy(array[to : to + 1], array[source : source + 1])

    def save(self, slot: int, length: int) -> np.ndarray:
        """Return a page-locked copy of the slot's pages, [pages, bytes of all layers] uint8; keys before values."""
        pages = self._tables[slot][: -(-length // PAGE)]
        saved = cuda.pinned((len(pages), self._tables.pool.page_nbytes), "u1")
        for host, array in self._page_views(saved, pages):
            self._stream.download(host, array)
        return saved

    def restore(self, slot: int, saved: np.ndarray) -> None:
        self._sent[slot] = 0
        for host, array in self._page_views(saved, self._tables[slot]):
            self._stream.upload(array, host)

    def _page_views(self, saved: np.ndarray, pages: Sequence[int]) -> Iterator[tuple[np.ndarray, cuda.Array]]:
        """Yield views of each page of each array, in `saved` and on the device."""
        for host_page, page in zip(saved, pages):
            start = 0
            for array in self._arrays():
                device_page = array[page : page + 1]
                end = start + device_page.nbytes
                yield host_page[start:end], device_page
                start = end

    def _arrays(self) -> list[cuda.Array]:
        """Return keys and values of all layers, [pages, ...]; fp8 pages contain their scales."""
        arrays: list[cuda.Array] = []
        for keys, values in self._cache.values():
            arrays += [keys, values]
        return arrays

    def begin_verify(self, slots: Sequence[int]) -> None:
        """Upload the page table of each row's slot."""
        self._verify_staging.send(self._stream, [(self._verify_table[: len(slots)], self._host_table[list(slots)])])

    def begin(self, tokens: PassTokens) -> None:
        """Upload the lengths and page tables of chunks."""
        self._prompts.begin(tokens, self._host_table)

    def layout(self, tokens: PassTokens) -> tuple[int, ...] | None:
        if self._has_by_row and tokens.num_decoding:
            return None
        return self._prompts.layout()

    def decode_calls(self, index: int, values: Arrays, rows: cuda.Array) -> Calls:
        return [self._attend(self._variants[index].decode, index, *self._tokens(index, values, rows, self.table))]

    def token_calls(self, index: int, values: Arrays, rows: cuda.Array) -> Calls:
        """Return RoPE and the cache writes of all tokens. The decode kernel repeats those of its rows, bit for bit."""
        tokens, _ = self._tokens(index, values, rows, self.table)
        _, call = self._apply_rope(index, tokens)
        return [call]

    def parts(self, index: int, values: Arrays, tokens: PassTokens) -> Iterator[Part]:
        variant = self._variants[index]
        count = tokens.decoding.shape[0]
        if count:
            # It writes 0 for other tokens, which prompts overwrite later.
            decode_values = {name: array[:count] for name, array in values.items()}
            yield Part(("decode", index, count), lambda: self.decode_calls(index, decode_values, tokens.decoding))
        if variant.by_row is not None:
            yield Part(None, functools.partial(self._by_row_part, variant.by_row, index, values, tokens))
            return
        for call in self._prompts.planned(variant.spec, variant.scale):
            part_key = None if call.key is None else ("prompts", index, *call.key)
            yield Part(part_key, functools.partial(self._prompt_part, index, values, tokens.rows, call))

    def _by_row_part(self, kernel: DecodeAttention, index: int, values: Arrays, tokens: PassTokens) -> Calls:
        """Return attention of the prompts by the decode kernel."""
        prompts = slice(tokens.num_decoding, tokens.num_tokens)
        prompt_values = {name: array[prompts] for name, array in values.items()}
        return [self._attend(kernel, index, *self._tokens(index, prompt_values, tokens.rows[prompts], self.table))]

    def _prompt_part(self, index: int, values: Arrays, rows: cuda.Array, call: PromptCall) -> Calls:
        """Return attention of the prompts by cuDNN."""
        tokens, out = self._tokens(index, values, rows, self.table)
        query_out, _ = self._apply_rope(index, tokens)
        spec = self._variants[index].spec
        return [("attention", run) for run in self._prompts.calls(spec, call, query_out, tokens, out)]

    def verify_calls(self, index: int, values: Arrays, rows: cuda.Array) -> Calls:
        tokens, out = self._tokens(index, values, rows, self._verify_table)
        # All keys and values must be in the cache before a row attends to those of earlier rows.
        _, apply_rope = self._apply_rope(index, tokens)
        return [apply_rope, self._attend(self._variants[index].decode, index, tokens, out)]

    def _apply_rope(self, index: int, tokens: PagedTokens) -> tuple[cuda.Array, tuple[str, Call]]:
        """Return the array of the queries with RoPE, and the call that computes them and writes the cache."""
        shape = *tokens.query.shape[:2], self._layers[index].cache.head_dim
        query_out = self._buffer("query_out", shape, self._dtype)
        launch = self._variants[index].rope.launch
        return query_out, ("rotary and cache", functools.partial(launch, self._stream, tokens, query_out))

    def _tokens(
        self, index: int, values: Arrays, rows: cuda.Array, table: cuda.Array
    ) -> tuple[PagedTokens, cuda.Array]:
        """Return a layer's tokens for the kernels, and the output of attention."""
        layer_attention = self._layers[index]
        cached_keys, cached_values = self._cache[index]
        variant = layer_attention.variant
        shape = layer_attention.cache
        total = values["attention"].shape[0]
        tokens = PagedTokens(
            query=values["query"].reshape(total, variant.num_heads, variant.query_dim),
            key=values["key"].reshape(total, shape.num_kv_heads, shape.head_dim),
            value=values["value"].reshape(total, shape.num_kv_heads, shape.value_head_dim),
            keys=cached_keys,
            values=cached_values,
            tables=self._variants[index].rope_tables,
            rows=rows,
            positions=values["position_ids"],
            pages=table,
        )
        return tokens, values["attention"].reshape(total, variant.num_heads, shape.value_head_dim)

    def _attend(self, kernel: DecodeAttention, index: int, tokens: PagedTokens, out: cuda.Array) -> tuple[str, Call]:
        scale = self._variants[index].scale
        return "attention", functools.partial(kernel.launch, self._stream, tokens, out, scale, self._scratch)


def _spec(
    layer_attention: LayerAttention, dtype: np.dtype, wide: bool, fp8: bool, separate_rope: bool
) -> AttentionKernelSpec:
    """Return what a layer's kernels are compiled for."""
    variant = layer_attention.variant
    shape = layer_attention.cache
    (query_dtype,) = (io.dtype for io in variant.decode.signature.inputs if io.name == "query")
    return AttentionKernelSpec(
        dtype=dtype.name,
        query_dtype=query_dtype,
        wide=wide,
        heads=variant.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.value_head_dim,
        window=variant.window,
        sinks=variant.sinks,
        fp8=fp8,
        softcap=variant.softcap,
        separate_rope=separate_rope,
    )


def _upload(host: np.ndarray) -> cuda.Array:
    array = cuda.empty(host.shape, host.dtype)
    stream = cuda.Stream()
    stream.upload(array, host)
    stream.synchronize()
    return array
