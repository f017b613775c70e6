// What products with experts' weights share: the rows of a step, sorted by their experts, and what becomes of a tile of them.
//
// sort_by_expert puts the rows of each expert behind each other, and cuts them into tiles. A block makes OUTS outputs of the
// rows of one tile; it reads rows and writes results where they lie, by their numbers. An expert without rows has no tile,
// and its weight is not read. How many tiles there are at most depends on the number of rows alone, so that launches may be
// captured: tiles behind the last have no rows.
//
// tensor_cores.cu stands before.

#define SORT_THREADS 1024  // and experts at most
#ifndef ON_HOST
__device__ __forceinline__ void load_across(u32 from, u32* r) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from));
}
template <int COUNT> __device__ __forceinline__ void wait_but_for() {  // all copies but those of the last COUNT groups
    asm volatile("cp.async.wait_group %0;" : : "n"(COUNT) : "memory");
}
#endif
struct alignas(16) Tile { int expert, first, count, unused; };
struct alignas(16) Piece { u32 words[4]; };

extern "C" __global__ void __launch_bounds__(SORT_THREADS) sort_by_expert(const int* ids, int* order, Tile* tiles, int experts,
                                                                          int tile_rows, int rows) {
    __shared__ int sums[2][2][SORT_THREADS];  // rows and tiles of all experts up to each, in turn
    __shared__ int next[SORT_THREADS];
    int own = threadIdx.x;
    next_may_start();
    next[own] = 0;
    wait_for_previous();
    __syncthreads();
    for (int row = own; row < rows; row += SORT_THREADS) atomicAdd(&next[ids[row]], 1);
    __syncthreads();
    int count = next[own], used = (count + tile_rows - 1) / tile_rows, turn = 0;
    sums[0][0][own] = count;
    sums[0][1][own] = used;
    __syncthreads();
    for (int step = 1; step < experts; step *= 2) {
        for (int i = 0; i < 2; i++) sums[!turn][i][own] = sums[turn][i][own] + (own >= step ? sums[turn][i][own - step] : 0);
        turn = !turn;
        __syncthreads();
    }
    int first = sums[turn][0][own] - count, tile = sums[turn][1][own] - used;
    next[own] = first;
    for (int i = 0; i < used; i++) tiles[tile + i] = {own, first + i * tile_rows, min(tile_rows, count - i * tile_rows), 0};
    int some = min(experts, rows), most = some + (rows - some) / tile_rows;
    for (int i = sums[turn][1][experts - 1] + own; i < most; i += SORT_THREADS) tiles[i] = {0, 0, 0, 0};
    __syncthreads();
    for (int row = own; row < rows; row += SORT_THREADS) order[atomicAdd(&next[ids[row]], 1)] = row;
}

// Where 16 bytes of a row of 64 bytes, or of a multiple of 128, lie in shared memory: those of 8 rows are in different banks.
template <int BYTES> __device__ __forceinline__ int place_of(int row, int piece) {
    if (BYTES == 64) return row * 64 + (piece ^ (row >> 1 & 3)) * 16;
    return row * BYTES + ((piece & ~7) | ((piece ^ row) & 7)) * 16;
}

// What warps have accumulated, [TILES][PARTS] of 16 outputs and 8 rows, to the rows of `out`, 16 bytes at a time.
template <int TILES, int PARTS, int OUTS, int BLOCK>
__device__ __forceinline__ void store(float (*sums)[PARTS][4], int across, int beside, bool has_some, unsigned short* out,
                                      const int* order, int count, int out_features, int most) {
    constexpr int WIDE = OUTS + 8;  // numbers from row to row of the results
    unsigned short* results = (unsigned short*)memory;
    int lane = threadIdx.x % 32;
    wait_but_for<0>();
    __syncthreads();
    if (has_some)
#pragma unroll
        for (int n = 0; n < TILES * PARTS * 4; n++) {
            int i = n % 4, part = n / 4 % PARTS, tile = n / 4 / PARTS, row = (beside * PARTS + part) * 8 + lane % 4 * 2 + i % 2;
            results[row * WIDE + (across * TILES + tile) * 16 + lane / 4 + i / 2 * 8] = narrow(sums[tile][part][i]);
        }
    __syncthreads();
    for (int n = threadIdx.x; n < count * (OUTS / 8); n += BLOCK) {
        int row = n / (OUTS / 8), output = n % (OUTS / 8) * 8;
        if (output < most) *(Piece*)(out + (long long)order[row] * out_features + output) = *(const Piece*)(results + row * WIDE + output);
    }
}
