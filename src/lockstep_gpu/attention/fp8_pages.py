"""The kernels of an fp8 cache for prompts: one writes its pages, the other dequantizes them for cuDNN's attention."""

from __future__ import annotations

from lockstep_gpu import cuda
from lockstep_gpu.attention.kernel_spec import THREADS, AttentionKernelSpec, PagedTokens
from lockstep_gpu.kernels.library import including

_WARPS = THREADS // 32


class Fp8Pages:
    """The kernels of a spec, compiled for this GPU."""

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
