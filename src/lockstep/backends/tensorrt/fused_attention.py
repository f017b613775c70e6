"""Fused attention over a paged KV cache. A row that decodes is a kernel of our own (paged_decode_attention.py), with
the kind's rotary encoding (rotation.py) in it; a prompt's tokens are turned by another (rope_kernel.py) and go through
cuDNN's (prompt_attention.py).

A layer's cache is pages of 64 tokens, [pages, num_kv_heads, 64, head_dim]; one table for all layers says which pages a
row has. Pages are given out as rows grow and taken back when they are forgotten.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import cast

import numpy as np

from lockstep.backends.tensorrt import cuda
from lockstep.backends.tensorrt.attention import Call, Chunks
from lockstep.backends.tensorrt.fused_form import PAGE, Form, Rotation
from lockstep.backends.tensorrt.kernels import Kernels
from lockstep.backends.tensorrt.paged_decode_attention import DecodeAttention, Scratch
from lockstep.backends.tensorrt.program import Device
from lockstep.backends.tensorrt.prompt_attention import PromptAttention
from lockstep.backends.tensorrt.rope_kernel import Rotate
from lockstep.backends.tensorrt.rotation import read_rotation
from lockstep.backends.tensorrt.staging import Staging
from lockstep.step.executable import HostExecutable
from lockstep.step.network import Kind


class FusedAttention:
    """For the layers of `layers` (number: kind). Same signature as attention.Attention."""

    def __init__(self, layers: Mapping[int, Kind], dtype: np.dtype, rows: int, max_seq_len: int, kernels: Kernels):
        self._dtype = np.dtype(dtype)
        self._pages_per_row = -(-max_seq_len // PAGE)
        self.capacity = self._pages_per_row * PAGE
        pages = rows * self._pages_per_row
        self._free = list(range(pages))[::-1]
        self._pages: dict[int, list[int]] = {row: [] for row in range(rows)}
        self._host_table = np.zeros((rows, self._pages_per_row), np.int32)
        self._table = cuda.zeros(self._host_table.shape, "i4")
        self._table_staging = Staging(self._table.nbytes, 1)
        kinds = {id(kind): kind for kind in layers.values()}
        self._rotations = {key: _rotation(kind, max_seq_len) for key, kind in kinds.items()}
        forms = self._forms = {key: _form(kind, self._dtype, bool(kernels.wide)) for key, kind in kinds.items()}
        self._decode = {key: DecodeAttention(form) for key, form in forms.items()}
        self._rotate = {key: Rotate(form) for key, form in forms.items()}
        self._scratch = Scratch(forms.values(), rows)
        self._cache = {}
        for index, kind in layers.items():
            heads = kind.cache.num_kv_heads
            self._cache[index] = tuple(
                cuda.zeros((pages, heads, PAGE, dim), self._dtype, "the KV cache")
                for dim in (kind.cache.head_dim, kind.cache.value_head_dim)
            )
        self._prompts = PromptAttention(list(forms.values()), rows, pages, self._pages_per_row, Device.get().stream)

    def reserve(self, ends: Mapping[int, int], lengths: np.ndarray, stream: cuda.Stream) -> bool:
        """Give pages to rows that grow. Nothing moves: the table's contents change, not its place."""
        grown = [row for row, end in ends.items() if len(self._pages[row]) * PAGE < end]
        for row in grown:
            pages = self._pages[row]
            while len(pages) * PAGE < ends[row]:
                pages.append(self._free.pop())
            self._host_table[row, : len(pages)] = pages
        if grown:
            self._table_staging.send(stream, [(self._table, self._host_table)])
        return False

    def reset(self, row: int, stream: cuda.Stream) -> None:
        """Its pages go to whoever needs them. What they hold is never read: a row's length is looked at before its
        pages."""
        self._free += reversed(self._pages[row])
        self._pages[row] = []

    def begin(self, chunks: Chunks, stream: cuda.Stream) -> None:
        """Send the lengths and pages of chunks."""
        self._prompts.begin(chunks, self._host_table)

    def calls(
        self,
        index: int,
        kind: Kind,
        values: Mapping[str, cuda.Array],
        rows: cuda.Array,
        chunks: Chunks,
        buffer: Callable[..., cuda.Array],
        stream: cuda.Stream,
        own: bool,
    ) -> list[tuple[str, Call]]:
        variant, shape, total = kind.variant, kind.cache, values["attention"].shape[0]
        keys, cached = self._cache[index]
        query = values["query"].reshape(total, variant.num_heads, shape.head_dim)
        key = values["key"].reshape(total, shape.num_kv_heads, shape.head_dim)
        value = values["value"].reshape(total, shape.num_kv_heads, shape.value_head_dim)
        out = values["attention"].reshape(total, variant.num_heads, shape.value_head_dim)
        positions, rotation, scale = values["position_ids"], self._rotations[id(kind)], variant.scale
        if not chunks:  # the executor puts row i into request i, or nothing
            decode, scratch, table = self._decode[id(kind)], self._scratch, self._table
            arrays = (query, key, value, out, keys, cached, rotation, rows, positions, table)
            return [("attention", lambda: decode.launch(stream, *arrays, scale, scratch))]
        turned = buffer("query_out", query.shape, self._dtype)
        rotate = functools.partial(
            self._rotate[id(kind)].launch,
            stream,
            query,
            key,
            value,
            turned,
            keys,
            cached,
            rotation,
            rows,
            positions,
            self._table,
        )
        attend = self._prompts.calls(self._forms[id(kind)], scale, turned, keys, cached, out)
        return [("rotary and cache", rotate), *(("attention", call) for call in attend)]


def _rotation(kind: Kind, positions: int) -> Rotation:
    """The rotary encoding of a kind, on the device."""
    rotary = cast(HostExecutable, kind.engines["rotary"])  # the backend loads it with ONNX Runtime
    tables = read_rotation(rotary, positions, "attention: fused")
    return Rotation(_up(tables.own), _up(tables.other), _up(tables.partner))


def _form(kind: Kind, dtype: np.dtype, wide: bool) -> Form:
    """What the kernels of a kind are compiled for."""
    variant, shape = kind.variant, kind.cache
    (given,) = (io.dtype for io in variant.decode.signature.inputs if io.name == "query")
    return Form(
        dtype=dtype.name,
        given=given,
        wide=wide,
        heads=variant.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.value_head_dim,
        window=variant.window,
    )


def _up(host: np.ndarray) -> cuda.Array:
    array, stream = cuda.empty(host.shape, host.dtype), cuda.Stream()
    stream.upload(array, host)
    stream.synchronize()
    return array
