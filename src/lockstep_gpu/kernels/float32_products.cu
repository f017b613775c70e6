// Products of rows of KIND (0: float32) with weights of float32, as float32: of all rows with one weight, or of tokens'
// rows with the weights of their experts.
//
// Each output is accumulated by one thread from the first column to the last, by fmaf: a row has the same bits whatever
// the size of tiles. Tensor cores would round the factors to 11 bits. A block computes TILE_OUTPUTS outputs of the ROWS
// rows of a tile, COLUMNS columns at a time.
#include "expert_rows.cuh"

#define COLUMNS 32

#if KIND == 0
typedef float Number;
__device__ __forceinline__ float number(float value) { return value; }
#else
typedef unsigned short Number;
#endif

// EXPERTS: rows by `order` and `tiles`; else the first `rows`. TRANSPOSED: weights are [out_features, in_features].
template <int ROWS, int TILE_OUTPUTS, int THREADS, bool EXPERTS, bool TRANSPOSED>
__device__ __forceinline__ void products(const float* weight, const Number* x, float* out, const int* order,
                                         const Tile* tiles, int rows_per_input, int out_features, int in_features,
                                         int output_blocks, int rows) {
    constexpr int THREAD_OUTPUTS = TILE_OUTPUTS / 32, THREAD_ROWS = ROWS * 32 / THREADS;  // of a thread
    __shared__ float weights[COLUMNS][TILE_OUTPUTS + 1],
        values[COLUMNS][ROWS + 1];  // + 1: columns are in different banks
    int tid = threadIdx.x, first = blockIdx.x % output_blocks * TILE_OUTPUTS,
        first_row = blockIdx.x / output_blocks * ROWS;
    int lane = tid % 32, warp = tid / 32;
    next_may_start();
    wait_for_previous();
    Tile tile = {0, first_row, min(ROWS, rows - first_row), 0};
    if (EXPERTS) tile = tiles[blockIdx.x / output_blocks];
    if (tile.count <= 0) return;
    weight += (long long)tile.expert * out_features * in_features;
    float sums[THREAD_ROWS][THREAD_OUTPUTS] = {};
    for (int start = 0; start < in_features; start += COLUMNS) {
        __syncthreads();
        for (int i = tid; i < TILE_OUTPUTS * COLUMNS; i += THREADS) {
            int column = TRANSPOSED ? i % COLUMNS : i / TILE_OUTPUTS,
                output = TRANSPOSED ? i / COLUMNS : i % TILE_OUTPUTS;
            bool in = start + column < in_features && first + output < out_features;
            long long at = TRANSPOSED ? (long long)(first + output) * in_features + start + column
                                      : (long long)(start + column) * out_features + first + output;
            weights[column][output] = in ? weight[at] : 0;
        }
        for (int i = tid; i < ROWS * COLUMNS; i += THREADS) {
            int column = i % COLUMNS, row = i / COLUMNS;
            bool in = start + column < in_features && row < tile.count;
            int source = EXPERTS && in ? order[tile.first + row] / rows_per_input : tile.first + row;
            values[column][row] = in ? number(x[(long long)source * in_features + start + column]) : 0;
        }
        __syncthreads();
        int end = min(COLUMNS, in_features - start);
        for (int column = 0; column < end; column++)
#pragma unroll
            for (int r = 0; r < THREAD_ROWS; r++)
#pragma unroll
                for (int o = 0; o < THREAD_OUTPUTS; o++)
                    sums[r][o] =
                        fmaf(values[column][warp * THREAD_ROWS + r], weights[column][lane + o * 32], sums[r][o]);
    }
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; r++) {
        int row = warp * THREAD_ROWS + r;
        if (row >= tile.count) continue;
        long long target = EXPERTS ? order[tile.first + row] : tile.first + row;
#pragma unroll
        for (int o = 0; o < THREAD_OUTPUTS; o++)
            if (int output = first + lane + o * 32; output < out_features)
                out[target * out_features + output] = sums[r][o];
    }
}

// float32_ROWS; for experts `experts`, or `across` where weights are [in_features, out_features].
#define PRODUCTS(NAME, ROWS, TILE_OUTPUTS, THREADS) \
    extern "C" __global__ void __launch_bounds__(THREADS) \
        NAME(const float* weight, const Number* x, float* out, int out_features, int in_features, int output_blocks, \
             int rows) { \
        products<ROWS, TILE_OUTPUTS, THREADS, false, true>(weight, x, out, nullptr, nullptr, 1, out_features, \
                                                           in_features, output_blocks, rows); \
    }
PRODUCTS(float32_8, 8, 32, 128)
PRODUCTS(float32_16, 16, 32, 128)
PRODUCTS(float32_64, 64, 128, 256)
#define EXPERTS(NAME, ROWS, TILE_OUTPUTS, THREADS, TRANSPOSED) \
    extern "C" __global__ void __launch_bounds__(THREADS) \
        NAME(const float* weight, const Number* x, float* out, const int* order, const Tile* tiles, \
             int rows_per_input, int out_features, int in_features, int output_blocks) { \
        products<ROWS, TILE_OUTPUTS, THREADS, true, TRANSPOSED>(weight, x, out, order, tiles, rows_per_input, \
                                                                out_features, in_features, output_blocks, 0); \
    }
EXPERTS(experts_8, 8, 32, 128, true)
EXPERTS(experts_16, 16, 32, 128, true)
EXPERTS(experts_64, 64, 128, 256, true)
EXPERTS(across_8, 8, 32, 128, false)
EXPERTS(across_16, 16, 32, 128, false)
EXPERTS(across_64, 64, 128, 256, false)
