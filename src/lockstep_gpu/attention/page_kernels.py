"""The kernels that prepare prompts for cuDNN's attention: RoPE, writes to the cache, and reads of fp8 pages."""

from __future__ import annotations

from lockstep_gpu import cuda
from lockstep_gpu.attention.kernel_spec import THREADS, AttentionKernelSpec, PagedTokens
from lockstep_gpu.kernels.library import including

_PIECES = 2  # of 8 elements, of a thread
_WARPS = THREADS // 32


class RopeKernel:
    """The RoPE kernel of a spec, compiled for this GPU."""

    def __init__(self, spec: AttentionKernelSpec):
        pieces = (spec.heads * spec.head_dim + spec.kv_heads * (spec.head_dim + spec.value_dim)) // 8
        self._pages = Fp8Pages(spec) if spec.fp8 else None
        self._slices = -(-pieces // (_PIECES * THREADS))
        self._kernel = cuda.compile_kernels(including("apply_rope.cu"), spec.options)["apply_rope"]

    def launch(self, stream: cuda.Stream, tokens: PagedTokens, query_out: cuda.Array) -> None:
        """Enqueue RoPE and the writes to the paged cache.

        Keys, with RoPE, and values are written to the pages of row `rows[token]` (-1: nowhere) at `positions[token]`.
        Queries and keys may be float32.

        query_out: [num_tokens, num_heads, head_dim], the queries with RoPE.
        """
        self._kernel.launch(stream, (query_out.shape[0], self._slices, 1), THREADS, *tokens.arguments(query_out))
        if self._pages is not None:
            self._pages.write(stream, tokens, query_out)


class Fp8Pages:
    """The kernels of a spec's fp8 cache: one writes its pages, the other dequantizes them for cuDNN's attention."""

    def __init__(self, spec: AttentionKernelSpec):
        self._kv_heads = spec.kv_heads
        module = cuda.compile_kernels(including("fp8_pages.cu"), spec.options)
        self._write = module["write_pages"]
        self._read = module["read_pages"]

    def write(self, stream: cuda.Stream, tokens: PagedTokens, query_out: cuda.Array) -> None:
        """Enqueue the writes of keys, with RoPE, and values to the pages of their rows: see `RopeKernel.launch`."""
        blocks = query_out.shape[0] * -(-2 * self._kv_heads // _WARPS)
        self._write.launch(stream, blocks, THREADS, *tokens.arguments(query_out))

    def read(
        self,
        stream: cuda.Stream,
        keys: cuda.Array,
        values: cuda.Array,
        table: cuda.Array,
        lengths: cuda.Array,
        keys_out: cuda.Array,
        values_out: cuda.Array,
    ) -> None:
        """Enqueue the dequantization of some requests' pages, to the values that decoding reads, bit for bit.

        Args:
            table: [requests, pages_per_row].
            lengths: [requests, 1], the tokens of each request.
            keys_out, values_out: [requests * pages_per_row, num_kv_heads, 64, dim], request by request.
        """
        requests, pages_per_row = table.shape
        blocks = requests * pages_per_row * self._kv_heads
        self._read.launch(stream, blocks, THREADS, keys, values, table, pages_per_row, lengths, keys_out, values_out)
