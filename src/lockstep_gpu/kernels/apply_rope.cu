// Prepares prompts for cuDNN's attention: RoPE, and the writes of keys and values to the cache.
#include "rope_tables.cuh"

// Eight numbers of KIND.
__device__ __forceinline__ void copy8(Bits* to, const Bits* from) {
    constexpr int VECTORS = sizeof(Bits) / 2;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) ((Words4*)to)[i] = ((const Words4*)from)[i];
}
__device__ __forceinline__ void put8(unsigned short* to, const float (&x)[8]) {
    *(Words4*)to = Words4{{pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])}};
}
__device__ __forceinline__ void put8(float* to, const float (&x)[8]) {
    ((Vec4*)to)[0] = Vec4{{x[0], x[1], x[2], x[3]}};
    ((Vec4*)to)[1] = Vec4{{x[4], x[5], x[6], x[7]}};
}

// Pieces of 8 numbers that a token has. The keys and values of an fp8 cache are written by fp8_pages.cu.
constexpr int QUERIES = KV_HEADS * GROUP * DIM / 8;
constexpr int KEYS = KV_HEADS * DIM / 8, VALUES = KV_HEADS * VALUE_DIM / 8;
constexpr int PIECES = QUERIES + (FP8 ? 0 : KEYS + VALUES);

__device__ __forceinline__ void load(float (&out)[8], const float* from) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Vec4 vec = ((const Vec4*)from)[half];
#pragma unroll
        for (int e = 0; e < 4; ++e) out[4 * half + e] = vec.v[e];
    }
}
__device__ __forceinline__ void load(float (&out)[8], const unsigned short* from) {
    const Words4 vec = *(const Words4*)from;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        out[2 * e] = number((unsigned short)(vec.w[e] & 0xffff));
        out[2 * e + 1] = number((unsigned short)(vec.w[e] >> 16));
    }
}

// Blocks (token, slice of its pieces). A token of row -1 gets its RoPE, and is cached nowhere.
extern "C" __global__ void __launch_bounds__(THREADS)
    apply_rope(const QK* q, const QK* k, const Bits* v, Bits* q_out, Bits* k_cache, Bits* v_cache,
               const float* first_weight, const float* second_weight, const int* partner, const int* rows,
               const void* positions, const int* page_table, int pages_per_row) {
    const long long token = blockIdx.x, position = integer(positions, WIDE, token);
    const int row = rows[token];
    const long long page = row < 0 ? 0 : page_table[row * pages_per_row + position / PAGE];
    // The token's place in the cache of the first KV head, counted in tokens; that of the next head is PAGE further.
    const long long place = page * KV_HEADS * PAGE + position % PAGE;
    for (int piece = blockIdx.y * THREADS + threadIdx.x; piece < PIECES; piece += gridDim.y * THREADS) {
        if (piece < QUERIES + KEYS) {
            const bool is_query = piece < QUERIES;
            const int at = is_query ? piece : piece - QUERIES, head = at / (DIM / 8), dim = at % (DIM / 8) * 8;
            const QK* from =
                is_query ? q + (token * KV_HEADS * GROUP + head) * (DIM + SINKS) : k + token * KEYS * 8 + head * DIM;
            float x[8], first_weights[8], second_weights[8];
            if (SEPARATE || SINKS && is_query) {  // with a sink, heads do not begin where 16 bytes do
#pragma unroll
                for (int e = 0; e < 8; ++e) x[e] = number(from[first_element(partner, !is_query, dim + e)]);
            } else load(x, from + dim);
            load(first_weights, first_weight + rope_weights_at(position, !is_query) + dim);
            load(second_weights, second_weight + rope_weights_at(position, !is_query) + dim);
#pragma unroll
            for (int e = 0; e < 8; ++e)
                x[e] = rope(x[e], first_weights[e], number(from[second_element(partner, !is_query, dim + e)]),
                            second_weights[e]);
            Bits* to =
                is_query ? q_out + (token * KV_HEADS * GROUP + head) * DIM : k_cache + (place + head * PAGE) * DIM;
            if (is_query || row >= 0) put8(to + dim, x);
        } else if (row >= 0) {
            const int at = piece - QUERIES - KEYS, head = at / (VALUE_DIM / 8), dim = at % (VALUE_DIM / 8) * 8;
            copy8(v_cache + (place + head * PAGE) * VALUE_DIM + dim, v + token * VALUES * 8 + at * 8);
        }
    }
}
