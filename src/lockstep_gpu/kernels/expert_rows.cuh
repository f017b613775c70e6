// Shared by the GEMMs with experts' weights: the rows of a step, sorted by expert, and the results of a tile of them.
//
// sort_by_expert groups the rows by expert, and cuts each group into tiles. A block computes TILE_OUTPUTS outputs of
// the rows of one tile; it reads and writes rows in place, by their numbers. An expert without rows has no tile, and
// its weight is not read. The largest number of tiles depends on the number of rows alone, so launches can be captured:
// unused tiles have no rows.
#pragma once
#include "tensor_cores.cuh"

struct alignas(16) Tile {
    int expert, first, count, unused;
};

// The offset in shared memory of 16 bytes (`piece`) of a row of 64 bytes, or of a multiple of 128: as in few_rows.cuh.
template <int ROW_BYTES>
__device__ __forceinline__ int swizzle(int row, int piece) {
    if (ROW_BYTES == 64) return row * 64 + (piece ^ (row >> 1 & 3)) * 16;
    return row * ROW_BYTES + ((piece & ~7) | ((piece ^ row) & 7)) * 16;
}

// How many copies of 16 bytes a thread makes of COLUMNS columns of a tile's rows.
template <int ROWS, int COLUMNS, int THREADS>
constexpr int ROW_COPIES = ROWS * COLUMNS / 8 / THREADS;

// Starts the copies of a step's columns. from: the row of each copy, null after the tile's last one. x: any address
// that can be read.
template <int ROWS, int COLUMNS, int THREADS>
__device__ __forceinline__ void copy_rows(u32 to,
                                          const unsigned short* const (&from)[ROW_COPIES<ROWS, COLUMNS, THREADS>],
                                          const unsigned short* x, int step, int in_features) {
    constexpr int PIECES = COLUMNS / 8;
#pragma unroll
    for (int i = 0; i < ROW_COPIES<ROWS, COLUMNS, THREADS>; i++) {
        int n = i * THREADS + threadIdx.x, row = n / PIECES, piece = n % PIECES, column = step * COLUMNS + piece * 8;
        bool in = column < in_features && from[i] != nullptr;
        cp_async(to + swizzle<COLUMNS * 2>(row, piece), in ? from[i] + column : x, in);
    }
}

// Stores the warps' accumulators, [TILES_M][TILES_N] of 16 outputs and 8 rows, in the rows of `out`, 16 bytes at a
// time. DENSE: in the first rows, not in those of `order`.
template <int TILES_M, int TILES_N, int TILE_OUTPUTS, int THREADS, bool DENSE = false>
__device__ __forceinline__ void store(float (*acc)[TILES_N][4], int warp_m, int warp_n, bool has_results,
                                      unsigned short* out, const int* order, int count, int out_features, int most) {
    constexpr int PITCH = TILE_OUTPUTS + 8;  // numbers from row to row of the results
    unsigned short* results = (unsigned short*)memory;
    int lane = threadIdx.x % 32;
    cp_async_wait<0>();
    __syncthreads();  // the results take the memory of the stages
    if (has_results)
#pragma unroll
        for (int n = 0; n < TILES_M * TILES_N * 4; n++) {
            int i = n % 4, tile_n = n / 4 % TILES_N, tile_m = n / 4 / TILES_N,
                row = (warp_n * TILES_N + tile_n) * 8 + lane % 4 * 2 + i % 2;
            results[row * PITCH + (warp_m * TILES_M + tile_m) * 16 + lane / 4 + i / 2 * 8] =
                narrow(acc[tile_m][tile_n][i]);
        }
    __syncthreads();
    for (int n = threadIdx.x; n < count * (TILE_OUTPUTS / 8); n += THREADS) {
        int row = n / (TILE_OUTPUTS / 8), output = n % (TILE_OUTPUTS / 8) * 8;
        if (output < most)
            *(Words4*)(out + (long long)(DENSE ? row : order[row]) * out_features + output) =
                *(const Words4*)(results + row * PITCH + output);
    }
}
