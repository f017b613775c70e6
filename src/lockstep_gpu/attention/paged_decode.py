"""The paged decode attention kernel: RoPE, cache write and attention in one launch, because launches dominate."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lockstep_gpu import cuda
from lockstep_gpu.attention.kernel_spec import SPLITS, THREADS, AttentionKernelSpec, PagedTokens
from lockstep_gpu.kernels.library import including


class Scratch:
    """Memory for the partial results of blocks that share a row, for `rows` requests of any of `specs`.

    partials: fp32 outputs of each split and head. stats: their largest score and sum of weights. counters: blocks that
    are done; the last block of a row combines the splits.
    """

    def __init__(self, specs: Iterable[AttentionKernelSpec], rows: int):
        multiprocessors = cuda.multiprocessors(cuda.current_device())
        partials = 0
        splits = 0
        counters = 0
        for spec in specs:
            shared_rows = 1  # the largest number of requests for which blocks share a row
            for count in range(1, rows + 1):
                if spec.shares(count, multiprocessors) > 1:
                    shared_rows = count
            head_splits = spec.block_heads * spec.blocks * shared_rows * SPLITS
            partials = max(partials, head_splits * spec.value_dim)
            splits = max(splits, head_splits)
            counters = max(counters, rows * spec.blocks)
        what = "attention to work in"
        self.partials = cuda.empty((partials,), "f4", what)
        self.stats = cuda.empty((splits, 2), "f4", what)
        self.counters = cuda.zeros((counters,), "i4")


class DecodeAttention:
    """The decode attention kernel of a spec, compiled for this GPU.

    by_row: request i is a token of row rows[i], which may have several, and whose keys and values are all in the cache
    already.
    """

    def __init__(self, spec: AttentionKernelSpec, by_row: bool = False):
        self._spec = spec
        self._multiprocessors = cuda.multiprocessors(cuda.current_device())
        options = *spec.options, f"-DBY_ROW={int(by_row)}"
        file = "float32_decode.cu" if spec.dtype == "float32" else "paged_decode.cu"
        self._kernel = cuda.compile_kernels(including(file), options)["decode_attention"]

    def launch(self, stream: cuda.Stream, tokens: PagedTokens, out: cuda.Array, scale: float, scratch: Scratch) -> None:
        """Enqueue the attention of each request's new token.

        RoPE is applied to queries and keys, which are then rounded to `dtype`. The new key and value are written to
        the cache with the same bits as by `RopeKernel`. GEMMs take `dtype` (fp8 values convert exactly) and accumulate
        in fp32; scores and softmax sums are fp32, weights are rounded to `dtype`.

        Args:
            tokens: Request i is row i (rows[i] is i) unless `by_row`. With rows[i] -1 it writes no cache, and its `out`
                is 0.
            out: [num_requests, num_heads, value_dim], the attention of the token at positions[i] to the tokens of its
                row up to itself, within the window.
            scale: Of the scores.
        """
        spec = self._spec
        requests = out.shape[0]
        grid = spec.shares(requests, self._multiprocessors), spec.blocks, requests
        memory = scratch.partials, scratch.stats, scratch.counters
        scale *= math.log2(math.e)
        self._kernel.launch(stream, grid, THREADS, *tokens.arguments(out), scale, *memory)
