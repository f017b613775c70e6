"""The kernel that prepares prompts for cuDNN's attention: RoPE, and the writes of keys and values to the cache."""

from __future__ import annotations

from lockstep_gpu import cuda
from lockstep_gpu.attention.fp8_pages import Fp8Pages
from lockstep_gpu.attention.kernel_spec import THREADS, AttentionKernelSpec, PagedTokens
from lockstep_gpu.kernels.library import including

_PIECES = 2  # of 8 elements, of a thread


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
