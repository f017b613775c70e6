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

constexpr int QUERIES = KV_HEADS * GROUP * DIM / 8, KEYS = KV_HEADS * DIM / 8,
              VALUES = KV_HEADS * VALUE_DIM / 8;             // pieces of 8 numbers that a token has
constexpr int PIECES = QUERIES + (FP8 ? 0 : KEYS + VALUES);  // fp8_pages.cu writes the cache of fp8

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
    apply_rope(const QK* query, const QK* key, const Bits* value, Bits* query_out, Bits* keys, Bits* values,
               const float* own, const float* other, const int* partner, const int* rows, const void* positions,
               const int* pages, int pages_per_row) {
    const long long token = blockIdx.x, position = integer(positions, WIDE, token);
    const int row = rows[token];
    const long long page = row < 0 ? 0 : pages[row * pages_per_row + position / PAGE];
    const long long place =
        page * KV_HEADS * PAGE + position % PAGE;  // of the first head in the cache; the next one is PAGE further
    for (int piece = blockIdx.y * THREADS + threadIdx.x; piece < PIECES; piece += gridDim.y * THREADS) {
        if (piece < QUERIES + KEYS) {
            const bool is_query = piece < QUERIES;
            const int at = is_query ? piece : piece - QUERIES, head = at / (DIM / 8), j = at % (DIM / 8) * 8;
            const QK* from = is_query ? query + (token * KV_HEADS * GROUP + head) * (DIM + SINKS)
                                      : key + token * KEYS * 8 + head * DIM;
            float x[8], owns[8], others[8];
            if (SEPARATE || SINKS && is_query) {  // with a sink, heads do not begin where 16 bytes do
#pragma unroll
                for (int e = 0; e < 8; ++e) x[e] = number(from[first_of(partner, !is_query, j + e)]);
            } else load(x, from + j);
            load(owns, own + weights_of(position, !is_query) + j);
            load(others, other + weights_of(position, !is_query) + j);
#pragma unroll
            for (int e = 0; e < 8; ++e)
                x[e] = rope(x[e], owns[e], number(from[second_of(partner, !is_query, j + e)]), others[e]);
            Bits* to =
                is_query ? query_out + (token * KV_HEADS * GROUP + head) * DIM : keys + (place + head * PAGE) * DIM;
            if (is_query || row >= 0) put8(to + j, x);
        } else if (row >= 0) {
            const int at = piece - QUERIES - KEYS, head = at / (VALUE_DIM / 8), j = at % (VALUE_DIM / 8) * 8;
            copy8(values + (place + head * PAGE) * VALUE_DIM + j, value + token * VALUES * 8 + at * 8);
        }
    }
}
