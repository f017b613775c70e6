// GEMMs of fp16 rows with an int8 or int4 weight [out_features, in_features], and dequantization of one to KIND.
//
// Weights are as MatMulNBits has them: uint8 less 128, or four bits less 8, the first of two in the low half of a byte;
// scales fp16 [out_features, num_groups], 2^8 times as large as they are, so that few are too small for fp16.
//
// gemv, of up to eight rows, or up to sixteen (TILES_N is 2): a warp computes 16 * TILES_M outputs over a part of
// in_features with mma.m16n8k16: weights are matrix A, rows of activations the columns of B, accumulators are fp32. Of
// a block's warps, WARPS_M compute different outputs from the same columns, so that the activations they share stay in
// the L1 cache, and WARPS_K compute the same outputs from different columns. In turn, each takes PIECES contiguous
// pieces of 512 bits of a weight's row for each four lanes. A sum does not depend on which of the four lanes holds
// which column, as long as A and B agree: so each lane reads 16 contiguous bytes of weights, and the same columns of
// activations. Weights are loaded one turn ahead, the first before the previous kernel has ended; with PREFETCH the L2
// cache prefetches 256 bytes at a time.
#include "outputs.cuh"

#define UNSCALE 0.00390625f

#if KIND == 1
#ifndef ON_HOST  // where the test has its own
__device__ __forceinline__ u32 hmul2(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 hfma2(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
__device__ __forceinline__ u32 mask_or(u32 a, u32 mask, u32 bits) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "r"(mask), "r"(bits));  // (a & mask) | bits
    return r;
}
__device__ __forceinline__ void mma(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint4 load_streaming(const uint4* from) {  // read once: not kept in L1
    uint4 r;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(from));
    return r;
}
__device__ __forceinline__ uint4 load_streaming_prefetch(const uint4* from) {
    uint4 r;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(from));
    return r;
}
#endif

