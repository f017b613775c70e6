"""cuDNN's attention of prompts over a paged KV cache.

A call is for a few chunks, as packed sequences, or for a prompt alone. Chunks are padded to the next power of two of
tokens (`base.padded`), so that few of cuDNN's plans serve all; what is beyond a chunk's last token costs next to
nothing, so that those of a call are padded to the longest of them. Needs the package nvidia-cudnn-frontend and the
library cuDNN 9; no torch.

Pages of fp8 are converted to fp16 before a call: those of its requests, of one layer, whole, in memory for the longest
requests of a call. So prompts attend to the numbers that decoding reads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.errors import CheckError, note
from lockstep.gpu import cuda
from lockstep.gpu.attention.base import LARGEST_BATCH, Call, Chunks, PassTokens, padded
from lockstep.gpu.attention.fp8_pages import Fp8Pages
from lockstep.gpu.attention.kernel_spec import PAGE, AttentionKernelSpec, PagedTokens, page_shape
from lockstep.gpu.libraries import require_cudnn
from lockstep.gpu.staging import Staging

cudnn = require_cudnn()

# Sizes of packed calls that are graphs, one for each layer, at most: warm-up has 56 where prompts have 128k tokens. Of
# hundreds of prompts there are thousands, and memory is not left for all.
_MOST_CAPTURED = 96


@dataclass(frozen=True)
class _Batch:
    """Chunks first to last of a pass, padded to `tokens` tokens; at: where its offsets begin among all."""

    tokens: int
    first: int
    last: int
    at: int


@dataclass(frozen=True)
class PromptCall:
    """A call of cuDNN on these tokens of a pass; arrays: what it reads of their chunks, by the names of its graph.

    key: all that it depends on beside array contents; None: on this pass alone.
    """

    plan: _CudnnPlan
    tokens: slice
    arrays: Mapping[str, cuda.Array]
    key: tuple[int, ...] | None = None


class PromptAttention:
    """Attention of the chunks of a pass, over caches of `pages` pages, up to `pages_per_row` a row."""

    def __init__(
        self, specs: Sequence[AttentionKernelSpec], rows: int, pages: int, pages_per_row: int, stream: cuda.Stream
    ):
        self._pages = pages
        self._stream = stream
        if fp8 := [spec for spec in specs if spec.fp8]:
            self._pages = min(rows, LARGEST_BATCH) * pages_per_row  # those of a call
            numbers = np.arange(self._pages, dtype=np.int32).reshape(-1, pages_per_row)
            self._converted_table = cuda.empty(numbers.shape, "i4")
            stream.upload(self._converted_table, numbers)
            stream.synchronize()
            self._fp8_pages = {id(spec): Fp8Pages(spec) for spec in fp8}
            shapes = {
                (which, page_shape(self._pages, spec.kv_heads, dim))
                for spec in fp8
                for which, dim in (("keys", spec.head_dim), ("values", spec.value_dim))
            }
            self._converted = {key: cuda.zeros(key[1], fp8[0].dtype, "attention to work in") for key in shapes}
        self._new, self._held = (cuda.zeros((rows,), "i4") for _ in range(2))
        self._table = cuda.zeros((rows, pages_per_row), "i4")
        widths = {spec.heads * dim for spec in specs for dim in (spec.head_dim, spec.value_dim)}
        # where each chunk of a batch begins, and where its last one ends, in numbers of so many a token
        self._offsets = {width: cuda.zeros((2 * rows,), "i4") for width in sorted(widths)}
        arrays = (self._new, self._held, self._table, *self._offsets.values())
        self._staging = Staging(sum(array.nbytes for array in arrays), len(arrays))
        self._batches: list[_Batch] = []
        self._planned: dict[tuple[int, float], list[PromptCall]] = {}  # of this pass, by spec and scale
        self._chunks: Chunks = ()
        self._captured = set[tuple[int, ...]]()  # keys that calls may have
        self._packs = True  # whether this cuDNN takes packed chunks, as far as is known

    def begin(self, tokens: PassTokens, table: np.ndarray) -> None:
        """Send the numbers of new and of all tokens, pages (of table [rows, pages_per_row]) and offsets."""
        ahead = tokens.num_decoding
        chunks = [(row, start, ahead + low, ahead + high) for row, start, low, high in tokens.chunks]
        self._chunks = chunks
        self._batches = []
        self._planned = {}
        offsets: list[int] = []
        for first in range(0, len(chunks), LARGEST_BATCH):
            batch = chunks[first : first + LARGEST_BATCH]
            longest = padded(max(high - low for _, _, low, high in batch))
            self._batches.append(_Batch(longest, first, first + len(batch), len(offsets)))
            offsets += [low for _, _, low, _ in batch] + [batch[-1][3]]
        count = len(chunks)
        starts = np.array(offsets)
        pairs = [
            (self._new[:count], np.array([high - low for _, _, low, high in chunks])),
            (self._held[:count], np.array([start + high - low for _, start, low, high in chunks])),
            (self._table[:count], table[[row for row, *_ in chunks]]),
        ]
        pairs += [(array[: len(starts)], starts * width) for width, array in self._offsets.items()]
        self._staging.send(self._stream, pairs)

    def layout(self) -> tuple[int, ...] | None:
        """Return the sizes of this pass's calls; None where they are not packed."""
        return tuple(size for batch in self._batches for size in (batch.last, batch.tokens)) if self._packs else None

    def planned(self, spec: AttentionKernelSpec, scale: float) -> list[PromptCall]:
        """Return the calls of this pass, which all layers of this spec share."""
        planned = self._planned.get((id(spec), scale))
        if planned is None:
            planned = self._planned[id(spec), scale] = list(self._plan_pass(spec, scale))
        return planned

    def calls(
        self, spec: AttentionKernelSpec, call: PromptCall, query: cuda.Array, tokens: PagedTokens, out: cuda.Array
    ) -> list[Call]:
        """Return what is run for a call.

        query [num_tokens, num_heads, head_dim], with RoPE -> out [num_tokens, num_heads, value_dim], over keys and
        values in pages, which hold the new ones too: each token sees itself and what is before it.
        """
        if not spec.fp8:
            return [call.plan.bind(call, query, tokens, out)]
        return list(self._converting(spec, call, query, tokens, out))

    def _converting(
        self, spec: AttentionKernelSpec, call: PromptCall, query: cuda.Array, tokens: PagedTokens, out: cuda.Array
    ) -> Iterator[Call]:
        """Yield what converts the pages of a call's requests, then the call on these."""
        table = call.arrays["key_table"]
        held = call.arrays["held"]
        keys, values = (
            self._converted[which, page_shape(self._pages, spec.kv_heads, dim)]
            for which, dim in (("keys", spec.head_dim), ("values", spec.value_dim))
        )
        arrays = tokens.keys, tokens.values, table, held, keys, values
        yield functools.partial(self._fp8_pages[id(spec)].read, self._stream, *arrays)
        pages = self._converted_table[: table.shape[0]]
        arrays_of_call = {**call.arrays, "key_table": pages, "value_table": pages}
        yield call.plan.bind(
            replace(call, arrays=arrays_of_call), query, replace(tokens, keys=keys, values=values), out
        )

    def _plan_pass(self, spec: AttentionKernelSpec, scale: float) -> Iterator[PromptCall]:
        for batch in self._batches:
            count = batch.last - batch.first
            size = _Size(spec, scale, batch.tokens, self._pages, self._table.shape[1], count)
            alone = len(self._chunks) == 1 and not self._chunks[0][2]  # without offsets: two kernels fewer
            plan = None if alone else _packed_plan(size, self._stream)
            if plan is not None:
                places = slice(batch.at, batch.at + count + 1)
                offsets = {
                    "query_offsets": self._offsets[spec.heads * spec.head_dim][places],
                    "out_offsets": self._offsets[spec.heads * spec.value_dim][places],
                }
                arrays = self._arrays(batch.first, batch.last) | offsets
                yield PromptCall(plan, slice(None), arrays, self._key(batch.first, count, batch.tokens))
                continue
            if self._packs and not alone:
                self._packs = False
                note(
                    f"cuDNN {cudnn.backend_version()} has no attention of several prompts over pages in one call: each "
                    "takes a call of its own, which is slower"
                )
            for number in range(batch.first, batch.last):
                _, _, low, high = self._chunks[number]
                plan = _plan(replace(size, batch=1, tokens=padded(high - low)), self._stream)
                key = (0, 0, batch.tokens) if alone else None
                yield PromptCall(plan, slice(low, high), self._arrays(number, number + 1), key)

    def _key(self, *sizes: int) -> tuple[int, ...] | None:
        if len(self._captured) < _MOST_CAPTURED:
            self._captured.add(sizes)
        return sizes if sizes in self._captured else None

    def _arrays(self, first: int, last: int) -> dict[str, cuda.Array]:
        """Return the table, and the numbers of new and of all tokens, of some chunks."""
        chosen = slice(first, last)
        table = self._table[chosen]
        new = self._new[chosen]
        held = self._held[chosen]
        return {"key_table": table, "value_table": table, "new": new, "held": held}


