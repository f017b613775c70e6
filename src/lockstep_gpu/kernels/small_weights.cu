// GEMMs of fp16 rows with an int8 or int4 weight [out_features, in_features], and dequantization of one to KIND.
//
// Weights are as MatMulNBits has them: uint8 less 128, or four bits less 8, the first of two in the low half of a byte;
// scales fp16 [out_features, num_groups], 2^8 times as large as they are, so that few are too small for fp16.
//
// gemv, of up to eight rows, or up to sixteen (HALVES is 2): a warp computes 16 * TILES outputs over a part of
// in_features with mma.m16n8k16: weights are matrix A, rows of activations the columns of B, accumulators are fp32. Of
// a block's warps, ACROSS compute different outputs from the same columns, so that the activations they share stay in
// the L1 cache, and DEEP compute the same outputs from different columns. In turn, each takes PIECES contiguous pieces
// of 512 bits of a weight's row for each four lanes. A sum does not depend on which of the four lanes holds which
// column, as long as A and B agree: so each lane reads 16 contiguous bytes of weights, and the same columns of
// activations. Weights are loaded one turn ahead, the first before the previous kernel has ended; with PREFETCH the L2
// cache prefetches 256 bytes at a time. A weight may be the concatenation of up to three, each with a separate output.
#include "overlap.cuh"

#define UNSCALE 0.00390625f

#if KIND == 1
#ifndef ON_HOST  // where the test has its own
__device__ __forceinline__ u32 sub2(u32 a, u32 b) {
    u32 r;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
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
__device__ __forceinline__ uint4 stream(const uint4* from) {  // read once: not kept in L1
    uint4 r;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(from));
    return r;
}
__device__ __forceinline__ uint4 stream_ahead(const uint4* from) {
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
        pairs[0] = mul2(sub2(__byte_perm(word, 0x64646464u, 0x4140), 0x64806480u), scale);
        pairs[1] = mul2(sub2(__byte_perm(word, 0x64646464u, 0x4342), 0x64806480u), scale);
    } else {
        u32 high = word >> 8;
        pairs[0] = mul2(sub2(mask_or(word, 0x000f000fu, 0x64006400u), 0x64086408u), scale);
        pairs[1] = mul2(fma2(mask_or(word, 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd480d480u), scale);  // / 16 - 72
        pairs[2] = mul2(sub2(mask_or(high, 0x000f000fu, 0x64006400u), 0x64086408u), scale);
        pairs[3] = mul2(fma2(mask_or(high, 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd480d480u), scale);
    }
}

template <int BITS, int TILES, int ACROSS, int DEEP, int HALVES, int PIECES, bool PREFETCH>
__device__ __forceinline__ void gemv(const uint4* weight, const unsigned short* scales, const uint4* x,
                                     unsigned short* first_out, unsigned short* second_out, unsigned short* third_out,
                                     int first_end, int second_end, int out_features, int in_features, int group_size,
                                     int rows) {
    constexpr int LANE = 128 / BITS, PARTS = LANE / 8;  // columns of a lane, and how many 16 bytes they are as fp16
    constexpr int WORD = 32 / BITS / 2;                 // pairs
    constexpr int OUTPUTS = ACROSS * TILES * 16, THREADS = ACROSS * DEEP * 32;
    constexpr int TURN = 4 * PIECES,
                  STEP = DEEP * TURN;  // units that a warp takes at once, and those that share its outputs
    __shared__ float sums[DEEP][OUTPUTS][8 * HALVES + 1];  // + 1: the rows of an output begin in different banks
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, four = lane % 4;
    int across = warp % ACROSS, deep = warp / ACROSS;
    int first = blockIdx.x * OUTPUTS, groups = in_features / group_size;
    int units = in_features / LANE;  // of 16 bytes, in a row of the weight
    float acc[TILES][HALVES][4] = {};
    const uint4* from[2 * TILES];
    const unsigned short* scale_from[2 * TILES];
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
        int out = first + across * TILES * 16 + i * 8 + row;
        out = out < out_features ? out : out_features - 1;
        from[i] = weight + (long long)out * units;
        scale_from[i] = scales + (long long)out * groups;
    }
    uint4 next[PIECES][2 * TILES];
    unsigned short next_scale[PIECES][2 * TILES];
    auto load = [&](int at) {
#pragma unroll
        for (int n = 0; n < PIECES; n++) {
            int unit = at + n * 4 + four;
            if (unit >= units) unit = 0;
            int group = unit * LANE / group_size;
#pragma unroll
            for (int i = 0; i < 2 * TILES; i++) {
                next[n][i] = PREFETCH ? stream_ahead(from[i] + unit) : stream(from[i] + unit);
                next_scale[n][i] = scale_from[i][group];
            }
        }
    };
    next_may_start();
    load(deep * TURN);
    wait_for_previous();
#pragma unroll 1
    for (int at = deep * TURN; at < units; at += STEP) {
        uint4 words[PIECES][2 * TILES];
        u32 scale[PIECES][2 * TILES];
#pragma unroll
        for (int n = 0; n < PIECES; n++)
#pragma unroll
            for (int i = 0; i < 2 * TILES; i++) {
                words[n][i] = next[n][i];
                scale[n][i] = next_scale[n][i] * 0x10001u;  // in both halves
            }
        if (at + STEP < units) load(at + STEP);
#pragma unroll
        for (int n = 0; n < PIECES; n++) {
            int unit = at + n * 4 + four;
            uint4 b[HALVES][PARTS];
#pragma unroll
            for (int i = 0; i < HALVES * PARTS; i++) {
                int request = row + i / PARTS * 8, part = i % PARTS;
                uint4 v = make_uint4(0, 0, 0, 0);
                if (unit < units && request < rows) v = x[(long long)request * (in_features / 8) + unit * PARTS + part];
                if (BITS == 4)  // in the order of the pairs
                    v = make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632),
                                   __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632));
                b[i / PARTS][part] = v;
            }
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const u32 *low = (const u32*)&words[n][2 * tile], *high = (const u32*)&words[n][2 * tile + 1];
                u32 a[2][4 * WORD];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    unpack<BITS>(low[i], scale[n][2 * tile], &a[0][i * WORD]);
                    unpack<BITS>(high[i], scale[n][2 * tile + 1], &a[1][i * WORD]);
                }
