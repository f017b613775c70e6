// GEMMs of a few rows of activations with a weight [out_features, in_features] of KIND.
//
// Each output is accumulated by one warp from the first column to the last, 16 at a time (mma.m16n8k16, fp32). cuBLAS
// kernels that do not split the columns accumulate in the same order, so a row has the same bits from either kernel and
// in any batch. A block computes OUTPUTS outputs of ROWS rows; the blocks of all outputs of the first ROWS rows come
// before those of the next. Weights and activations pass through shared memory in stages of COLUMNS columns; the first
// weights are loaded before the previous kernel has ended.
#include "few_rows.cuh"

#define COLUMNS (PIECES * 8)

// MANY: there may be more than ROWS rows. A decoding step has fewer, and waits for no division.
template <int ROWS, bool MANY>
__device__ __forceinline__ void few_rows(const unsigned short* weight, const unsigned short* x, Outputs outputs,
                                         int in_features, int rows) {
    constexpr int STAGE = (OUTPUTS + ROWS) * COLUMNS * 2, K = COLUMNS / 16, TILES = (ROWS + 15) / 16;
    int out_features = outputs.out_features;
    u32 base = shared_memory();
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    int first_output = blockIdx.x * OUTPUTS, first_row = 0;
    if (MANY) {
        int blocks = (out_features + OUTPUTS - 1) / OUTPUTS;  // of a row
        first_output = blockIdx.x % blocks * OUTPUTS;
        first_row = blockIdx.x / blocks * ROWS;
        x += (long long)first_row * in_features;
        rows -= first_row;
    }
    int warp_m = warp % 2, warp_n = warp / 2;  // the warp's 16 outputs, and its 8 of each 16 rows
    int steps = (in_features + COLUMNS - 1) / COLUMNS;
    auto load_weight = [&](int step) {
        u32 to = base + step % STAGES * STAGE;
#pragma unroll
        for (int i = 0; i < OUTPUTS * PIECES / THREADS; i++) {
            int n = i * THREADS + tid, row = n / PIECES, piece = n % PIECES;
            // Outputs after the last one read its row, and are dropped; columns after the last one are zeros.
            int column = step * COLUMNS + piece * 8, output = min(first_output + row, out_features - 1);
            bool in = column < in_features;
            cp_async(to + swizzle(row, piece), weight + (long long)output * in_features + (in ? column : 0), in);
        }
    };
    auto load_x = [&](int step) {
        u32 to = base + step % STAGES * STAGE + OUTPUTS * COLUMNS * 2;
#pragma unroll
        for (int i = 0; i < ROWS * PIECES / THREADS; i++) {
            int n = i * THREADS + tid, row = n / PIECES, piece = n % PIECES;
            int column = step * COLUMNS + piece * 8;
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
        cp_async_commit();  // also of nothing: cp_async_wait counts groups
    }
    float acc[TILES][4] = {};
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // all see this stage, and have read the one that is overwritten next
        if (step + STAGES - 1 < steps) {
            load_weight(step + STAGES - 1);
            load_x(step + STAGES - 1);
        }
        cp_async_commit();
        if (warp_n * 8 >= ROWS) continue;  // with 8 rows half of the warps only load
        u32 a_from = base + step % STAGES * STAGE, b_from = a_from + OUTPUTS * COLUMNS * 2;
        u32 a[K][4], b[K][2];
#pragma unroll
        for (int k = 0; k < K; k++) ldmatrix(a_from + swizzle(warp_m * 16 + lane % 16, k * 2 + lane / 16), a[k]);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
            for (int k = 0; k < K; k += 2) {
                u32 r[4];
                ldmatrix(b_from + swizzle(tile * 16 + warp_n * 8 + lane % 8, k * 2 + lane / 8), r);
                b[k][0] = r[0];
                b[k][1] = r[1];
                b[k + 1][0] = r[2];
                b[k + 1][1] = r[3];
            }
#pragma unroll
            for (int k = 0; k < K; k++) mma(acc[tile], a[k], b[k]);
        }
    }
    if (warp_n * 8 >= ROWS) return;
#pragma unroll
    for (int i = 0; i < TILES * 4; i++) {
        int output = first_output + warp_m * 16 + lane / 4 + i % 4 / 2 * 8;
        int row = i / 4 * 16 + warp_n * 8 + lane % 4 * 2 + i % 2;
        if (output >= out_features || row >= rows) continue;
        outputs.store(first_row + row, output, narrow(acc[i / 4][i % 4]));
    }
}

#define FEW_ROWS(NAME, ROWS, MANY) \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME( \
        const unsigned short* weight, const unsigned short* x, unsigned short* first_out, unsigned short* second_out, \
        unsigned short* third_out, int first_end, int second_end, int out_features, int in_features, int rows) { \
        few_rows<ROWS, MANY>(weight, x, {first_out, second_out, third_out, first_end, second_end, out_features}, \
                             in_features, rows); \
    }
FEW_ROWS(few_rows_8, 8, false)
FEW_ROWS(few_rows_16, 16, false)
FEW_ROWS(few_rows_32, 32, false)
FEW_ROWS(few_rows_64, 64, false)
FEW_ROWS(many_rows, 16, true)
