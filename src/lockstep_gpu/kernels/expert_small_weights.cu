// Products of tokens' rows with the weights of their experts, [out_features, in_features] of integers or of e2m1
// numbers.
//
// Integers are stored as MatMulNBits stores them: uint8 less 128, or four bits less 8, the first of two in the low half
// of a byte; scales are fp16, times 2^8 (small_weights.cu). Numbers of e2m1 (MXFP4) have four bits in the same order; a
// scale is a byte, its exponent.
//
// 32 columns are two mma.m16n8k16. A sum does not depend on which lane holds which column, as long as both factors
// agree, so each lane has eight contiguous ones. The columns of a group are accumulated without their scale, and the
// sum is multiplied by it in fp32: a row has the same bits whatever the size of tiles.
//
// DENSE: GEMMs of all rows with one weight of integers, in bf16. Its 8 bits of mantissa hold each integer, but not its
// product with a scale, so the weight cannot be dequantized first.
#include "expert_rows.cuh"

#define E2M1 0
#ifndef ON_HOST
__device__ __forceinline__ u32 hadd2(u32 a, u32 b) {  // of bf16, by an instruction that all GPUs of this library have
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(0x3f803f80u), "r"(b));
    return r;
}
__device__ __forceinline__ float of_bits(u32 bits) { return __uint_as_float(bits); }
#endif

// The numbers of a lane's eight columns as pairs of fp16. Four bits: (0, 4), (1, 5), (2, 6), (3, 7). Exact: 1024 + q
// has all integers, and fp16 all numbers of e2m1 times 2^-14.
template <int FORM>
__device__ __forceinline__ void unpack(const u32* words, u32* pairs) {
#if KIND == 2
    if constexpr (FORM != E2M1) {  // 128 + q of 7 bits: its difference to 128 or 256 (8 bits), or to 136, is exact
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 word = FORM == 8 ? words[i / 2] >> i % 2 * 16 : words[0] >> i * 4;
            if (FORM == 8) word = (word & 0xff) | (word & 0xff00) << 8;
            if (FORM == 8) pairs[i] = hadd2((word & 0x007f007fu) | 0x43004300u, (word & 0x00800080u) ^ 0xc380c380u);
            else pairs[i] = hadd2((word & 0x000f000fu) | 0x43004300u, 0xc308c308u);
        }
    } else {
        u32 bytes[2][2];  // of e2m1's numbers, which bf16 has: by a table of high and of low bytes
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 codes = words[0] >> i * 16 & 0x7777u;  // without signs
            bytes[i][0] = __byte_perm(0xc0800000u, 0xc0804000u, codes);
            bytes[i][1] = __byte_perm(0x3f3f3f00u, 0x40404040u, codes);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 order = i * 0x1111u + 0x4040u, low = __byte_perm(bytes[0][0], bytes[0][1], order),
                high = __byte_perm(bytes[1][0], bytes[1][1], order);
            pairs[i] = __byte_perm(low, high, 0x5410u) | (words[0] >> i * 4 & 0x00080008u) << 12;
        }
    }
#else
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 word = FORM == 8 ? words[i / 2] >> i % 2 * 16 : words[0] >> i * 4;
        if (FORM == 8) pairs[i] = hsub2((word & 0xff) | (word & 0xff00) << 8 | 0x64006400u, 0x64806480u);
        else if (FORM == 4) pairs[i] = hsub2((word & 0x000f000fu) | 0x64006400u, 0x64086408u);
        else pairs[i] = (word & 0x00070007u) << 9 | (word & 0x00080008u) << 12;
    }
#endif
}
template <int FORM>
__device__ __forceinline__ float scale_at(const void* scales, long long at) {
    if (FORM == E2M1) return of_bits((((const unsigned char*)scales)[at] + (KIND == 1 ? 14 : 0)) << 23);
    return number_of_half(((const unsigned short*)scales)[at]) * 0.00390625f;
}

template <int FORM, int ROWS, int TILE_OUTPUTS, int COLUMNS, int STAGES, int WARPS_M, int WARPS_N, int THREADS,
          bool DENSE = false>