// The numbers of one word as pairs of fp16. Four bits: pairs (0, 4), (1, 5), (2, 6), (3, 7).
//
// fp16's numbers from 1024 on are 1 apart, so 0x6400 | q is 1024 + q. Subtracting 1024 + 128 (0x6480), or 1024 + 8
// (0x6408), leaves the signed number, exactly, two numbers at
// a time. Four bits that are not shifted down are 1024 + 16 q: times 1/16, less 72.
template <int BITS>
__device__ __forceinline__ void unpack(u32 word, u32 scale, u32* pairs) {
    if (BITS == 8) {
        pairs[0] = hmul2(hsub2(__byte_perm(word, 0x64646464u, 0x4140), 0x64806480u), scale);
        pairs[1] = hmul2(hsub2(__byte_perm(word, 0x64646464u, 0x4342), 0x64806480u), scale);
    } else {
        u32 high = word >> 8;
        pairs[0] = hmul2(hsub2(mask_or(word, 0x000f000fu, 0x64006400u), 0x64086408u), scale);
        pairs[1] = hmul2(hfma2(mask_or(word, 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd480d480u), scale);  // / 16 - 72
        pairs[2] = hmul2(hsub2(mask_or(high, 0x000f000fu, 0x64006400u), 0x64086408u), scale);
        pairs[3] = hmul2(hfma2(mask_or(high, 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd480d480u), scale);
    }
}

template <int BITS, int TILES_M, int WARPS_M, int WARPS_K, int TILES_N, int PIECES, bool PREFETCH>
__device__ __forceinline__ void gemv(const uint4* weight, const unsigned short* scales, const uint4* x,
                                     unsigned short* first_out, unsigned short* second_out, unsigned short* third_out,
                                     int first_end, int second_end, int out_features, int in_features, int group_size,
                                     int rows) {
    const Outputs outputs = {first_out, second_out, third_out, first_end, second_end, out_features};
    constexpr int LANE_COLUMNS = 128 / BITS, LANE_VECTORS = LANE_COLUMNS / 8;  // of weights; as 16 bytes of fp16
    constexpr int WORD_PAIRS = 32 / BITS / 2;
    constexpr int OUTPUTS = WARPS_M * TILES_M * 16, THREADS = WARPS_M * WARPS_K * 32;
    // Units of 16 bytes of a weight's row, which a warp takes at once, and which the warps of an output take.
    constexpr int WARP_UNITS = 4 * PIECES, BLOCK_UNITS = WARPS_K * WARP_UNITS;
    __shared__ float sums[WARPS_K][OUTPUTS][8 * TILES_N + 1];  // + 1: the rows of an output begin in different banks
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, quad_lane = lane % 4;
    int warp_m = warp % WARPS_M, warp_k = warp / WARPS_M;
    int first_output = blockIdx.x * OUTPUTS, groups = in_features / group_size;
    int units = in_features / LANE_COLUMNS;  // in a row of the weight
    float acc[TILES_M][TILES_N][4] = {};
    const uint4* from[2 * TILES_M];
    const unsigned short* scale_from[2 * TILES_M];
#pragma unroll
    for (int i = 0; i < 2 * TILES_M; i++) {
        int out = first_output + warp_m * TILES_M * 16 + i * 8 + quad;
        out = out < out_features ? out : out_features - 1;
        from[i] = weight + (long long)out * units;
        scale_from[i] = scales + (long long)out * groups;
    }
    uint4 next[PIECES][2 * TILES_M];
    unsigned short next_scale[PIECES][2 * TILES_M];
    auto load = [&](int at) {
#pragma unroll
        for (int n = 0; n < PIECES; n++) {
            int unit = at + n * 4 + quad_lane;
            if (unit >= units) unit = 0;
            int group = unit * LANE_COLUMNS / group_size;
#pragma unroll
            for (int i = 0; i < 2 * TILES_M; i++) {
                next[n][i] = PREFETCH ? load_streaming_prefetch(from[i] + unit) : load_streaming(from[i] + unit);
                next_scale[n][i] = scale_from[i][group];
            }
        }
    };
    next_may_start();
    load(warp_k * WARP_UNITS);
    wait_for_previous();
#pragma unroll 1
    for (int at = warp_k * WARP_UNITS; at < units; at += BLOCK_UNITS) {
        uint4 words[PIECES][2 * TILES_M];
        u32 scale[PIECES][2 * TILES_M];
#pragma unroll
        for (int n = 0; n < PIECES; n++)
#pragma unroll
            for (int i = 0; i < 2 * TILES_M; i++) {
                words[n][i] = next[n][i];
                scale[n][i] = next_scale[n][i] * 0x10001u;  // in both halves
            }
        if (at + BLOCK_UNITS < units) load(at + BLOCK_UNITS);
#pragma unroll
        for (int n = 0; n < PIECES; n++) {
            int unit = at + n * 4 + quad_lane;
            uint4 b[TILES_N][LANE_VECTORS];
#pragma unroll
            for (int i = 0; i < TILES_N * LANE_VECTORS; i++) {
                int row = quad + i / LANE_VECTORS * 8, vector = i % LANE_VECTORS;
                uint4 v = make_uint4(0, 0, 0, 0);
                if (unit < units && row < rows)
                    v = x[(long long)row * (in_features / 8) + unit * LANE_VECTORS + vector];
                if (BITS == 4)  // in the order of the pairs
                    v = make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632),
                                   __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632));
                b[i / LANE_VECTORS][vector] = v;
            }
#pragma unroll
            for (int tile = 0; tile < TILES_M; tile++) {
                const u32 *low = (const u32*)&words[n][2 * tile], *high = (const u32*)&words[n][2 * tile + 1];
                u32 a[2][4 * WORD_PAIRS];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    unpack<BITS>(low[i], scale[n][2 * tile], &a[0][i * WORD_PAIRS]);
                    unpack<BITS>(high[i], scale[n][2 * tile + 1], &a[1][i * WORD_PAIRS]);
                }
#pragma unroll
                for (int i = 0; i < TILES_N * 4 * WORD_PAIRS; i += 2) {
                    int tile_n = i / (4 * WORD_PAIRS), k = i % (4 * WORD_PAIRS);
                    const u32* columns = (const u32*)b[tile_n];
                    mma(acc[tile][tile_n], a[0][k], a[1][k], a[0][k + 1], a[1][k + 1], columns[k], columns[k + 1]);
                }
            }
        }
    }
#pragma unroll
    for (int tile = 0; tile < TILES_M; tile++)
