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
__device__ __forceinline__ u32 sub2(u32 a, u32 b) {
    u32 r;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 sum2(u32 a, u32 b) {  // of bf16, by an instruction that all GPUs of this library have
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
            if (FORM == 8) pairs[i] = sum2((word & 0x007f007fu) | 0x43004300u, (word & 0x00800080u) ^ 0xc380c380u);
            else pairs[i] = sum2((word & 0x000f000fu) | 0x43004300u, 0xc308c308u);
        }
    } else {
        u32 bytes[2][2];  // of e2m1's numbers, which bf16 has: by a table of high and of low bytes
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 codes = words[0] >> i * 16 & 0x7777u;
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
        if (FORM == 8) pairs[i] = sub2((word & 0xff) | (word & 0xff00) << 8 | 0x64006400u, 0x64806480u);
        else if (FORM == 4) pairs[i] = sub2((word & 0x000f000fu) | 0x64006400u, 0x64086408u);
        else pairs[i] = (word & 0x00070007u) << 9 | (word & 0x00080008u) << 12;
    }
#endif
}
template <int FORM>
__device__ __forceinline__ float factor(const void* scales, long long at) {
    if (FORM == E2M1) return of_bits((((const unsigned char*)scales)[at] + (KIND == 1 ? 14 : 0)) << 23);
    return number_of_half(((const unsigned short*)scales)[at]) * 0.00390625f;
}

template <int FORM, int ROWS, int OUTS, int COLUMNS, int DEPTH, int ACROSS, int BESIDE, int BLOCK, bool DENSE = false>
__device__ __forceinline__ void small_experts(const unsigned char* weight, const void* scales, const unsigned short* x,
                                              unsigned short* out, const int* order, const Tile* tiles, int sharing,
                                              int out_features, int in_features, int group_size, int out_blocks,
                                              int dense_rows = 0) {
    constexpr int BITS = FORM == 8 ? 8 : 4, WORDS = BITS / 4, ROW_BYTES = COLUMNS * 2,
                  WEIGHT_BYTES = COLUMNS * BITS / 8;
    constexpr int WEIGHT = OUTS * WEIGHT_BYTES, STAGE = WEIGHT + ROWS * ROW_BYTES;
    constexpr int TILES = OUTS / ACROSS / 16, PARTS = ROWS / BESIDE / 8;  // of 16 outputs and of 8 rows, of a warp
    constexpr int ROW_PIECES = ROW_BYTES / 16, WEIGHT_PIECES = WEIGHT_BYTES / 16;
    constexpr int LOADS = OUTS * WEIGHT_PIECES / BLOCK, ROW_LOADS = ROWS * ROW_PIECES / BLOCK;
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, across = warp % ACROSS, beside = warp / ACROSS,
        four = lane % 4;
    int first = blockIdx.x % out_blocks * OUTS, steps = (in_features + COLUMNS - 1) / COLUMNS,
        groups = in_features / group_size;
    next_may_start();
    wait_for_previous();
    Tile tile;
    if (DENSE) {
        int before = blockIdx.x / out_blocks * ROWS;
        x += (long long)before * in_features;
        out += (long long)before * out_features;
        tile = {0, 0, min(ROWS, dense_rows - before), 0};
    } else tile = tiles[blockIdx.x / out_blocks];
    if (!tile.count) return;
    u32 base = shared_memory();
    long long rows_before = (long long)tile.expert * out_features;
    const unsigned short* from[ROW_LOADS];
#pragma unroll
    for (int i = 0; i < ROW_LOADS; i++) {
        int row = (i * BLOCK + tid) / ROW_PIECES;
        from[i] = row < tile.count ? x + (long long)(DENSE ? row : order[tile.first + row] / sharing) * in_features : nullptr;
    }
    auto load = [&](int step) {
        u32 to = base + step % DEPTH * STAGE;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int n = i * BLOCK + tid, row = n / WEIGHT_PIECES, piece = n % WEIGHT_PIECES,
                column = step * COLUMNS + piece * 128 / BITS;
            bool in = column < in_features && first + row < out_features;
            long long at = ((rows_before + first + row) * in_features + column) * BITS / 8;
            copy_async(to + place_of<WEIGHT_BYTES>(row, piece), weight + (in ? at : 0), in);
        }
#pragma unroll
        for (int i = 0; i < ROW_LOADS; i++) {
            int n = i * BLOCK + tid, row = n / ROW_PIECES, piece = n % ROW_PIECES, column = step * COLUMNS + piece * 8;
            bool in = column < in_features && from[i] != nullptr;
            copy_async(to + WEIGHT + place_of<ROW_BYTES>(row, piece), in ? from[i] + column : x, in);
        }
    };
#pragma unroll
    for (int step = 0; step < DEPTH - 1; step++) {
        if (step < steps) load(step);
        commit();
    }
    float sums[TILES][PARTS][4] = {}, part[TILES][PARTS][4] = {}, scale[TILES][2] = {};
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        wait_but_for<DEPTH - 2>();
        __syncthreads();
        if (step + DEPTH - 1 < steps) load(step + DEPTH - 1);
        commit();
        if (beside >= BESIDE) continue;
        const unsigned char *weights = memory + step % DEPTH * STAGE, *rows = weights + WEIGHT;