__device__ __forceinline__ void small_experts(const unsigned char* weight, const void* scales, const unsigned short* x,
                                              unsigned short* out, const int* order, const Tile* tiles,
                                              int rows_per_input, int out_features, int in_features, int group_size,
                                              int output_blocks, int dense_rows = 0) {
    constexpr int BITS = FORM == 8 ? 8 : 4, WORDS = BITS / 4, ROW_BYTES = COLUMNS * 2,
                  WEIGHT_BYTES = COLUMNS * BITS / 8;
    constexpr int WEIGHT = TILE_OUTPUTS * WEIGHT_BYTES, STAGE = WEIGHT + ROWS * ROW_BYTES;
    constexpr int TILES_M = TILE_OUTPUTS / WARPS_M / 16,
                  TILES_N = ROWS / WARPS_N / 8;  // of 16 outputs and of 8 rows, of a warp
    constexpr int WEIGHT_PIECES = WEIGHT_BYTES / 16, COPIES = TILE_OUTPUTS * WEIGHT_PIECES / THREADS;
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, warp_m = warp % WARPS_M, warp_n = warp / WARPS_M,
        quad_lane = lane % 4;
    int first = blockIdx.x % output_blocks * TILE_OUTPUTS, steps = (in_features + COLUMNS - 1) / COLUMNS,
        groups = in_features / group_size;
    next_may_start();
    wait_for_previous();
    Tile tile;
    if (DENSE) {
        int first_row = blockIdx.x / output_blocks * ROWS;
        x += (long long)first_row * in_features;
        out += (long long)first_row * out_features;
        tile = {0, 0, min(ROWS, dense_rows - first_row), 0};
    } else tile = tiles[blockIdx.x / output_blocks];
    if (!tile.count) return;
    u32 base = shared_memory();
    long long expert_row = (long long)tile.expert * out_features;
    const unsigned short* from[ROW_COPIES<ROWS, COLUMNS, THREADS>];  // null after the tile's last row
#pragma unroll
    for (int i = 0; i < ROW_COPIES<ROWS, COLUMNS, THREADS>; i++) {
        int row = (i * THREADS + tid) / (COLUMNS / 8);
        from[i] = row < tile.count
                      ? x + (long long)(DENSE ? row : order[tile.first + row] / rows_per_input) * in_features
                      : nullptr;
    }
    auto load = [&](int step) {
        u32 to = base + step % STAGES * STAGE;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            int n = i * THREADS + tid, row = n / WEIGHT_PIECES, piece = n % WEIGHT_PIECES,
                column = step * COLUMNS + piece * 128 / BITS;
            bool in = column < in_features && first + row < out_features;
            long long at = ((expert_row + first + row) * in_features + column) * BITS / 8;
            cp_async(to + swizzle<WEIGHT_BYTES>(row, piece), weight + (in ? at : 0), in);
        }
        copy_rows<ROWS, COLUMNS, THREADS>(to + WEIGHT, from, x, step, in_features);
    };
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) load(step);
        cp_async_commit();
    }
    float acc[TILES_M][TILES_N][4] = {}, group_acc[TILES_M][TILES_N][4] = {}, scale[TILES_M][2] = {};
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) load(step + STAGES - 1);
        cp_async_commit();
        if (warp_n >= WARPS_N) continue;
        const unsigned char *weights = memory + step % STAGES * STAGE, *rows = weights + WEIGHT;
#pragma unroll
        for (int k32 = 0; k32 < COLUMNS / 32; k32++) {  // 32 columns at a time
            int column = step * COLUMNS + k32 * 32;
            if (column >= in_features) break;
            if (column % group_size == 0)
#pragma unroll
                for (int i = 0; i < TILES_M * 2; i++) {
                    int output = min(first + (warp_m * TILES_M + i / 2) * 16 + lane / 4 + i % 2 * 8, out_features - 1);
                    scale[i / 2][i % 2] = scale_at<FORM>(scales, (expert_row + output) * groups + column / group_size);
                }
            u32 pairs[TILES_M][2][4];
#pragma unroll
            for (int i = 0; i < TILES_M * 2; i++) {
                int row = (warp_m * TILES_M + i / 2) * 16 + lane / 4 + i % 2 * 8, byte = quad_lane * WORDS * 4;
                const unsigned char* at = weights + swizzle<WEIGHT_BYTES>(row, k32 * WORDS + byte / 16) + byte % 16;
                u32 words[WORDS];
#pragma unroll
                for (int word = 0; word < WORDS; word++) words[word] = ((const u32*)at)[word];
                unpack<FORM>(words, pairs[i / 2][i % 2]);
            }
#pragma unroll
            for (int n = 0; n < TILES_N; n++) {
                Words4 b = *(const Words4*)(rows + swizzle<ROW_BYTES>((warp_n * TILES_N + n) * 8 + lane / 4,
                                                                      k32 * 4 + quad_lane));
                if (BITS == 4)  // in the order of the pairs
                    b = {__byte_perm(b.w[0], b.w[2], 0x5410), __byte_perm(b.w[0], b.w[2], 0x7632),
                         __byte_perm(b.w[1], b.w[3], 0x5410), __byte_perm(b.w[1], b.w[3], 0x7632)};
#pragma unroll
                for (int i = 0; i < TILES_M * 2; i++) {
                    u32(*tile_pairs)[4] = pairs[i / 2], half = i % 2 * 2;
                    u32 a[4] = {tile_pairs[0][half], tile_pairs[1][half], tile_pairs[0][half + 1],
                                tile_pairs[1][half + 1]};
                    mma(group_acc[i / 2][n], a, b.w + half);
                }
            }
            if ((column + 32) % group_size == 0)
#pragma unroll
                for (int i = 0; i < TILES_M * TILES_N * 4; i++) {
                    float& group_sum = group_acc[i / 4 / TILES_N][i / 4 % TILES_N][i % 4];
                    float& sum = acc[i / 4 / TILES_N][i / 4 % TILES_N][i % 4];
                    sum = fmaf(group_sum, scale[i / 4 / TILES_N][i % 4 / 2], sum);
                    group_sum = 0;
                }
        }
    }
    store<TILES_M, TILES_N, TILE_OUTPUTS, THREADS, DENSE>(acc, warp_m, warp_n, warp_n < WARPS_N, out + first,
                                                          order + tile.first, tile.count, out_features,
                                                          out_features - first);
}

