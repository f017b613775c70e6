// Quantizes activations to e4m3, and multiplies up to 16 rows of them with an e4m3 weight [out_features, in_features].
//
// quantize_rows: one block per row.
//
// few_rows_fp8: as few_rows.cu, but of one-byte numbers. A stage has twice as many columns, and numbers are converted
// to fp16, which represents all of e4m3 exactly, just before the tensor cores. Of 16 columns the first and second pair
// of each four are the two halves of an instruction, of weights and activations alike. A warp has four fp32
// accumulators per output, one for every fourth group of 16 columns, so that no instruction waits for the previous one;
// for up to eight rows, two warps share a stage. Sums are multiplied by the row's scale, then by the output's.
#define FACTORS "f16"
#include "e4m3.cuh"
#include "few_rows.cuh"

#define COLUMNS (PIECES * 16)
#define ROW_THREADS 512

#ifndef ON_HOST  // where the test has its own
__device__ __forceinline__ u32 e4m3_to_half2(unsigned short codes) {
    u32 r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(codes));
    return r;
}
#endif

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    quantize_rows(const unsigned short* x, unsigned char* codes, float* steps, int in_features) {
    const Vec8* from = (const Vec8*)(x + (long long)blockIdx.x * in_features);
    Codes* to = (Codes*)(codes + (long long)blockIdx.x * in_features);
    next_may_start();
    wait_for_previous();
    u32 max_bits = 0;
    for (int i = threadIdx.x; i < in_features / 8; i += ROW_THREADS) max_bits = largest_of(from[i], max_bits);
    float step = step_of(block_max<ROW_THREADS / 32>(max_bits));
    if (threadIdx.x == 0) steps[blockIdx.x] = step;
    for (int i = threadIdx.x; i < in_features / 8; i += ROW_THREADS) to[i] = encoded(from[i], step);
}

template <int ROWS>
__device__ __forceinline__ void few_rows_fp8(const unsigned char* weight, const float* weight_scales,
                                             const unsigned char* x, const float* row_scales, unsigned short* first_out,
                                             unsigned short* second_out, unsigned short* third_out, int first_end,
                                             int second_end, int out_features, int in_features, int rows) {
    constexpr int STAGE = (OUTPUTS + ROWS) * PIECES * 16;
    constexpr int WARPS_N = ROWS / 8, WARPS_K = 2 / WARPS_N, WARP_PIECES = PIECES / WARPS_K;
    const Outputs outputs = {first_out, second_out, third_out, first_end, second_end, out_features};
    u32 base = shared_memory();
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, first_output = blockIdx.x * OUTPUTS;
    int warp_m = warp % 2, warp_n = warp / 2 % WARPS_N,
        warp_k = warp / 2 / WARPS_N;  // outputs, rows and columns of a warp
    int steps = (in_features + COLUMNS - 1) / COLUMNS;
    auto load_weight = [&](int step) {
        u32 to = base + step % STAGES * STAGE;
#pragma unroll
        for (int i = 0; i < OUTPUTS * PIECES / THREADS; i++) {
            int n = i * THREADS + tid, row = n / PIECES, piece = n % PIECES;
            int column = step * COLUMNS + piece * 16, output = min(first_output + row, out_features - 1);
            bool in = column < in_features;
            cp_async(to + swizzle(row, piece), weight + (long long)output * in_features + (in ? column : 0), in);
        }
    };
    auto load_x = [&](int step) {
        u32 to = base + step % STAGES * STAGE + OUTPUTS * PIECES * 16;
#pragma unroll
        for (int i = 0; i < ROWS * PIECES / THREADS; i++) {
            int n = i * THREADS + tid, row = n / PIECES, piece = n % PIECES;
            int column = step * COLUMNS + piece * 16;
            bool in = column < in_features && row < rows;
            cp_async(to + swizzle(row, piece), x + (in ? (long long)row * in_features + column : 0), in);
        }
    };
    next_may_start();
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++)
        if (step < steps) load_weight(step);
    wait_for_previous();
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) load_x(step);
        cp_async_commit();
    }
    float acc[4][4] = {};
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) {
            load_weight(step + STAGES - 1);
            load_x(step + STAGES - 1);
        }
        cp_async_commit();
        u32 a_from = base + step % STAGES * STAGE, b_from = a_from + OUTPUTS * PIECES * 16;
#pragma unroll
        for (int piece = 0; piece < WARP_PIECES; piece += 4) {
            u32 a[2][4], b[4];
#pragma unroll
            for (int i = 0; i < 2; i++)
                ldmatrix(a_from + swizzle(warp_m * 16 + lane % 16, warp_k * WARP_PIECES + piece + i * 2 + lane / 16),
                         a[i]);
            ldmatrix(b_from + swizzle(warp_n * 8 + lane % 8, warp_k * WARP_PIECES + piece + lane / 8), b);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u32 above = a[k / 2][k % 2 * 2], below = a[k / 2][k % 2 * 2 + 1];  // 4 columns of rows 8 apart
                u32 weights[4] = {e4m3_to_half2(above & 0xffff), e4m3_to_half2(below & 0xffff),
                                  e4m3_to_half2(above >> 16), e4m3_to_half2(below >> 16)};
                u32 x_pairs[2] = {e4m3_to_half2(b[k] & 0xffff), e4m3_to_half2(b[k] >> 16)};
                mma(acc[k], weights, x_pairs);
            }
        }
    }
    // The four accumulators, then the two warps, in a fixed order.
    float sums[4];
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] = (acc[0][i] + acc[1][i]) + (acc[2][i] + acc[3][i]);
    if (WARPS_K > 1) {
        __shared__ float others[2][32][4];
        if (warp_k)
#pragma unroll
            for (int i = 0; i < 4; i++) others[warp_m][lane][i] = sums[i];
        __syncthreads();
        if (warp_k) return;
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i] += others[warp_m][lane][i];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int output = first_output + warp_m * 16 + lane / 4 + i / 2 * 8, row = warp_n * 8 + lane % 4 * 2 + i % 2;
        if (output >= out_features || row >= rows) continue;
        outputs.store(row, output, narrow(sums[i] * row_scales[row] * weight_scales[output]));
    }
}

#define FEW_ROWS(NAME, ROWS) \
    extern "C" __global__ void __launch_bounds__(THREADS) \
        NAME(const unsigned char* weight, const float* weight_scales, const unsigned char* x, const float* row_scales, \
             unsigned short* first_out, unsigned short* second_out, unsigned short* third_out, int first_end, \
             int second_end, int out_features, int in_features, int rows) { \
        few_rows_fp8<ROWS>(weight, weight_scales, x, row_scales, first_out, second_out, third_out, first_end, \
                           second_end, out_features, in_features, rows); \
    }
FEW_ROWS(few_rows_fp8_8, 8)
FEW_ROWS(few_rows_fp8_16, 16)
