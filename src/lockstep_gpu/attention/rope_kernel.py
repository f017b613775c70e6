"""The kernel that prepares prompts for cuDNN's attention: RoPE, and the writes of keys and values to the cache."""

from __future__ import annotations

from lockstep_gpu import cuda
from lockstep_gpu.attention.fp8_pages import Fp8Pages
from lockstep_gpu.attention.kernel_spec import THREADS, WORDS, AttentionKernelSpec, PagedTokens

SOURCE = r"""
constexpr int QUERIES = KV_HEADS * GROUP * DIM / 8, KEYS = KV_HEADS * DIM / 8, VALUES = KV_HEADS * VALUE_DIM / 8;  // pieces of 8 numbers that a token has
constexpr int PIECES = QUERIES + (FP8 ? 0 : KEYS + VALUES);  // fp8_pages.cu writes the cache of fp8

__device__ __forceinline__ void load(float (&out)[8], const float* from) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Four found = ((const Four*)from)[half];
#pragma unroll
        for (int e = 0; e < 4; ++e) out[4 * half + e] = found.w[e];
    }
}
__device__ __forceinline__ void load(float (&out)[8], const unsigned short* from) {
    const Vec8 found = *(const Vec8*)from;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        out[2 * e] = number((unsigned short)(found.w[e] & 0xffff));
        out[2 * e + 1] = number((unsigned short)(found.w[e] >> 16));
    }
}

// Blocks (token, slice of its pieces). A token of row -1 gets its RoPE, and is cached nowhere.
extern "C" __global__ void __launch_bounds__(THREADS)
apply_rope(const Given* query, const Given* key, const Bits* value, Bits* query_out, Bits* keys, Bits* values, const float* own, const float* other,
       const int* partner, const int* rows, const void* positions, const int* pages, int pages_per_row) {
    const long long token = blockIdx.x, position = WIDE ? ((const long long*)positions)[token] : ((const int*)positions)[token];
    const int row = rows[token];
    const long long page = row < 0 ? 0 : pages[row * pages_per_row + position / PAGE];
    const long long place = page * KV_HEADS * PAGE + position % PAGE;  // of the first head in the cache; the next one is PAGE further
    for (int piece = blockIdx.y * THREADS + threadIdx.x; piece < PIECES; piece += gridDim.y * THREADS) {
        if (piece < QUERIES + KEYS) {
            const bool is_query = piece < QUERIES;
            const int at = is_query ? piece : piece - QUERIES, head = at / (DIM / 8), j = at % (DIM / 8) * 8;
            const Given* from = is_query ? query + (token * KV_HEADS * GROUP + head) * (DIM + SINKS) : key + token * KEYS * 8 + head * DIM;
            float x[8], owns[8], others[8];
            if (SEPARATE || SINKS && is_query) {  // with a sink, heads do not begin where 16 bytes do
#pragma unroll
                for (int e = 0; e < 8; ++e) x[e] = number(from[first_of(partner, !is_query, j + e)]);
            } else load(x, from + j);
            load(owns, own + weights_of(position, !is_query) + j);
            load(others, other + weights_of(position, !is_query) + j);
#pragma unroll
            for (int e = 0; e < 8; ++e) x[e] = rope(x[e], owns[e], number(from[second_of(partner, !is_query, j + e)]), others[e]);
            Bits* to = is_query ? query_out + (token * KV_HEADS * GROUP + head) * DIM : keys + (place + head * PAGE) * DIM;
            if (is_query || row >= 0) *(Vec8*)(to + j) = Vec8{{pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])}};
        } else if (row >= 0) {
            const int at = piece - QUERIES - KEYS, head = at / (VALUE_DIM / 8), j = at % (VALUE_DIM / 8) * 8;
            *(Vec8*)(values + (place + head * PAGE) * VALUE_DIM + j) = *(const Vec8*)(value + token * VALUES * 8 + at * 8);
        }
    }
}
"""  # noqa: E501
_PIECES = 2  # of 8 elements, of a thread


class RopeKernel:
    """The RoPE kernel of a spec, compiled for this GPU."""

    def __init__(self, spec: AttentionKernelSpec):
        pieces = (spec.heads * spec.head_dim + spec.kv_heads * (spec.head_dim + spec.value_dim)) // 8
        self._pages = Fp8Pages(spec) if spec.fp8 else None
        self._slices = -(-pieces // (_PIECES * THREADS))
        self._kernel = cuda.compile_kernels(WORDS + SOURCE, spec.options)["apply_rope"]

    def launch(self, stream: cuda.Stream, tokens: PagedTokens, query_out: cuda.Array) -> None:
        """Enqueue RoPE and the writes to the paged cache.

        Keys, with RoPE, and values are written to the pages of row `rows[token]` (-1: nowhere) at `positions[token]`.
        Queries and keys may be float32.

        query_out: [num_tokens, num_heads, head_dim], the queries with RoPE.
        """
        self._kernel.launch(stream, (query_out.shape[0], self._slices, 1), THREADS, *tokens.arguments(query_out))
        if self._pages is not None:
            self._pages.write(stream, tokens, query_out)