#pragma unroll
        for (int i = 0; i < TILES_N * 4; i++)
            sums[warp_k][(warp_m * TILES_M + tile) * 16 + quad + i % 4 / 2 * 8][i / 4 * 8 + quad_lane * 2 + i % 2] =
                acc[tile][i / 4][i % 4];
    __syncthreads();
    for (int i = threadIdx.x; i < OUTPUTS * rows; i += THREADS) {
        int output = i % OUTPUTS, row = i / OUTPUTS;
        if (first_output + output >= out_features) continue;
        float sum = 0;  // of the warps' columns, in their order: a row has the same bits in any batch
#pragma unroll
        for (int k = 0; k < WARPS_K; k++) sum += sums[k][output][row];
        outputs.store(row, first_output + output, narrow(sum * UNSCALE));
    }
}

#define GEMV(NAME, BITS, TILES_M, WARPS_M, WARPS_K, TILES_N, PIECES, PREFETCH, THREADS) \
    extern "C" __global__ void __launch_bounds__(THREADS) \
        NAME(const uint4* weight, const unsigned short* scales, const uint4* x, unsigned short* first_out, \
             unsigned short* second_out, unsigned short* third_out, int first_end, int second_end, int out_features, \
             int in_features, int group_size, int rows) { \
        gemv<BITS, TILES_M, WARPS_M, WARPS_K, TILES_N, PIECES, PREFETCH>(weight, scales, x, first_out, second_out, \
                                                                         third_out, first_end, second_end, \
                                                                         out_features, in_features, group_size, rows); \
    }
// gemv_BITS_OUTPUTS_WARPS_ROWS, OUTPUTS and WARPS of a block. The fastest on an H200 for 4096, 12288 and 22016 outputs:
// products.py chooses.
GEMV(gemv_8_16_16_8, 8, 1, 1, 16, 1, 1, true, 512)
GEMV(gemv_8_32_8_8, 8, 2, 1, 8, 1, 1, true, 256)
GEMV(gemv_8_32_16_16, 8, 2, 1, 16, 2, 1, true, 512)
GEMV(gemv_8_16_4_16, 8, 1, 1, 4, 2, 1, true, 128)
GEMV(gemv_8_64_4_16, 8, 4, 1, 4, 2, 1, true, 128)
GEMV(gemv_4_32_16_8, 4, 2, 1, 16, 1, 2, true, 512)
GEMV(gemv_4_64_8_8, 4, 4, 1, 8, 1, 1, true, 256)
GEMV(gemv_4_32_16_16, 4, 2, 1, 16, 2, 1, true, 512)
GEMV(gemv_4_32_4_16, 4, 2, 1, 4, 2, 2, true, 128)
GEMV(gemv_4_64_4_16, 4, 2, 2, 2, 2, 2, true, 128)
#endif

// A weight as KIND. A thread has eight numbers of one group.
template <int BITS>
__device__ __forceinline__ void dequantize(const unsigned char* weight, const unsigned short* scales, uint4* out,
                                           int in_features, int group_size, long long count) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float scale = number_of_half(scales[i * 8 / group_size]) * UNSCALE;  // rows are whole groups
    union {
        unsigned short numbers[8];
        uint4 all;
    } result;
    if (BITS == 8) {
        uint2 codes = *(const uint2*)(weight + i * 8);
        for (int j = 0; j < 8; j++) {
            int q = (j < 4 ? codes.x >> 8 * j : codes.y >> 8 * (j - 4)) & 255;
            result.numbers[j] = narrow((q - 128) * scale);
        }
    } else {
        u32 codes = *(const u32*)(weight + i * 4);
        for (int j = 0; j < 8; j++) result.numbers[j] = narrow(((int)(codes >> 4 * j & 15) - 8) * scale);
    }
    out[i] = result.all;
}

extern "C" __global__ void dequantize_8(const unsigned char* weight, const unsigned short* scales, uint4* out,
                                        int in_features, int group_size, int out_features) {
    dequantize<8>(weight, scales, out, in_features, group_size, (long long)out_features * in_features / 8);
}
extern "C" __global__ void dequantize_4(const unsigned char* weight, const unsigned short* scales, uint4* out,
                                        int in_features, int group_size, int out_features) {
    dequantize<4>(weight, scales, out, in_features, group_size, (long long)out_features * in_features / 8);
}
