"""Fused attention over a paged KV cache. A row that decodes is a kernel of our own (decode_kernel.py), with the kind's
rotary encoding (rotation.py) in it; a prompt's tokens are turned by another (rotate_kernel.py) and go through cuDNN's.

A layer's cache is pages of 64 tokens, [pages, num_kv_heads, 64, head_dim]; one table for all layers says which pages a
row has. Pages are given out as rows grow and taken back when they are forgotten. Needs the package
nvidia-cudnn-frontend and the library cuDNN 9; no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from lockstep.backends.tensorrt import cuda
from lockstep.backends.tensorrt.attention import SMALLEST_CHUNK, Call, Chunks
from lockstep.backends.tensorrt.fused_form import PAGE, Form, Rotation
from lockstep.backends.tensorrt.kernels import Kernels
from lockstep.backends.tensorrt.paged_decode_attention import DecodeAttention, Scratch
from lockstep.backends.tensorrt.rope_kernel import Rotate
from lockstep.backends.tensorrt.rotation import read_rotation
from lockstep.backends.tensorrt.v8_6.needs import require_cudnn
from lockstep.errors import CheckError
from lockstep.step.executable import HostExecutable
from lockstep.step.network import Kind

cudnn = require_cudnn()


class FusedAttention:
    """For the layers of `layers` (number: kind). Same signature as attention.Attention."""

    def __init__(self, layers: Mapping[int, Kind], dtype: np.dtype, rows: int, max_seq_len: int, kernels: Kernels):
        self._dtype = np.dtype(dtype)
        self._pages_per_row = -(-max_seq_len // PAGE)
        self.capacity = self._pages_per_row * PAGE
        pages = rows * self._pages_per_row
        self._free = list(range(pages))[::-1]
        self._pages: dict[int, list[int]] = {row: [] for row in range(rows)}
        self._host_table = cuda.pinned((rows, self._pages_per_row), "i4")
        self._host_table[:] = 0
        self._table = cuda.zeros(self._host_table.shape, "i4")
        self._sent = cuda.Event()
        self._chunk_lengths = cuda.zeros((rows, 2), "i4")
        self._host_chunks = cuda.pinned((rows, 2), "i4")
        kinds = {id(kind): kind for kind in layers.values()}
        self._rotations = {key: _rotation(kind, max_seq_len) for key, kind in kinds.items()}
        forms = {key: _form(kind, self._dtype, bool(kernels.wide)) for key, kind in kinds.items()}
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

    def reserve(self, ends: Mapping[int, int], lengths: np.ndarray, stream: cuda.Stream) -> bool:
        """Give pages to rows that grow. Nothing moves: the table's contents change, not its place."""
        grown = [row for row, end in ends.items() if len(self._pages[row]) * PAGE < end]
        if grown:
            self._sent.wait()  # the copy before may still read the host's table
            for row in grown:
                pages = self._pages[row]
                while len(pages) * PAGE < ends[row]:
                    pages.append(self._free.pop())
                self._host_table[row, : len(pages)] = pages
            stream.upload(self._table, self._host_table)
            self._sent.record(stream)
        return False

    def reset(self, row: int, stream: cuda.Stream) -> None:
        """Its pages go to whoever needs them. What they hold is never read: a row's length is looked at before its
        pages."""
        self._free += reversed(self._pages[row])
        self._pages[row] = []

    def begin(self, chunks: Chunks, stream: cuda.Stream) -> list[Call]:
        """Of each chunk: its tokens, and all that its row holds with them."""
        if not chunks:
            return []
        for number, (_, start, low, high) in enumerate(chunks):
            self._host_chunks[number] = high - low, start + high - low
        return [lambda: stream.upload(self._chunk_lengths[: len(chunks)], self._host_chunks[: len(chunks)])]

    def calls(
        self,
        index: int,
        kind: Kind,
        values: Mapping[str, cuda.Array],
        rows: cuda.Array,
        num_decode: int,
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
        positions, rotation, attention = values["position_ids"], self._rotations[id(kind)], values["attention"]
        calls: list[tuple[str, Call]] = []
        if num_decode:
            out = attention.reshape(total, variant.num_heads, shape.value_head_dim)
            # The executor puts row i into request i, or nothing.
            launch = functools.partial(
                self._decode[id(kind)].launch,
                stream,
                query[:num_decode],
                key[:num_decode],
                value[:num_decode],
                out[:num_decode],
                keys,
                cached,
                rotation,
                rows[:num_decode],
                positions[:num_decode],
                self._table,
                variant.scale,
                self._scratch,
            )
            calls.append(("attention", launch))
        if chunks:
            new = slice(num_decode, total)
            turned = buffer("query_out", query.shape, self._dtype)
            rotate = functools.partial(
                self._rotate[id(kind)].launch,
                stream,
                query[new],
                key[new],
                value[new],
                turned[new],
                keys,
                cached,
                rotation,
                rows[new],
                positions[new],
                self._table,
            )
            calls.append(("rotary and cache", rotate))
        for number, (row, _, low, high) in enumerate(chunks):
            tokens = max(SMALLEST_CHUNK, 1 << (high - low - 1).bit_length())
            form = _Chunk(
                tokens=tokens,
                heads=variant.num_heads,
                kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                value_dim=shape.value_head_dim,
                scale=variant.scale,
                window=variant.window,
                pages=keys.shape[0],
                pages_per_row=self._pages_per_row,
                dtype=self._dtype.name,
            )
            lengths = self._chunk_lengths[number : number + 1].reshape(2)
            call = _plan(form, stream).call(
                turned[low:high],
                keys,
                cached,
                self._table[row : row + 1],
                lengths[:1],
                lengths[1:],
                attention[low:high],
            )
            calls.append(("attention", call))
        return calls


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


@dataclass(frozen=True)
class _Chunk:
    """What a plan of cuDNN is made for: a chunk of up to `tokens` tokens."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int
    pages: int
    pages_per_row: int
    dtype: str


@functools.cache
def _handle(stream: cuda.Stream) -> Any:
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=stream.handle)
    return handle


@functools.cache
def _plan(form: _Chunk, stream: cuda.Stream) -> _Plan:
    return _Plan(form, stream)


class _Plan:
    """cuDNN's plan of one form, with the memory that it works in. Each token sees itself and what is before it (bottom
    right)."""

    _workspace: cuda.Array | None = None

    def __init__(self, form: _Chunk, stream: cuda.Stream):
        kind = {"float16": cudnn.data_type.HALF, "bfloat16": cudnn.data_type.BFLOAT16}[form.dtype]
        handle = _handle(stream)
        graph = cudnn.pygraph(
            io_data_type=kind,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=handle,
        )

        def packed(name: str, dim: int) -> Any:
            width = form.heads * dim
            return graph.tensor(
                name=name,
                dim=[1, form.heads, form.tokens, dim],
                stride=[form.tokens * width, dim, width, 1],
                data_type=kind,
            )

        def paged(name: str, dim: int) -> Any:
            page = PAGE * dim
            return graph.tensor(
                name=name,
                dim=[form.pages, form.kv_heads, PAGE, dim],
                stride=[form.kv_heads * page, page, dim, 1],
                data_type=kind,
            )

        def integers(name: str, count: int) -> Any:
            return graph.tensor(
                name=name, dim=[1, 1, count, 1], stride=[count, count, 1, 1], data_type=cudnn.data_type.INT32
            )

        inputs = {
            "query": packed("query", form.head_dim),
            "keys": paged("keys", form.head_dim),
            "values": paged("values", form.value_dim),
            "key_table": integers("key_table", form.pages_per_row),
            "value_table": integers("value_table", form.pages_per_row),
            "new": integers("new", 1),
            "held": integers("held", 1),
        }
        window = {"diagonal_band_left_bound": form.window} if form.window else {}
        try:
            out, _ = graph.sdpa(
                name="attention",
                q=inputs["query"],
                k=inputs["keys"],
                v=inputs["values"],
                generate_stats=False,
                attn_scale=form.scale,
                use_padding_mask=True,
                seq_len_q=inputs["new"],
                seq_len_kv=inputs["held"],
                paged_attention_k_table=inputs["key_table"],
                paged_attention_v_table=inputs["value_table"],
                paged_attention_max_seq_len_kv=form.pages_per_row * PAGE,
                diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT,
                diagonal_band_right_bound=0,
                **window,
            )
            width = form.heads * form.value_dim
            out.set_output(True).set_dim([1, form.heads, form.tokens, form.value_dim])
            out.set_stride([form.tokens * width, form.value_dim, width, 1]).set_data_type(kind)
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A])
            graph.check_support()
            graph.build_plans()
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
            raise CheckError(
                f"cuDNN {cudnn.backend_version()}: no attention for {form}: "
                f"{' '.join(str(error).split())}; build with attention: traced"
            ) from error
        self._graph, self._inputs, self._out, self._handle = graph, inputs, out, handle
        size = max(1, graph.get_workspace_size())
        if _Plan._workspace is None or _Plan._workspace.nbytes < size:
            # plans that hold a smaller one keep it
            _Plan._workspace = cuda.empty((size,), "u1", "attention to work in")
        self._work = _Plan._workspace

    def call(
        self,
        query: cuda.Array,
        keys: cuda.Array,
        values: cuda.Array,
        table: cuda.Array,
        new: cuda.Array,
        held: cuda.Array,
        attention: cuda.Array,
    ) -> Call:
        arrays = {
            "query": query,
            "keys": keys,
            "values": values,
            "key_table": table,
            "value_table": table,
            "new": new,
            "held": held,
        }
        addresses = {self._inputs[name]: array.address for name, array in arrays.items()} | {
            self._out: attention.address
        }
        return lambda: self._graph.execute(addresses, self._work.address, handle=self._handle)
