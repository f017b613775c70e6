"""The kernels of an fp8 cache for prompts: what writes its pages, and what reads them for cuDNN's attention."""

from __future__ import annotations

from pathlib import Path

from lockstep.gpu import cuda
from lockstep.gpu.attention.kernel_spec import FP8_WORDS, THREADS, WORDS, AttentionKernelSpec, PagedTokens

_SOURCE = WORDS + FP8_WORDS + Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
_WARPS = THREADS // 32


class Fp8Pages:
    """The kernels of a spec, compiled for this GPU."""

    def __init__(self, spec: AttentionKernelSpec):
        self._kv_heads = spec.kv_heads
        module = cuda.compile_kernels(_SOURCE, spec.options)
        self._write = module["write_pages"]
        self._read = module["read_pages"]

    def write(self, stream: cuda.Stream, tokens: PagedTokens, query_out: cuda.Array) -> None:
        """Put the keys, with RoPE, and values of tokens into the pages of their rows: see `RopeKernel.launch`."""
        blocks = query_out.shape[0] * -(-2 * self._kv_heads // _WARPS)
        self._write.launch(stream, blocks, THREADS, *tokens.arguments(query_out))

    def read(
        self,
        stream: cuda.Stream,
        keys: cuda.Array,
        values: cuda.Array,
        table: cuda.Array,
        held: cuda.Array,
        keys_out: cuda.Array,
        values_out: cuda.Array,
    ) -> None:
        """Put the numbers of some requests' pages on the stream, as the cache holds them, to the bit.

        table [requests, pages_per_row]; held [requests, 1]: how many tokens each holds. keys_out, values_out
        [requests * pages_per_row, num_kv_heads, 64, dim]: the pages of a request one behind the other.
        """
        requests, pages_per_row = table.shape
        blocks = requests * pages_per_row * self._kv_heads
        arrays = keys, values, table, pages_per_row, held, keys_out, values_out
        self._read.launch(stream, blocks, THREADS, *arrays)