#define EXPERTS(NAME, FORM, ROWS, TILE_OUTPUTS, COLUMNS, STAGES, WARPS_M, WARPS_N, THREADS) \
    extern "C" __global__ void __launch_bounds__(THREADS) \
        NAME(const unsigned char* weight, const void* scales, const unsigned short* x, unsigned short* out, \
             const int* order, const Tile* tiles, int rows_per_input, int out_features, int in_features, \
             int group_size, int output_blocks) { \
        small_experts<FORM, ROWS, TILE_OUTPUTS, COLUMNS, STAGES, WARPS_M, WARPS_N, THREADS>( \
            weight, scales, x, out, order, tiles, rows_per_input, out_features, in_features, group_size, \
            output_blocks); \
    }
// small_BITS_ROWS and e2m1_ROWS.
EXPERTS(small_8_8, 8, 8, 32, 256, 4, 2, 1, 128)
EXPERTS(small_8_16, 8, 16, 32, 256, 4, 2, 2, 128)
EXPERTS(small_8_64, 8, 64, 128, 128, 3, 4, 2, 256)
EXPERTS(small_4_8, 4, 8, 32, 256, 4, 2, 1, 128)
EXPERTS(small_4_16, 4, 16, 32, 256, 4, 2, 2, 128)
EXPERTS(small_4_64, 4, 64, 128, 128, 3, 4, 2, 256)
EXPERTS(e2m1_8, E2M1, 8, 32, 256, 4, 2, 1, 128)
EXPERTS(e2m1_16, E2M1, 16, 32, 256, 4, 2, 2, 128)
EXPERTS(e2m1_64, E2M1, 64, 128, 128, 3, 4, 2, 256)

#if KIND == 2
#define PRODUCTS(NAME, FORM, ROWS, TILE_OUTPUTS, COLUMNS, STAGES, WARPS_M, WARPS_N, THREADS) \
    extern "C" __global__ void __launch_bounds__(THREADS) \
        NAME(const unsigned char* weight, const void* scales, const unsigned short* x, unsigned short* out, \
             int out_features, int in_features, int group_size, int output_blocks, int rows) { \
        small_experts<FORM, ROWS, TILE_OUTPUTS, COLUMNS, STAGES, WARPS_M, WARPS_N, THREADS, true>( \
            weight, scales, x, out, nullptr, nullptr, 1, out_features, in_features, group_size, output_blocks, rows); \
    }
PRODUCTS(dense_8_8, 8, 8, 32, 256, 4, 2, 1, 128)
PRODUCTS(dense_8_16, 8, 16, 32, 256, 4, 2, 2, 128)
PRODUCTS(dense_8_64, 8, 64, 128, 128, 3, 4, 2, 256)
PRODUCTS(dense_4_8, 4, 8, 32, 256, 4, 2, 1, 128)
PRODUCTS(dense_4_16, 4, 16, 32, 256, 4, 2, 2, 128)
PRODUCTS(dense_4_64, 4, 64, 128, 128, 3, 4, 2, 256)
#endif