#pragma unroll
                for (int i = 0; i < HALVES * 4 * WORD; i += 2) {
                    int other = i / (4 * WORD), k = i % (4 * WORD);
                    const u32* columns = (const u32*)b[other];
                    mma(acc[tile][other], a[0][k], a[1][k], a[0][k + 1], a[1][k + 1], columns[k], columns[k + 1]);
                }
            }
        }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < HALVES * 4; i++)
            sums[deep][(across * TILES + tile) * 16 + row + i % 4 / 2 * 8][i / 4 * 8 + four * 2 + i % 2] =
                acc[tile][i / 4][i % 4];
    __syncthreads();
    for (int i = threadIdx.x; i < OUTPUTS * rows; i += THREADS) {
        int of = i % OUTPUTS, request = i / OUTPUTS, out = first + of;
        if (out >= out_features) continue;
        float sum = 0;  // of the warps' columns, in their order: a row has the same bits in any batch
#pragma unroll
        for (int other = 0; other < DEEP; other++) sum += sums[other][of][request];
        unsigned short result = narrow(sum * UNSCALE);
        if (out < first_end) first_out[(long long)request * first_end + out] = result;
        else if (out < second_end) second_out[(long long)request * (second_end - first_end) + out - first_end] = result;
        else third_out[(long long)request * (out_features - second_end) + out - second_end] = result;
    }
}

#define GEMV(NAME, BITS, TILES, ACROSS, DEEP, HALVES, PIECES, PREFETCH, THREADS) \
    extern "C" __global__ void __launch_bounds__(THREADS) \
        NAME(const uint4* weight, const unsigned short* scales, const uint4* x, unsigned short* first_out, \
             unsigned short* second_out, unsigned short* third_out, int first_end, int second_end, int out_features, \
             int in_features, int group_size, int rows) { \
        gemv<BITS, TILES, ACROSS, DEEP, HALVES, PIECES, PREFETCH>(weight, scales, x, first_out, second_out, third_out, \
                                                                  first_end, second_end, out_features, in_features, \
                                                                  group_size, rows); \
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