@dataclass(frozen=True)
class _Size:
    """What a plan of cuDNN is made for: `batch` chunks of up to `tokens` tokens."""

    spec: AttentionKernelSpec
    scale: float
    tokens: int
    pages: int
    pages_per_row: int
    batch: int


@functools.cache
def _handle(stream: cuda.Stream) -> Any:
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=stream.handle)
    return handle


@functools.cache
def _plan(size: _Size, stream: cuda.Stream) -> _CudnnPlan:
    return _CudnnPlan(size, stream, packed=False)


@functools.cache
def _packed_plan(size: _Size, stream: cuda.Stream) -> _CudnnPlan | None:
    """Return cuDNN's plan of packed chunks, or None where it has none: they are then taken one by one."""
    try:
        return _CudnnPlan(size, stream, packed=True)
    except CheckError:
        return None


class _CudnnPlan:
    """cuDNN's plan of one size, with its workspace; packed: with offsets, else of one chunk."""

    _workspaces: dict[int, cuda.Array] = {}  # by stream: each has its device

    def __init__(self, size: _Size, stream: cuda.Stream, packed: bool):
        spec = size.spec
        batch = size.batch
        kind = {"float16": cudnn.data_type.HALF, "bfloat16": cudnn.data_type.BFLOAT16}[spec.dtype]
        handle = _handle(stream)
        graph = cudnn.pygraph(
            io_data_type=kind,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=handle,
        )

        def tokens(dim: int) -> dict[str, list[int]]:
            width = spec.heads * dim
            return {"dim": [batch, spec.heads, size.tokens, dim], "stride": [size.tokens * width, dim, width, 1]}

        def paged(name: str, dim: int) -> Any:
            page = PAGE * dim
            return graph.tensor(
                name=name,
                dim=[size.pages, spec.kv_heads, PAGE, dim],
                stride=[spec.kv_heads * page, page, dim, 1],
                data_type=kind,
            )

        def integers(name: str, requests: int, count: int) -> Any:
            return graph.tensor(
                name=name, dim=[requests, 1, count, 1], stride=[count, count, 1, 1], data_type=cudnn.data_type.INT32
            )

        inputs = {
            "query": graph.tensor(name="query", data_type=kind, **tokens(spec.head_dim)),
            "keys": paged("keys", spec.head_dim),
            "values": paged("values", spec.value_dim),
            "key_table": integers("key_table", batch, size.pages_per_row),
            "value_table": integers("value_table", batch, size.pages_per_row),
            "new": integers("new", batch, 1),
            "held": integers("held", batch, 1),
        }
        if packed:
            inputs |= {name: integers(name, batch + 1, 1) for name in ("query_offsets", "out_offsets")}
        window = {"diagonal_band_left_bound": spec.window} if spec.window else {}
        try:
            if packed:
                inputs["query"].set_ragged_offset(inputs["query_offsets"])
            out, _ = graph.sdpa(
                name="attention",
                q=inputs["query"],
                k=inputs["keys"],
                v=inputs["values"],
                generate_stats=False,
                attn_scale=size.scale,
                use_padding_mask=True,
                seq_len_q=inputs["new"],
                seq_len_kv=inputs["held"],
                paged_attention_k_table=inputs["key_table"],
                paged_attention_v_table=inputs["value_table"],
                paged_attention_max_seq_len_kv=size.pages_per_row * PAGE,
                diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT,
                diagonal_band_right_bound=0,
                **window,
            )
            layout = tokens(spec.value_dim)
            out.set_output(True).set_dim(layout["dim"]).set_stride(layout["stride"]).set_data_type(kind)
            if packed:
                out.set_ragged_offset(inputs["out_offsets"])
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A])
            graph.check_support()
            graph.build_plans()
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
            raise CheckError(
                f"cuDNN {cudnn.backend_version()}: no attention for {size}: "
                f"{' '.join(str(error).split())}; build with attention: traced"
            ) from error
        # By number: a tensor in their place would be asked for its number in each call.
        self._inputs = {name: tensor.get_uid() for name, tensor in inputs.items()}
        self._out = out.get_uid()
        self._graph = graph
        self._handle = handle
        nbytes = max(1, graph.get_workspace_size())
        held = _CudnnPlan._workspaces.get(stream.handle)
        if held is None or held.nbytes < nbytes:
            # plans that hold a smaller one keep it
            held = _CudnnPlan._workspaces[stream.handle] = cuda.empty((nbytes,), "u1", "attention to work in")
        self._work = held

    def bind(self, call: PromptCall, query: cuda.Array, tokens: PagedTokens, out: cuda.Array) -> Call:
        arrays = {"query": query[call.tokens], "keys": tokens.keys, "values": tokens.values, **call.arrays}
        addresses = {self._inputs[name]: array.address for name, array in arrays.items()}
        addresses[self._out] = out[call.tokens].address
        return lambda: self._graph.execute(addresses, self._work.address, handle=self._handle)
