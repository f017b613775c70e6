// Adds the attention sinks of queries to cuDNN's attention of prompts, which has none.
#include "attention.cuh"

// Blocks (token of a chunk, chunk). A sink is an extra logit, so it adds a term to the softmax's sum alone: attention
// times exp(log_sums) / (exp(log_sums) + exp(sink)).
extern "C" __global__ void __launch_bounds__(THREADS)
    add_sinks(const QK* q, Bits* out, const float* log_sums, const int* new_tokens, const int* out_offsets) {
    constexpr int HEADS_OF_ALL = KV_HEADS * GROUP, WIDTH = HEADS_OF_ALL * VALUE_DIM;
    const int token = blockIdx.x, chunk = blockIdx.y;
    if (token >= new_tokens[chunk]) return;
    const long long at = out_offsets[chunk] / WIDTH + token;
    for (int piece = threadIdx.x; piece < WIDTH / 8; piece += THREADS) {
        const int head = piece / (VALUE_DIM / 8);
        const float sink = number(q[(at * HEADS_OF_ALL + head) * (DIM + 1) + DIM]);
        const float log_sum = log_sums[(long long)(chunk * HEADS_OF_ALL + head) * gridDim.x + token];
        const float share = 1 / (1 + expf(sink - log_sum));
        u32* words = (u32*)(out + at * WIDTH) + piece * 4;
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const unsigned short low = words[pair] & 0xffff, high = words[pair] >> 16;
            words[pair] = pack(number(low) * share, number(high) * share);
        }
    }
}
