// Sums and gathers over the ranks of a model, each on a device that reads and writes the others' memory.
//
// Small sums are sent as terms, which need no flags (sums.cuh). For the rest, each rank writes into its section of
// every other rank's inbox, then raises its flag there, block by block, and waits for the others' flags.
#include "overlap.cuh"
#include "sums.cuh"

__device__ void wait_for(const Group& group, const unsigned* flag, unsigned launch, int other) {
    unsigned seen;
    long long start = 0;
    for (unsigned spins = 0;; ++spins) {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        // A difference, as numbers of launches wrap around. A fast rank may be one launch ahead.
        if ((int)(seen - launch) >= 0 || is_lost(group, other, spins, start)) break;
    }
}

// A barrier: after it, a block can read what the blocks with its number wrote before it on any rank.
__device__ void exchange(const Group& group, unsigned launch, int phase) {
    __syncthreads();
    int other = threadIdx.x;
    if (other < WORLD && other != group.rank) {
        __threadfence_system();
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(group.flag(other, phase, group.rank)), "r"(launch)
                     : "memory");
        wait_for(group, group.flag(group.rank, phase, other), launch, other);
    }
    __syncthreads();
}

__device__ void end(const Group& group, unsigned launch, int units = 0) {
    __syncthreads();
    if (threadIdx.x == 0 && group.is_last()) group.end(launch, units);
}

// Returns the sum of one unit over the ranks; place: its index in a rank's section of the inbox.
__device__ uint4 sum(const Group& group, unsigned launch, uint4 local, int place, int kind) {
    float sums[8] = {};
    for (int from = 0; from < WORLD; ++from)
        add(sums, from == group.rank ? local : __ldcv(group.inbox(group.rank, launch, from) + place), kind);
    return rounded(sums, kind);
}

// values: `units` of 16 bytes, replaced by the sum. shots 1: each rank sends all of it to all, as terms, and
// accumulates: one trip over the links, for small sums. 2: each rank accumulates its part, and writes the result into
// the values of all ranks, whose block with this number has sent its part by then: less traffic, for large sums.
extern "C" __global__ void all_reduce(void* values, const void* peers, void* state, void* lost, int rank, int slot,
                                      int seconds, int kind, int shots, int units) {
    next_may_start();
    wait_for_previous();
    const Group group(peers, state, lost, rank, slot, seconds);
    uint4* local = (uint4*)values;
    unsigned launch = group.begin();
    int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    if (shots == 1) {
        int last = group.last_units();
        for (int i = first; i < max(units + step, last); i += step) {  // sends the next unit, then awaits this one
            if (i < units) send_term(group, launch, local[i], i);
            if (i < last) group.empty(launch, i);
            if (i != first && i - step < units)
                local[i - step] = sum_of_terms(group, launch, local[i - step], i - step, kind);
        }
    } else {
        group.empty_all(launch, first, step);
        int part = (units + WORLD - 1) / WORLD;
        for (int hop = 1; hop < WORLD; ++hop) {
            int to = (rank + hop) % WORLD;
            for (int i = first; i < part && to * part + i < units; i += step)
                group.inbox(to, launch, rank)[i] = local[to * part + i];
        }
        if (threadIdx.x < WORLD) *group.values(threadIdx.x, rank) = (u64)values;
        exchange(group, launch, 0);
        uint4* remote[WORLD];
#pragma unroll
        for (int hop = 0; hop < WORLD; ++hop) remote[hop] = (uint4*)*group.values(rank, (rank + hop) % WORLD);
        if (*(volatile unsigned*)(group.state + 2)) part = 0;  // a rank that is missing has sent no address
        for (int i = first; i < part && rank * part + i < units; i += step) {
            int at = rank * part + i;
            uint4 total = sum(group, launch, local[at], i, kind);
#pragma unroll
            for (int hop = 0; hop < WORLD; ++hop) remote[hop][at] = total;
        }
        exchange(group, launch, 1);
    }
    end(group, launch, shots == 1 ? units : 0);
}

template <typename T>
__device__ void put_together(const Group& group, unsigned launch, const T* local, T* whole, int rows, int columns) {
    int width = columns * WORLD;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < rows * width; i += gridDim.x * blockDim.x) {
        int row = i / width, from = i % width / columns, at = row * columns + i % columns;
        whole[i] = from == group.rank ? local[at] : __ldcv((const T*)group.inbox(group.rank, launch, from) + at);
    }
}

// part [rows, columns] of each rank, numbers of `size` bytes (2, 4 or 16), side by side into whole [rows, WORLD *
// columns].
extern "C" __global__ void all_gather(const void* part, void* whole, const void* peers, void* state, void* lost,
                                      int rank, int slot, int seconds, int units, int rows, int columns, int size) {
    const Group group(peers, state, lost, rank, slot, seconds);
    unsigned launch = group.begin();
    group.empty_all(launch, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < units; i += gridDim.x * blockDim.x) {
        uint4 unit = ((const uint4*)part)[i];
        for (int hop = 1; hop < WORLD; ++hop) group.inbox((rank + hop) % WORLD, launch, rank)[i] = unit;
    }
    // A block reads what was sent to other blocks, so it waits for all flags of this launch.
    exchange(group, launch, 0);
    for (int other = 0; other < WORLD; ++other) {
        if (other == rank) continue;
        for (int block = threadIdx.x; block < gridDim.x; block += blockDim.x)
            wait_for(group, group.flag(rank, 0, other) - blockIdx.x + block, launch, other);
    }
    __syncthreads();
    if (size == 16) put_together(group, launch, (const uint4*)part, (uint4*)whole, rows, columns);
    else if (size == 4) put_together(group, launch, (const unsigned*)part, (unsigned*)whole, rows, columns);
    else put_together(group, launch, (const unsigned short*)part, (unsigned short*)whole, rows, columns);
    end(group, launch);
}
