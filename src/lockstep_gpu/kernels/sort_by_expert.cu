// Sorts the rows of a step by their experts, and cuts them into tiles: expert_rows.cuh.
#include "expert_rows.cuh"

#define SORT_THREADS 1024  // and experts at most

extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    sort_by_expert(const int* ids, int* order, Tile* tiles, int experts, int tile_rows, int rows) {
    __shared__ int sums[2][2][SORT_THREADS];  // by buffer: rows and tiles of all experts up to each
    __shared__ int next[SORT_THREADS];
    int expert = threadIdx.x;
    next_may_start();
    next[expert] = 0;
    wait_for_previous();
    __syncthreads();
    for (int row = expert; row < rows; row += SORT_THREADS) atomicAdd(&next[ids[row]], 1);
    __syncthreads();
    // Prefix sums over the experts: where the rows and the tiles of each begin.
    int count = next[expert], num_tiles = (count + tile_rows - 1) / tile_rows, buffer = 0;
    sums[0][0][expert] = count;
    sums[0][1][expert] = num_tiles;
    __syncthreads();
    for (int step = 1; step < experts; step *= 2) {
        for (int i = 0; i < 2; i++)
            sums[!buffer][i][expert] = sums[buffer][i][expert] + (expert >= step ? sums[buffer][i][expert - step] : 0);
        buffer = !buffer;
        __syncthreads();
    }
    int first = sums[buffer][0][expert] - count, tile = sums[buffer][1][expert] - num_tiles;
    next[expert] = first;
    for (int i = 0; i < num_tiles; i++)
        tiles[tile + i] = {expert, first + i * tile_rows, min(tile_rows, count - i * tile_rows), 0};
    // Tiles that a step of this many rows could have needed, routed otherwise: blocks are launched for them, too.
    int max_used_experts = min(experts, rows), max_tiles = max_used_experts + (rows - max_used_experts) / tile_rows;
    for (int i = sums[buffer][1][experts - 1] + expert; i < max_tiles; i += SORT_THREADS) tiles[i] = {0, 0, 0, 0};
    __syncthreads();
    // The order within an expert differs from run to run, but a row has the same bits at any place of a tile.
    for (int row = expert; row < rows; row += SORT_THREADS) order[atomicAdd(&next[ids[row]], 1)] = row;
}
