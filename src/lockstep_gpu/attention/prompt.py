"""cuDNN's attention of prompts over a paged KV cache.

A call takes a few chunks as packed sequences, or a single prompt. Chunks are padded to a power of two of tokens
(`plan.padded_chunk`), so that a few of cuDNN's plans serve all; all chunks of a call are padded to the longest, because
padding costs next to nothing. Needs the package nvidia-cudnn-frontend and the library cuDNN 9, not torch.

The fp8 pages of a call's requests are dequantized to fp16 before the call, one layer at a time, into memory for the
longest requests. So prompts attend to the same values as decoding.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.errors import CheckError, note
from lockstep.step.executable import Call
from lockstep_gpu import cuda
from lockstep_gpu.attention.base import PassTokens
from lockstep_gpu.attention.kernel_spec import PAGE, THREADS, AttentionKernelSpec, PagedTokens, page_shape
from lockstep_gpu.attention.page_kernels import Fp8Pages
from lockstep_gpu.kernels.library import including
from lockstep_gpu.libraries import require_cudnn
from lockstep_gpu.plan import LARGEST_BATCH, Chunks, padded_chunk
from lockstep_gpu.staging import Staging

cudnn = require_cudnn()

# Sizes of packed calls that are captured, each with a graph per layer. Warm-up captures 56 for prompts of 128k tokens.
# Hundreds of prompts have thousands of sizes, and there is no memory for all.
MAX_CAPTURED_SIZES = 96


@dataclass(frozen=True)
class _Batch:
    """Chunks `first` to `last`-1 of a pass, padded to `tokens` tokens; offset: the index of its first chunk offset."""

    tokens: int
    first: int
    last: int
    offset: int


@dataclass(frozen=True)
class PromptCall:
    """A call of cuDNN on some tokens of a pass.

    arrays: inputs that depend on the chunks, by their name in cuDNN's graph, and where outputs start. key: all that the
    call depends on, except array contents; None: it can't be reused.
    """

    plan: CudnnPlan
    tokens: slice
    arrays: Mapping[str, cuda.Array]
    key: tuple[int, ...] | None = None


class PromptAttention:
    """Attention of a pass's chunks over a cache of `pages` pages, with up to `pages_per_row` of them in a row."""

    def __init__(
        self, specs: Sequence[AttentionKernelSpec], rows: int, pages: int, pages_per_row: int, stream: cuda.Stream
    ):
        self._pages = pages
        self._stream = stream
        fp8_specs = [spec for spec in specs if spec.fp8]
        if fp8_specs:
            self._pages = min(rows, LARGEST_BATCH) * pages_per_row  # of a call
            page_numbers = np.arange(self._pages, dtype=np.int32).reshape(-1, pages_per_row)
            self._fp16_table = cuda.empty(page_numbers.shape, "i4")
            stream.upload(self._fp16_table, page_numbers)
            stream.synchronize()
            self._fp8_pages = {id(spec): Fp8Pages(spec) for spec in fp8_specs}
            self._fp16_pages: dict[tuple, cuda.Array] = {}
            for spec in fp8_specs:
                for key in self._fp16_keys(spec):
                    if key not in self._fp16_pages:
                        self._fp16_pages[key] = cuda.zeros(key[1], spec.dtype, "attention to work in")
        self._new = cuda.zeros((rows,), "i4")
        self._lengths = cuda.zeros((rows,), "i4")
        self._table = cuda.zeros((rows, pages_per_row), "i4")
        # Where each chunk of a batch starts, and the last one ends, in elements: by the elements per token of queries
        # and of outputs.
        widths = {spec.heads * spec.head_dim for spec in specs} | {spec.heads * spec.value_dim for spec in specs}
        self._offsets = {width: cuda.zeros((2 * rows,), "i4") for width in sorted(widths)}
        arrays = (self._new, self._lengths, self._table, *self._offsets.values())
        self._no_offset = cuda.zeros((1,), "i4")
        self._staging = Staging(sum(array.nbytes for array in arrays), len(arrays))
        self._batches: list[_Batch] = []
        self._planned: dict[tuple[int, float], list[PromptCall]] = {}  # of this pass, by spec and scale
        self._chunks: Chunks = ()
        self._captured = set[tuple[int, ...]]()  # keys of calls that are captured
        self._packs = True  # until this cuDNN turns out not to support packed chunks

    def _fp16_keys(self, spec: AttentionKernelSpec) -> tuple[tuple, tuple]:
        """Return the keys in `_fp16_pages` of a spec's keys and values."""
        key_shape = page_shape(self._pages, spec.kv_heads, spec.head_dim)
        value_shape = page_shape(self._pages, spec.kv_heads, spec.value_dim)
        return ("keys", key_shape), ("values", value_shape)

    def begin(self, tokens: PassTokens, table: np.ndarray) -> None:
        """Upload each chunk's new tokens, length, pages and offsets; table: [rows, pages_per_row]."""
        first_token = tokens.num_decoding
        chunks = [(row, start, first_token + low, first_token + high) for row, start, low, high in tokens.chunks]
        self._chunks = chunks
        self._batches = []
        self._planned = {}
        offsets: list[int] = []
        for first in range(0, len(chunks), LARGEST_BATCH):
            batch = chunks[first : first + LARGEST_BATCH]
            longest = padded_chunk(max(high - low for _, _, low, high in batch))
            self._batches.append(_Batch(longest, first, first + len(batch), len(offsets)))
            offsets += [low for _, _, low, _ in batch] + [batch[-1][3]]
        count = len(chunks)
        token_offsets = np.array(offsets)
        uploads = [
            (self._new[:count], np.array([high - low for _, _, low, high in chunks])),
            (self._lengths[:count], np.array([start + high - low for _, start, low, high in chunks])),
            (self._table[:count], table[[row for row, *_ in chunks]]),
        ]
        for width, array in self._offsets.items():
            uploads.append((array[: len(token_offsets)], token_offsets * width))
        self._staging.send(self._stream, uploads)

    def layout(self) -> tuple[int, ...] | None:
        """Return the sizes of this pass's calls; None if they aren't packed."""
        if not self._packs:
            return None
        sizes: list[int] = []
        for batch in self._batches:
            sizes += [batch.last, batch.tokens]
        return tuple(sizes)

    def planned(self, spec: AttentionKernelSpec, scale: float) -> list[PromptCall]:
        """Return the calls of this pass, which all layers of a spec and scale share."""
        key = id(spec), scale
        if key not in self._planned:
            self._planned[key] = list(self._plan_pass(spec, scale))
        return self._planned[key]

    def calls(
        self, spec: AttentionKernelSpec, call: PromptCall, query: cuda.Array, tokens: PagedTokens, out: cuda.Array
    ) -> list[Call]:
        """Return the functions that run a call: the dequantization of an fp8 cache, and cuDNN's attention.

        Causal attention over the cache, which has the new keys and values already.

        Args:
            query: [num_tokens, num_heads, head_dim], with RoPE.
            out: [num_tokens, num_heads, value_dim].
        """
        if not spec.fp8:
            return [call.plan.bind(call, query, tokens, out)]
        table = call.arrays["key_table"]
        lengths = call.arrays["held"]
        keys, values = (self._fp16_pages[key] for key in self._fp16_keys(spec))
        arrays = tokens.keys, tokens.values, table, lengths, keys, values
        dequantize = functools.partial(self._fp8_pages[id(spec)].read, self._stream, *arrays)
        fp16_table = self._fp16_table[: table.shape[0]]
        fp16_call = replace(call, arrays={**call.arrays, "key_table": fp16_table, "value_table": fp16_table})
        fp16_tokens = replace(tokens, keys=keys, values=values)
        return [dequantize, call.plan.bind(fp16_call, query, fp16_tokens, out)]

    def _plan_pass(self, spec: AttentionKernelSpec, scale: float) -> Iterator[PromptCall]:
        for batch in self._batches:
            count = batch.last - batch.first
            size = _Size(spec, scale, batch.tokens, self._pages, self._table.shape[1], count)
            # A single prompt without decoding rows needs no offsets: two kernels fewer.
            is_alone = len(self._chunks) == 1 and not self._chunks[0][2]
            plan = None if is_alone else packed_plan(size, self._stream)
            if plan is not None:
                chunk_offsets = slice(batch.offset, batch.offset + count + 1)
                arrays = self._arrays(batch.first, batch.last)
                arrays["query_offsets"] = self._offsets[spec.heads * spec.head_dim][chunk_offsets]
                arrays["out_offsets"] = self._offsets[spec.heads * spec.value_dim][chunk_offsets]
                yield PromptCall(plan, slice(None), arrays, self._key(batch.first, count, batch.tokens))
                continue
            if self._packs and not is_alone:
                self._packs = False
                note(
                    f"cuDNN {cudnn.backend_version()} has no attention of several prompts over pages in one call: each "
                    "takes a separate call, which is slower"
                )
            for number in range(batch.first, batch.last):
                _, _, low, high = self._chunks[number]
                plan = _plan(replace(size, batch=1, tokens=padded_chunk(high - low)), self._stream)
                key = (0, 0, batch.tokens) if is_alone else None
                arrays = {**self._arrays(number, number + 1), "out_offsets": self._no_offset}
                yield PromptCall(plan, slice(low, high), arrays, key)

    def _key(self, *sizes: int) -> tuple[int, ...] | None:
        if len(self._captured) < MAX_CAPTURED_SIZES:
            self._captured.add(sizes)
        return sizes if sizes in self._captured else None

    def _arrays(self, first: int, last: int) -> dict[str, cuda.Array]:
        """Return the page table, new tokens and lengths of some chunks."""
        chunks = slice(first, last)
        table = self._table[chunks]
        return {"key_table": table, "value_table": table, "new": self._new[chunks], "held": self._lengths[chunks]}