#pragma unroll
        for (int turn = 0; turn < COLUMNS / 32; turn++) {
            int column = step * COLUMNS + turn * 32;
            if (column >= in_features) break;
            if (column % group_size == 0)
#pragma unroll
                for (int i = 0; i < TILES * 2; i++) {
                    int output = min(first + (across * TILES + i / 2) * 16 + lane / 4 + i % 2 * 8, out_features - 1);
                    scale[i / 2][i % 2] = factor<FORM>(scales, (rows_before + output) * groups + column / group_size);
                }
            u32 pairs[TILES][2][4];
#pragma unroll
            for (int i = 0; i < TILES * 2; i++) {
                int row = (across * TILES + i / 2) * 16 + lane / 4 + i % 2 * 8, byte = four * WORDS * 4;
                const unsigned char* at = weights + place_of<WEIGHT_BYTES>(row, turn * WORDS + byte / 16) + byte % 16;
                u32 words[WORDS];
#pragma unroll
                for (int word = 0; word < WORDS; word++) words[word] = ((const u32*)at)[word];
                unpack<FORM>(words, pairs[i / 2][i % 2]);
            }
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                Words4 b =
                    *(const Words4*)(rows + place_of<ROW_BYTES>((beside * PARTS + p) * 8 + lane / 4, turn * 4 + four));
                if (BITS == 4)  // in the order of the pairs
                    b = {__byte_perm(b.w[0], b.w[2], 0x5410), __byte_perm(b.w[0], b.w[2], 0x7632),
                         __byte_perm(b.w[1], b.w[3], 0x5410), __byte_perm(b.w[1], b.w[3], 0x7632)};
#pragma unroll
                for (int i = 0; i < TILES * 2; i++) {
                    u32(*rows_of_tile)[4] = pairs[i / 2], k = i % 2 * 2;
                    u32 a[4] = {rows_of_tile[0][k], rows_of_tile[1][k], rows_of_tile[0][k + 1], rows_of_tile[1][k + 1]};
                    mma(part[i / 2][p], a, b.w + k);
                }
            }
            if ((column + 32) % group_size == 0)
#pragma unroll
                for (int i = 0; i < TILES * PARTS * 4; i++) {
                    float& of_group = part[i / 4 / PARTS][i / 4 % PARTS][i % 4];
                    float& sum = sums[i / 4 / PARTS][i / 4 % PARTS][i % 4];
                    sum = fmaf(of_group, scale[i / 4 / PARTS][i % 4 / 2], sum);
                    of_group = 0;
                }
        }
    }
    store<TILES, PARTS, OUTS, BLOCK, DENSE>(sums, across, beside, beside < BESIDE, out + first, order + tile.first,
                                            tile.count, out_features, out_features - first);
}

#define EXPERTS(NAME, FORM, ROWS, OUTS, COLUMNS, DEPTH, ACROSS, BESIDE, BLOCK) \
    extern "C" __global__ void __launch_bounds__(BLOCK) \
        NAME(const unsigned char* weight, const void* scales, const unsigned short* x, unsigned short* out, \
             const int* order, const Tile* tiles, int sharing, int out_features, int in_features, int group_size, \
             int out_blocks) { \
        small_experts<FORM, ROWS, OUTS, COLUMNS, DEPTH, ACROSS, BESIDE, BLOCK>( \
            weight, scales, x, out, order, tiles, sharing, out_features, in_features, group_size, out_blocks); \
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
#define PRODUCTS(NAME, FORM, ROWS, OUTS, COLUMNS, DEPTH, ACROSS, BESIDE, BLOCK) \
    extern "C" __global__ void __launch_bounds__(BLOCK) \
        NAME(const unsigned char* weight, const void* scales, const unsigned short* x, unsigned short* out, \
             int out_features, int in_features, int group_size, int out_blocks, int rows) { \
        small_experts<FORM, ROWS, OUTS, COLUMNS, DEPTH, ACROSS, BESIDE, BLOCK, true>( \
            weight, scales, x, out, nullptr, nullptr, 1, out_features, in_features, group_size, out_blocks, rows); \
    }
PRODUCTS(dense_8_8, 8, 8, 32, 256, 4, 2, 1, 128)
PRODUCTS(dense_8_16, 8, 16, 32, 256, 4, 2, 2, 128)
PRODUCTS(dense_8_64, 8, 64, 128, 128, 3, 4, 2, 256)
PRODUCTS(dense_4_8, 4, 8, 32, 256, 4, 2, 1, 128)
PRODUCTS(dense_4_16, 4, 16, 32, 256, 4, 2, 2, 128)
PRODUCTS(dense_4_64, 4, 64, 128, 128, 3, 4, 2, 256)
#endif
