// Shared by the GEMMs with experts' weights: the rows of a step, sorted by expert, and the results of a tile of them.
//
// sort_by_expert groups the rows by expert, and cuts each group into tiles. A block computes OUTS outputs of the rows
// of one tile; it reads and writes rows in place, by their numbers. An expert without rows has no tile, and its weight
// is not read. The largest number of tiles depends on the number of rows alone, so launches can be captured: unused
// tiles have no rows.
#pragma once
#include "tensor_cores.cuh"

#ifndef ON_HOST
__device__ __forceinline__ void load_across(u32 from, u32* r) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from));
}
template <int COUNT>
__device__ __forceinline__ void wait_but_for() {  // all copies but those of the last COUNT groups
    asm volatile("cp.async.wait_group %0;" : : "n"(COUNT) : "memory");
}
#endif
struct alignas(16) Tile {
    int expert, first, count, unused;
};

// Where 16 bytes of a row of 64 bytes, or of a multiple of 128, lie in shared memory: those of 8 rows are in different
// banks.
template <int BYTES>
__device__ __forceinline__ int place_of(int row, int piece) {
    if (BYTES == 64) return row * 64 + (piece ^ (row >> 1 & 3)) * 16;
    return row * BYTES + ((piece & ~7) | ((piece ^ row) & 7)) * 16;
}

// Stores the warps' sums, [TILES][PARTS] of 16 outputs and 8 rows, in the rows of `out`, 16 bytes at a time. DENSE: in
// the first rows, not in those of `order`.
template <int TILES, int PARTS, int OUTS, int BLOCK, bool DENSE = false>
__device__ __forceinline__ void store(float (*sums)[PARTS][4], int across, int beside, bool has_some,
                                      unsigned short* out, const int* order, int count, int out_features, int most) {
    constexpr int WIDE = OUTS + 8;  // numbers from row to row of the results
    unsigned short* results = (unsigned short*)memory;
    int lane = threadIdx.x % 32;
    wait_but_for<0>();
    __syncthreads();  // the results take the memory of the stages
    if (has_some)
#pragma unroll
        for (int n = 0; n < TILES * PARTS * 4; n++) {
            int i = n % 4, part = n / 4 % PARTS, tile = n / 4 / PARTS,
                row = (beside * PARTS + part) * 8 + lane % 4 * 2 + i % 2;
            results[row * WIDE + (across * TILES + tile) * 16 + lane / 4 + i / 2 * 8] = narrow(sums[tile][part][i]);
        }
    __syncthreads();
    for (int n = threadIdx.x; n < count * (OUTS / 8); n += BLOCK) {
        int row = n / (OUTS / 8), output = n % (OUTS / 8) * 8;
        if (output < most)
            *(Words4*)(out + (long long)(DENSE ? row : order[row]) * out_features + output) =
                *(const Words4*)(results + row * WIDE + output);
    }
}
