// Quantizes activations to e4m3, and multiplies up to 16 rows of them with an e4m3 weight [out_features, in_features].
//
// quantize_rows: one block per row.
//
// few_rows_fp8: as few_rows.cu, but of one-byte numbers. A stage has twice as many columns, and numbers are converted
// to fp16, which represents all of e4m3 exactly, just before the tensor cores. Of 16 columns the first and second pair
// of each four are the two halves of an instruction, of weights and activations alike. A warp has four fp32
// accumulators per output, one for every fourth group of 16 columns, so that no instruction waits for the previous one;
// for up to eight rows, two warps share a stage. Sums are multiplied by the row's step, then by the output's scale.
#define FACTORS "f16"
#include "e4m3.cuh"
#include "tensor_cores.cuh"

#define COLUMNS (PIECES * 16)
#define ROW_THREADS 512

#ifndef ON_HOST  // where the test has its own
__device__ __forceinline__ u32 halves_of(unsigned short codes) {
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
    u32 most = 0;
    for (int i = threadIdx.x; i < in_features / 8; i += ROW_THREADS) most = largest_of(from[i], most);
    float step = step_of(block_max<ROW_THREADS / 32>(most));
    if (threadIdx.x == 0) steps[blockIdx.x] = step;
    for (int i = threadIdx.x; i < in_features / 8; i += ROW_THREADS) to[i] = encoded(from[i], step);
}

template <int ROWS>
__device__ __forceinline__ void few_rows_fp8(const unsigned char* weight, const float* scales, const unsigned char* x,
                                             const float* steps, unsigned short* first_out, unsigned short* second_out,
                                             unsigned short* third_out, int first_end, int second_end, int out_features,
                                             int in_features, int rows) {
    constexpr int STAGE = (OUTPUTS + ROWS) * PIECES * 16;
    constexpr int BESIDE = ROWS / 8, DEEP = 2 / BESIDE, OWN = PIECES / DEEP;
    u32 base = shared_memory();
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, first = blockIdx.x * OUTPUTS;
    int across = warp % 2, beside = warp / 2 % BESIDE, deep = warp / 2 / BESIDE;  // outputs, rows and columns of a warp
    int turns = (in_features + COLUMNS - 1) / COLUMNS;
    auto load_weight = [&](int turn) {
        u32 to = base + turn % STAGES * STAGE;
#pragma unroll
        for (int i = 0; i < OUTPUTS * PIECES / THREADS; i++) {
            int n = i * THREADS + tid, row = n / PIECES, piece = n % PIECES;
            int column = turn * COLUMNS + piece * 16, out = min(first + row, out_features - 1);
            bool in = column < in_features;
            copy_async(to + place(row, piece), weight + (long long)out * in_features + (in ? column : 0), in);
        }
    };
    auto load_x = [&](int turn) {
        u32 to = base + turn % STAGES * STAGE + OUTPUTS * PIECES * 16;
#pragma unroll
        for (int i = 0; i < ROWS * PIECES / THREADS; i++) {
            int n = i * THREADS + tid, row = n / PIECES, piece = n % PIECES;
            int column = turn * COLUMNS + piece * 16;
            bool in = column < in_features && row < rows;
            copy_async(to + place(row, piece), x + (in ? (long long)row * in_features + column : 0), in);
        }
    };
    next_may_start();
#pragma unroll
    for (int turn = 0; turn < STAGES - 1; turn++)
        if (turn < turns) load_weight(turn);
    wait_for_previous();
#pragma unroll
    for (int turn = 0; turn < STAGES - 1; turn++) {
        if (turn < turns) load_x(turn);
        commit();
    }
    float chains[4][4] = {};
#pragma unroll 1
    for (int turn = 0; turn < turns; turn++) {
        wait_for_stage();
        __syncthreads();
        if (turn + STAGES - 1 < turns) {
            load_weight(turn + STAGES - 1);
            load_x(turn + STAGES - 1);
        }
        commit();
        u32 a_from = base + turn % STAGES * STAGE, b_from = a_from + OUTPUTS * PIECES * 16;
#pragma unroll
        for (int from = 0; from < OWN; from += 4) {
            u32 a[2][4], b[4];
#pragma unroll
            for (int i = 0; i < 2; i++)
                load_matrices(a_from + place(across * 16 + lane % 16, deep * OWN + from + i * 2 + lane / 16), a[i]);
            load_matrices(b_from + place(beside * 8 + lane % 8, deep * OWN + from + lane / 8), b);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u32 above = a[k / 2][k % 2 * 2], below = a[k / 2][k % 2 * 2 + 1];  // 4 columns of rows 8 apart
                u32 weights[4] = {halves_of(above & 0xffff), halves_of(below & 0xffff), halves_of(above >> 16),
                                  halves_of(below >> 16)};
                u32 values[2] = {halves_of(b[k] & 0xffff), halves_of(b[k] >> 16)};
                mma(chains[k], weights, values);
            }
        }
    }
    // The four chains, then the two warps, in a fixed order.
    float sums[4];
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] = (chains[0][i] + chains[1][i]) + (chains[2][i] + chains[3][i]);
    if (DEEP > 1) {
        __shared__ float others[2][32][4];
        if (deep)
#pragma unroll
            for (int i = 0; i < 4; i++) others[across][lane][i] = sums[i];
        __syncthreads();
        if (deep) return;
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i] += others[across][lane][i];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int out = first + across * 16 + lane / 4 + i / 2 * 8, request = beside * 8 + lane % 4 * 2 + i % 2;
        if (out >= out_features || request >= rows) continue;
        unsigned short result = narrow(sums[i] * steps[request] * scales[out]);
        if (out < first_end) first_out[(long long)request * first_end + out] = result;
        else if (out < second_end) second_out[(long long)request * (second_end - first_end) + out - first_end] = result;
        else third_out[(long long)request * (out_features - second_end) + out - second_end] = result;
    }
}

#define FEW_ROWS(NAME, ROWS) \
    extern "C" __global__ void __launch_bounds__(THREADS) \
        NAME(const unsigned char* weight, const float* scales, const unsigned char* x, const float* steps, \
             unsigned short* first_out, unsigned short* second_out, unsigned short* third_out, int first_end, \
             int second_end, int out_features, int in_features, int rows) { \
        few_rows_fp8<ROWS>(weight, scales, x, steps, first_out, second_out, third_out, first_end, second_end, \
                           out_features, in_features, rows); \
    }
FEW_ROWS(few_rows_fp8_8, 8)
FEW_ROWS(few_rows_fp8_16, 16)
