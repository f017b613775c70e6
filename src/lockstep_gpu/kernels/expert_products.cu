// GEMMs of tokens' rows with the weights of their experts, each [out_features, in_features] or transposed, of KIND.
//
// Each output is accumulated by one warp from the first column to the last, 16 at a time (mma.m16n8k16, fp32), whatever
// the size of tiles: a row has the same bits in any batch, as in few_rows.cu.
#include "expert_rows.cuh"

// ROWS of a tile, OUTS and COLUMNS of each of DEPTH stages; ACROSS * BESIDE warps of all, which are BLOCK threads,
// share outputs and rows.
template <int ROWS, int OUTS, int COLUMNS, int DEPTH, int ACROSS, int BESIDE, int BLOCK, bool TRANSPOSED>
__device__ __forceinline__ void expert_products(const unsigned short* weight, const unsigned short* x,
                                                unsigned short* out, const int* order, const Tile* tiles, int sharing,
                                                int out_features, int in_features, int out_blocks) {
    constexpr int WEIGHT = OUTS * COLUMNS * 2, STAGE = WEIGHT + ROWS * COLUMNS * 2, K = COLUMNS / 16;
    constexpr int TILES = OUTS / ACROSS / 16, PARTS = ROWS / BESIDE / 8;  // of 16 outputs and of 8 rows, of a warp
    constexpr int LOADS = OUTS * COLUMNS / 8 / BLOCK, ROW_LOADS = ROWS * COLUMNS / 8 / BLOCK;
    constexpr int ROW_PIECES = COLUMNS / 8, PIECES_OF_WEIGHT = (TRANSPOSED ? COLUMNS : OUTS) / 8;
    constexpr int ROW_BYTES = COLUMNS * 2, WEIGHT_BYTES = PIECES_OF_WEIGHT * 16;
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, across = warp % ACROSS, beside = warp / ACROSS;
    int first = blockIdx.x % out_blocks * OUTS, steps = (in_features + COLUMNS - 1) / COLUMNS;
    next_may_start();
    wait_for_previous();
    Tile tile = tiles[blockIdx.x / out_blocks];
    if (!tile.count) return;  // a launch has as many tiles as routing can ever need
    u32 base = shared_memory();
    weight += (long long)tile.expert * out_features * in_features;
    const unsigned short* from[ROW_LOADS];
#pragma unroll
    for (int i = 0; i < ROW_LOADS; i++) {
        int row = (i * BLOCK + tid) / ROW_PIECES;
        from[i] = row < tile.count ? x + (long long)(order[tile.first + row] / sharing) * in_features : nullptr;
    }
    auto load = [&](int step) {
        u32 to = base + step % DEPTH * STAGE;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int n = i * BLOCK + tid, row = n / PIECES_OF_WEIGHT, piece = n % PIECES_OF_WEIGHT;
            int out = first + (TRANSPOSED ? row : piece * 8), column = step * COLUMNS + (TRANSPOSED ? piece * 8 : row);
            bool in = column < in_features && out < out_features;
            long long at = TRANSPOSED ? (long long)out * in_features + column : (long long)column * out_features + out;
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
    float sums[TILES][PARTS][4] = {};
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        wait_but_for<DEPTH - 2>();
        __syncthreads();  // all see this stage, and have read the one that is overwritten next
        if (step + DEPTH - 1 < steps) load(step + DEPTH - 1);
        commit();
        if (beside >= BESIDE) continue;
        u32 a_from = base + step % DEPTH * STAGE, b_from = a_from + WEIGHT;
#pragma unroll
        for (int k = 0; k < K; k += 2) {
            u32 a[2][TILES][4], b[PARTS][4];
#pragma unroll
            for (int i = 0; i < 2 * TILES; i++) {
                int half = i % 2, part = i / 2, out = (across * TILES + part) * 16, piece = (k + half) * 2;
                if (TRANSPOSED)
                    load_matrices(a_from + place_of<WEIGHT_BYTES>(out + lane % 16, piece + lane / 16), a[half][part]);
                else
                    load_across(
                        a_from + place_of<WEIGHT_BYTES>(piece * 8 + lane % 8 + lane / 16 * 8, out / 8 + lane / 8 % 2),
                        a[half][part]);
            }
#pragma unroll
            for (int part = 0; part < PARTS; part++)
                load_matrices(b_from + place_of<ROW_BYTES>((beside * PARTS + part) * 8 + lane % 8, k * 2 + lane / 8),
                              b[part]);
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int i = 0; i < TILES * PARTS; i++)
                    mma(sums[i / PARTS][i % PARTS], a[half][i / PARTS], b[i % PARTS] + half * 2);
        }
    }
    store<TILES, PARTS, OUTS, BLOCK>(sums, across, beside, beside < BESIDE, out + first, order + tile.first, tile.count,
                                     out_features, out_features - first);
}

#define EXPERTS(NAME, ROWS, OUTS, COLUMNS, DEPTH, ACROSS, BESIDE, BLOCK, TRANSPOSED) \
    extern "C" __global__ void __launch_bounds__(BLOCK) \
        NAME(const unsigned short* weight, const unsigned short* x, unsigned short* out, const int* order, \
             const Tile* tiles, int sharing, int out_features, int in_features, int out_blocks) { \
        expert_products<ROWS, OUTS, COLUMNS, DEPTH, ACROSS, BESIDE, BLOCK, TRANSPOSED>( \
            weight, x, out, order, tiles, sharing, out_features, in_features, out_blocks); \
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
