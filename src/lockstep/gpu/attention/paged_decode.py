"""The paged decode attention kernel: RoPE, cache write and attention at once, for launches cost most."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from lockstep.gpu import cuda
from lockstep.gpu.attention.kernel_spec import FP8_WORDS, SPLITS, THREADS, WORDS, AttentionKernelSpec, PagedTokens

# Compiled for each spec, behind the common words.
_SOURCE = Path(__file__).with_name("paged_decode.cu").read_text(encoding="utf-8")


class Scratch:
    """Memory in which blocks that share a row pass what its splits give, for `rows` requests of each of `specs`."""

    def __init__(self, specs: Iterable[AttentionKernelSpec], rows: int):
        multiprocessors = cuda.multiprocessors(cuda.current_device())
        groups = max(rows * spec.blocks for spec in specs)
        heads = []
        for spec in specs:
            shared = max((count for count in range(1, rows + 1) if spec.shares(count, multiprocessors) > 1), default=1)
            heads.append((spec.block_heads * spec.blocks * shared * SPLITS, spec.value_dim))
        what = "attention to work in"
        self.partials = cuda.empty((max(count * dim for count, dim in heads),), "f4", what)
        self.stats = cuda.empty((max(count for count, _ in heads), 2), "f4", what)
        self.counters = cuda.zeros((groups,), "i4")


class DecodeAttention:
    """The decode attention kernel of a spec, compiled for this GPU.

    by_row: request i is a token of row rows[i], of which there may be others, and all keys and values of them are in
    the cache already.
    """

    def __init__(self, spec: AttentionKernelSpec, by_row: bool = False):
        self._spec = spec
        self._multiprocessors = cuda.multiprocessors(cuda.current_device())
        options = *spec.options, f"-DBY_ROW={int(by_row)}"
        source = WORDS + (FP8_WORDS if spec.fp8 else "") + _SOURCE
        self._kernel = cuda.compile_kernels(source, options)["decode_attention"]

    def launch(self, stream: cuda.Stream, tokens: PagedTokens, out: cuda.Array, scale: float, scratch: Scratch) -> None:
        """Put the attention of each request's new token on the stream.

        out [num_requests, num_heads, value_dim]: the attention of each request's new token, at `positions[i]`, to all
        tokens of its row that it sees, the new one among them. Queries and keys get their RoPE first and are rounded.
        The new key and value go into the cache as `RopeKernel` writes them, to the bit. Unless `by_row`, request i is
        row i: rows[i] is i. It is -1 for a request that does not decode, which writes nowhere and whose `out` is 0.
        Products are of numbers of `dtype`, which those of an fp8 cache are to the bit, with fp32 accumulation. Scores,
        largest scores and sums of weights are fp32; weights are rounded to `dtype`.
        """
        spec = self._spec
        requests = out.shape[0]
        grid = spec.shares(requests, self._multiprocessors), spec.blocks, requests
        memory = scratch.partials, scratch.stats, scratch.counters
        scale *= math.log2(math.e)
        self._kernel.launch(stream, grid, THREADS, *tokens.arguments(out), scale, *memory)
