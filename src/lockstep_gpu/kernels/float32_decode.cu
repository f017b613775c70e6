// Paged attention of one token a request in float32: RoPE, the write to the cache and attention. It has the arguments
// of paged_decode.cu. Prompts take it too, a block for each token.
//
// A block computes up to HEADS query heads of a KV head of a request, one after another. Warp w takes the visible
// tokens w, w + WARPS ..., each lane some dims; then the warps are combined in order. So a row's bits depend on its
// length alone. Blocks with blockIdx.x > 0, which paged_decode.cu needs for its splits, do nothing.
#ifndef KIND
#define KIND 0
#endif
#include "rope_tables.cuh"

#ifndef BY_ROW
#define BY_ROW 0
#endif

constexpr int WARPS = THREADS / 32, CHUNKS = (GROUP + HEADS - 1) / HEADS, QUERY_DIM = DIM + SINKS;
constexpr int DIMS = (DIM + 31) / 32, VALUE_DIMS = (VALUE_DIM + 31) / 32;  // of a lane

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    decode_attention(const QK* q, const QK* k, const Bits* v, Bits* out, Bits* k_cache, Bits* v_cache,
                     const float* first_weight, const float* second_weight, const int* partner, const int* rows,
                     const void* positions, const int* page_table, int pages_per_row, float scale, float* partials,
                     float* stats, int* counters) {
    __shared__ float with_rope[(HEADS + 1) * DIM];  // queries, then the new key
    // Of each warp: its largest score, the sum of its weights, its weighted values.
    __shared__ float tops[WARPS], weights[WARPS], parts[WARPS][VALUE_DIM];
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int kv = blockIdx.y / CHUNKS, chunk = blockIdx.y % CHUNKS, request = blockIdx.z;
    const int first_head = kv * GROUP + chunk * HEADS, heads = min(HEADS, GROUP - chunk * HEADS);
    const QK* queries = q + ((long long)request * KV_HEADS * GROUP + first_head) * QUERY_DIM;
    const QK* new_k = k + ((long long)request * KV_HEADS + kv) * DIM;
    const Bits* new_v = v + ((long long)request * KV_HEADS + kv) * VALUE_DIM;
    Bits* out_heads = out + ((long long)request * KV_HEADS * GROUP + first_head) * VALUE_DIM;
    const int row = rows[request];
    if (blockIdx.x) return;
    if (row < 0) {
        for (int i = tid; i < heads * VALUE_DIM; i += THREADS) out_heads[i] = 0;
        return;
    }
    const int position = (int)integer(positions, WIDE, request);
    const int window_start = WINDOW && position >= WINDOW ? position - WINDOW + 1 : 0;
    const int* row_table = page_table + (BY_ROW ? row : request) * pages_per_row;
    for (int i = tid; i < (HEADS + 1) * DIM; i += THREADS) {
        const int head = i / DIM, j = i % DIM;
        const bool is_key = head == HEADS;
        if (!is_key && head >= heads) continue;
        const QK* from = is_key ? new_k : queries + head * QUERY_DIM;
        const long long at = rope_weights_at(position, is_key) + j;
        with_rope[i] = rope(number(from[first_element(partner, is_key, j)]), first_weight[at],
                            number(from[second_element(partner, is_key, j)]), second_weight[at]);
    }
    __syncthreads();
    auto place_of = [&](int token) {
        return ((long long)row_table[token / PAGE] * KV_HEADS + kv) * PAGE + token % PAGE;
    };
    if (chunk == 0 && !BY_ROW) {
        const long long place = place_of(position);
        for (int j = tid; j < DIM; j += THREADS) k_cache[place * DIM + j] = with_rope[HEADS * DIM + j];
        for (int j = tid; j < VALUE_DIM; j += THREADS) v_cache[place * VALUE_DIM + j] = new_v[j];
    }
    for (int head = 0; head < heads; ++head) {
        float max_score = -1e30f, sum = 0, acc[VALUE_DIMS] = {};
        for (int token = window_start + warp; token <= position; token += WARPS) {
            const bool is_new = token == position;  // which another block may not have written yet
            const long long place = is_new ? 0 : place_of(token);
            const float* k_head = is_new ? with_rope + HEADS * DIM : k_cache + place * DIM;
            const Bits* v_head = is_new ? new_v : v_cache + place * VALUE_DIM;
            float score = 0;
#pragma unroll
            for (int n = 0; n < DIMS; ++n)
                if (const int j = n * 32 + lane; j < DIM)
                    score = __fmaf_rn(with_rope[head * DIM + j], k_head[j], score);
            score = warp_sum(score) * scale;  // in powers of two
            if (SOFTCAP) {
                const float cap = __uint_as_float(SOFTCAP) * 1.44269504f;
                score = cap * tanhf(score / cap);
            }
            const float new_max = fmaxf(max_score, score), rescale = exp2f(max_score - new_max),
                        weight = exp2f(score - new_max);
            max_score = new_max;
            sum = __fmaf_rn(sum, rescale, weight);
#pragma unroll
            for (int n = 0; n < VALUE_DIMS; ++n)
                if (const int j = n * 32 + lane; j < VALUE_DIM)
                    acc[n] = __fmaf_rn(acc[n], rescale, __fmul_rn(weight, v_head[j]));
        }
        __syncthreads();  // all have read the parts of the previous head
        if (lane == 0) {
            tops[warp] = max_score;
            weights[warp] = sum;
        }
#pragma unroll
        for (int n = 0; n < VALUE_DIMS; ++n)
            if (const int j = n * 32 + lane; j < VALUE_DIM) parts[warp][j] = acc[n];
        __syncthreads();
        float row_max = tops[0], denominator = 0;
        for (int w = 1; w < WARPS; ++w) row_max = fmaxf(row_max, tops[w]);
        const float sink = SINKS ? number(queries[head * QUERY_DIM + DIM]) * 1.44269504f : 0;
        if (SINKS) row_max = fmaxf(row_max, sink);
        for (int w = 0; w < WARPS; ++w) denominator = __fmaf_rn(weights[w], exp2f(tops[w] - row_max), denominator);
        if (SINKS) denominator += exp2f(sink - row_max);
        for (int j = tid; j < VALUE_DIM; j += THREADS) {
            float weighted = 0;
            for (int w = 0; w < WARPS; ++w) weighted = __fmaf_rn(parts[w][j], exp2f(tops[w] - row_max), weighted);
            out_heads[head * VALUE_DIM + j] = weighted / denominator;
        }
    }
}
