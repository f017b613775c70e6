// GEMMs of tokens' rows with the weights of their experts, each [out_features, in_features] or transposed, of KIND.
//
// Each output is accumulated by one warp from the first column to the last, 16 at a time (mma.m16n8k16, fp32), whatever
// the size of tiles: a row has the same bits in any batch, as in few_rows.cu.
#include "expert_rows.cuh"

// ROWS and TILE_OUTPUTS of a tile, COLUMNS of each of STAGES stages. WARPS_M * WARPS_N warps of all, which are THREADS
// threads, share outputs and rows.
template <int ROWS, int TILE_OUTPUTS, int COLUMNS, int STAGES, int WARPS_M, int WARPS_N, int THREADS, bool TRANSPOSED>
__device__ __forceinline__ void expert_products(const unsigned short* weight, const unsigned short* x,
                                                unsigned short* out, const int* order, const Tile* tiles,
                                                int rows_per_input, int out_features, int in_features,
                                                int output_blocks) {
    constexpr int WEIGHT = TILE_OUTPUTS * COLUMNS * 2, STAGE = WEIGHT + ROWS * COLUMNS * 2, K = COLUMNS / 16;
    constexpr int TILES_M = TILE_OUTPUTS / WARPS_M / 16, TILES_N = ROWS / WARPS_N / 8;  // of a warp: 16 outputs, 8 rows
    constexpr int COPIES = TILE_OUTPUTS * COLUMNS / 8 / THREADS;
    constexpr int WEIGHT_PIECES = (TRANSPOSED ? COLUMNS : TILE_OUTPUTS) / 8, WEIGHT_BYTES = WEIGHT_PIECES * 16;
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, warp_m = warp % WARPS_M, warp_n = warp / WARPS_M;
    int first = blockIdx.x % output_blocks * TILE_OUTPUTS, steps = (in_features + COLUMNS - 1) / COLUMNS;
    next_may_start();
    wait_for_previous();
    Tile tile = tiles[blockIdx.x / output_blocks];
    if (!tile.count) return;  // a launch has as many tiles as routing can ever need
    u32 base = shared_memory();
    weight += (long long)tile.expert * out_features * in_features;
    const unsigned short* from[ROW_COPIES<ROWS, COLUMNS, THREADS>];  // null after the tile's last row
#pragma unroll
    for (int i = 0; i < ROW_COPIES<ROWS, COLUMNS, THREADS>; i++) {
        int row = (i * THREADS + tid) / (COLUMNS / 8);
        from[i] = row < tile.count ? x + (long long)(order[tile.first + row] / rows_per_input) * in_features : nullptr;
    }
    auto load = [&](int step) {
        u32 to = base + step % STAGES * STAGE;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            int n = i * THREADS + tid, row = n / WEIGHT_PIECES, piece = n % WEIGHT_PIECES;
            int output = first + (TRANSPOSED ? row : piece * 8);
            int column = step * COLUMNS + (TRANSPOSED ? piece * 8 : row);
            bool in = column < in_features && output < out_features;
            long long at =
                TRANSPOSED ? (long long)output * in_features + column : (long long)column * out_features + output;
            cp_async(to + swizzle<WEIGHT_BYTES>(row, piece), weight + (in ? at : 0), in);
        }
        copy_rows<ROWS, COLUMNS, THREADS>(to + WEIGHT, from, x, step, in_features);
    };
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) load(step);
        cp_async_commit();
    }
    float acc[TILES_M][TILES_N][4] = {};
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // all see this stage, and have read the one that is overwritten next
        if (step + STAGES - 1 < steps) load(step + STAGES - 1);
        cp_async_commit();
        if (warp_n >= WARPS_N) continue;
        u32 a_from = base + step % STAGES * STAGE, b_from = a_from + WEIGHT;
#pragma unroll
        for (int k = 0; k < K; k += 2) {
            u32 a[2][TILES_M][4], b[TILES_N][4];
#pragma unroll
            for (int i = 0; i < 2 * TILES_M; i++) {
                int half = i % 2, tile_m = i / 2, output = (warp_m * TILES_M + tile_m) * 16, piece = (k + half) * 2;
                if (TRANSPOSED)
                    ldmatrix(a_from + swizzle<WEIGHT_BYTES>(output + lane % 16, piece + lane / 16), a[half][tile_m]);
                else
                    ldmatrix_trans(
                        a_from + swizzle<WEIGHT_BYTES>(piece * 8 + lane % 8 + lane / 16 * 8, output / 8 + lane / 8 % 2),
                        a[half][tile_m]);
            }
#pragma unroll
            for (int n = 0; n < TILES_N; n++)
                ldmatrix(b_from + swizzle<COLUMNS * 2>((warp_n * TILES_N + n) * 8 + lane % 8, k * 2 + lane / 8), b[n]);
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int i = 0; i < TILES_M * TILES_N; i++)
                    mma(acc[i / TILES_N][i % TILES_N], a[half][i / TILES_N], b[i % TILES_N] + half * 2);
        }
    }
    store<TILES_M, TILES_N, TILE_OUTPUTS, THREADS>(acc, warp_m, warp_n, warp_n < WARPS_N, out + first,
                                                   order + tile.first, tile.count, out_features, out_features - first);
}

#define EXPERTS(NAME, ROWS, TILE_OUTPUTS, COLUMNS, STAGES, WARPS_M, WARPS_N, THREADS, TRANSPOSED) \
    extern "C" __global__ void __launch_bounds__(THREADS) \
        NAME(const unsigned short* weight, const unsigned short* x, unsigned short* out, const int* order, \
             const Tile* tiles, int rows_per_input, int out_features, int in_features, int output_blocks) { \
        expert_products<ROWS, TILE_OUTPUTS, COLUMNS, STAGES, WARPS_M, WARPS_N, THREADS, TRANSPOSED>( \
            weight, x, out, order, tiles, rows_per_input, out_features, in_features, output_blocks); \
    }
// experts_ROWS, and `across` where weights are [in_features, out_features].
EXPERTS(experts_8, 8, 32, 256, 4, 2, 1, 128, true)
EXPERTS(experts_16, 16, 32, 256, 4, 2, 2, 128, true)
EXPERTS(experts_64, 64, 128, 64, 4, 4, 2, 256, true)
EXPERTS(experts_128, 128, 128, 64, 3, 2, 4, 256, true)
EXPERTS(across_8, 8, 32, 256, 4, 2, 1, 128, false)
EXPERTS(across_16, 16, 32, 256, 4, 2, 2, 128, false)
EXPERTS(across_64, 64, 128, 64, 4, 4, 2, 256, false)
EXPERTS(across_128, 128, 128, 64, 3, 2, 4, 256, false)