@dataclass(frozen=True)
class _Size:
    """The sizes of a cuDNN plan: `batch` chunks of up to `tokens` tokens each."""

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
def _plan(size: _Size, stream: cuda.Stream) -> CudnnPlan:
    return CudnnPlan(size, stream, packed=False)


@functools.cache
def packed_plan(size: _Size, stream: cuda.Stream) -> CudnnPlan | None:
    """Return cuDNN's plan for packed chunks; None if it has none, and each chunk needs a call."""
    try:
        return CudnnPlan(size, stream, packed=True)
    except CheckError:
        return None


class CudnnPlan:
    """cuDNN's plan for one size, with its workspace; packed: chunks have offsets, else there is one chunk."""

    _workspaces: dict[int, cuda.Array] = {}  # by stream: calls on one stream run one after another

    def __init__(self, size: _Size, stream: cuda.Stream, packed: bool):
        spec = size.spec
        batch = size.batch
        data_type = {"float16": cudnn.data_type.HALF, "bfloat16": cudnn.data_type.BFLOAT16}[spec.dtype]
        handle = _handle(stream)
        graph = cudnn.pygraph(
            io_data_type=data_type,
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
                data_type=data_type,
            )

        def integers(name: str, requests: int, count: int) -> Any:
            return graph.tensor(
                name=name, dim=[requests, 1, count, 1], stride=[count, count, 1, 1], data_type=cudnn.data_type.INT32
            )

        inputs = {
            "query": graph.tensor(name="query", data_type=data_type, **tokens(spec.head_dim)),
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
            out, log_sums = graph.sdpa(
                name="attention",
                q=inputs["query"],
                k=inputs["keys"],
                v=inputs["values"],
                generate_stats=spec.sinks,
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
            out.set_output(True).set_dim(layout["dim"]).set_stride(layout["stride"]).set_data_type(data_type)
            if packed:
                out.set_ragged_offset(inputs["out_offsets"])
            if spec.sinks:
                log_sums.set_output(True).set_dim([batch, spec.heads, size.tokens, 1])
                log_sums.set_stride([spec.heads * size.tokens, size.tokens, 1, 1])
                log_sums.set_data_type(cudnn.data_type.FLOAT)
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
        # Call by uid: with tensors as keys, cuDNN would look up each uid in each call.
        self._inputs = {name: tensor.get_uid() for name, tensor in inputs.items()}
        self._out = out.get_uid()
        self._graph = graph
        self._handle = handle
        nbytes = max(1, graph.get_workspace_size())
        self._stream = stream
        self._sink_kernel: cuda.Kernel | None = None
        if spec.sinks:
            self._log_sums = log_sums.get_uid()
            self._log_sums_at = -(-nbytes // 256) * 256  # in the workspace
            self._grid = size.tokens, batch, 1
            self._sink_kernel = cuda.compile_kernels(including("attention_sinks.cu"), spec.options)["add_sinks"]
            nbytes = self._log_sums_at + 4 * batch * spec.heads * size.tokens
        workspace = CudnnPlan._workspaces.get(stream.handle)
        if workspace is None or workspace.nbytes < nbytes:
            # Plans with a smaller workspace keep it.
            workspace = cuda.empty((nbytes,), "u1", "attention to work in")
            CudnnPlan._workspaces[stream.handle] = workspace
        self._workspace = workspace

    def bind(self, call: PromptCall, query: cuda.Array, tokens: PagedTokens, out: cuda.Array) -> Call:
        arrays = {"query": query[call.tokens], "keys": tokens.keys, "values": tokens.values, **call.arrays}
        addresses = {uid: arrays[name].address for name, uid in self._inputs.items()}
        addresses[self._out] = out[call.tokens].address
        kernel = self._sink_kernel
        if kernel is None:
            return lambda: self._graph.execute(addresses, self._workspace.address, handle=self._handle)
        log_sums = self._workspace[self._log_sums_at :]
        addresses[self._log_sums] = log_sums.address
        new, offsets = call.arrays["new"], call.arrays["out_offsets"]
        sinks = tokens.query[call.tokens], out[call.tokens], log_sums, new, offsets

        def attend() -> None:
            self._graph.execute(addresses, self._workspace.address, handle=self._handle)
            kernel.launch(self._stream, self._grid, THREADS, *sinks)

        return attend
