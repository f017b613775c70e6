// Writes the keys and values of prompts into fp8 pages, and dequantizes pages for cuDNN's attention.
#include "fp8_heads.cuh"
#include "rope_tables.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int HEAD_BLOCKS = (2 * KV_HEADS + WARPS - 1) / WARPS;  // of a token: a warp has the key or value of a head

// Block token * HEAD_BLOCKS + part. RoPE of keys is that of paged_decode.cu, bit for bit. A token of row -1 is not
// written.
extern "C" __global__ void __launch_bounds__(THREADS)
    write_pages(const QK* q, const QK* k, const Bits* v, Bits* q_out, Code* k_cache, Code* v_cache,
                const float* first_weight, const float* second_weight, const int* partner, const int* rows,
                const void* positions, const int* page_table, int pages_per_row) {
    const long long token = blockIdx.x / HEAD_BLOCKS, position = integer(positions, WIDE, token);
    const int row = rows[token];
    const int warp = blockIdx.x % HEAD_BLOCKS * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32, head = warp / 2;
    if (row < 0 || head >= KV_HEADS) return;
    const long long place = (long long)page_table[row * pages_per_row + position / PAGE] * KV_HEADS + head,
                    at = position % PAGE;
    if (warp % 2) {
        const Bits* from = v + (token * KV_HEADS + head) * VALUE_DIM;
        Code* page = v_cache + place * head_bytes(VALUE_DIM);
        encode_head<VALUE_DIM>([&](int i) { return from[i]; }, lane, page + at * VALUE_DIM,
                               page + PAGE * VALUE_DIM + at);
    } else {
        const QK* from = k + (token * KV_HEADS + head) * DIM;
        const float *first_weights = first_weight + rope_weights_at(position, true),
                    *second_weights = second_weight + rope_weights_at(position, true);
        Code* page = k_cache + place * head_bytes(DIM);
        const auto with_rope = [&](int i) {
            const QK x = from[first_element(partner, true, i)], y = from[second_element(partner, true, i)];
            return (Bits)pack(rope(number(x), first_weights[i], number(y), second_weights[i]), 0);
        };
        encode_head<DIM>(with_rope, lane, page + at * DIM, page + PAGE * DIM + at);
    }
}

template <int SIZE>
__device__ __forceinline__ void read_head(const Code* page, int tokens, Bits* out) {
    for (int at = threadIdx.x * 8; at < PAGE * SIZE; at += THREADS * 8) {
        const int token = at / SIZE;
        const float scale = number_of_half((unsigned short)(page[PAGE * SIZE + token] << 8)) * CODE_UNIT;
        const Words2 codes = *(const Words2*)(page + at);
        Words4 vec;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const unsigned pair = e4m3_to_half2(codes.w[n / 2], n % 2);
            const unsigned scaled = pack(number_of_half((unsigned short)pair) * scale,
                                         number_of_half((unsigned short)(pair >> 16)) * scale);
            vec.w[n] = token < tokens ? scaled : 0;
        }
        *(Words4*)(out + at) = vec;
    }
}

// Block (request, page, KV head). Writes each request's pages contiguously, as many as a page table can have, with
// zeros after its last token.
extern "C" __global__ void __launch_bounds__(THREADS)
    read_pages(const Code* k_cache, const Code* v_cache, const int* page_table, int pages_per_row, const int* lengths,
               Bits* k_out, Bits* v_out) {
    const int head = blockIdx.x % KV_HEADS, place = blockIdx.x / KV_HEADS, page = place % pages_per_row,
              tokens = lengths[place / pages_per_row] - page * PAGE;
    if (tokens <= 0) return;
    const long long from = (long long)page_table[place] * KV_HEADS + head, to = (long long)place * KV_HEADS + head;
    read_head<DIM>(k_cache + from * head_bytes(DIM), tokens, k_out + to * PAGE * DIM);
    read_head<VALUE_DIM>(v_cache + from * head_bytes(VALUE_DIM), tokens, v_out + to * PAGE * VALUE_DIM);
}
