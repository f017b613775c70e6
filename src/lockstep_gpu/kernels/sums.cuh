// Communication between the WORLD ranks of a model, and all-reduces that a kernel computes where it reads its input.
//
// Each rank writes into its section of every other rank's memory. Launches are numbered, alike on all ranks: a rank in
// launch n has ended launch n-1, in which it saw all others begin that launch, so each has ended launch n-2, whose
// memory may be overwritten now. Sums accumulate in rank order, in fp32, and are rounded once: all ranks get the same
// bits.
//
// Terms of sums need no flags or fences: their memory holds EMPTY, a NaN that no rank sends, until they arrive. It has
// three sections, used in turn: in each launch one is filled, and the one that the last launch filled is cleared.
//
// A rank that waits too long records for which one, on the host too, and stops waiting; the host may record that no
// rank will answer. Threads poll the host only after a long wait: reads of one address in its memory are served one at
// a time, 1 us each. A thousand polling warps would delay a sum by a millisecond, so that the other ranks wait for the
// next one, and poll too.
#pragma once
#include "numbers.cuh"

#ifndef WORLD  // for editors and checks of the syntax
#define WORLD 2
#define ROOM 64
#endif

#ifndef ON_HOST  // where the test has its own

constexpr int MOST_BLOCKS = 128;  // of a launch that raises flags
constexpr unsigned EMPTY = 0xffffffffu;
constexpr long long LATE = 100000000;  // nanoseconds after which a waiting thread polls the host

struct Group {
    const u64* peers;  // addresses at each rank, [inbox, flags, values, terms][WORLD]
    unsigned* state;   // of this rank: number of the last launch, blocks that have ended, missing rank plus 1, units of
                       // terms that arrived
    unsigned* lost;    // on the host: the missing rank plus 1; not 0: stop waiting
    int rank, slot;    // slot: units (of 16 bytes) of a rank's section of an inbox; ROOM: of its terms
    long long limit;   // nanoseconds

    __device__ Group(const void* peers, void* state, void* lost, int rank, int slot, int seconds)
        : peers((const u64*)peers),
          state((unsigned*)state),
          lost((unsigned*)lost),
          rank(rank),
          slot(slot),
          limit(seconds * 1000000000ll) {}
    __device__ uint4* inbox(int at, unsigned launch, int from) const {
        return (uint4*)peers[at] + ((long long)(launch & 1) * WORLD + from) * slot;
    }
    __device__ unsigned* flag(int at, int phase, int from) const {
        return (unsigned*)peers[WORLD + at] + (phase * WORLD + from) * MOST_BLOCKS + blockIdx.x;
    }
    // Where a rank writes the address of its values for this block of rank `at`.
    __device__ volatile u64* values(int at, int from) const {
        return (volatile u64*)peers[2 * WORLD + at] + from * MOST_BLOCKS + blockIdx.x;
    }
    __device__ uint4* terms(int at, unsigned launch, int from) const {
        return (uint4*)peers[3 * WORLD + at] + (long long)(launch % 3 * WORLD + from) * ROOM;
    }

    // The number of this launch. The largest is followed by 4, whose sections differ from its own (modulo 2 and 3).
    __device__ unsigned begin() const {
        unsigned launch = *(volatile unsigned*)state + 1;
        return launch ? launch : 4;
    }
    // Units that arrived in the last launch, and are cleared in this one.
    __device__ int last_units() const { return ((volatile unsigned*)state)[3]; }
    __device__ void empty(unsigned launch, int i) const {
        for (int from = 0; from < WORLD; ++from)  // launch + 2 has the section of launch - 1
            terms(rank, launch % 3 + 2, from)[i] = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
    }
    __device__ void empty_all(unsigned launch, int first, int step) const {
        for (int i = first, units = last_units(); i < units; i += step) empty(launch, i);
    }
    // Called by one thread of each block, once no thread of it reads the number any more; true in the last block.
    __device__ bool is_last() const { return atomicAdd(state + 1, 1u) == gridDim.x - 1; }
    __device__ void end(unsigned launch, int units = 0) const {
        state[1] = 0;
        state[3] = units;
        state[0] = launch;
    }
};

__device__ long long now() {
    long long time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

// Whether to wait no more for a rank that has not come, asked `spins` times; start: 0 at first.
__device__ bool is_lost(const Group& group, int other, unsigned spins, long long& start) {
    if ((spins & 63) != 63) return false;  // look at the clock and the record seldom: data is what is waited for
    volatile unsigned* noted = group.state + 2;
    if (*noted) return true;
    long long time = now();
    if (start == 0) start = time;
    if (time - start < LATE) return false;
    unsigned lost = *(volatile unsigned*)group.lost;
    if (!lost && time - start <= group.limit) return false;
    *noted = other + 1;
    if (!lost) *(volatile unsigned*)group.lost = other + 1;
    __threadfence_system();
    return true;
}

// kind: 0 float32, 1 float16, 2 bfloat16
__device__ void add(float* sums, uint4 values, int kind) {
    unsigned words[4] = {values.x, values.y, values.z, values.w};
    for (int i = 0; i < 4; ++i) {
        if (kind == 0) {
            sums[i] += __uint_as_float(words[i]);
        } else if (kind == 1) {
            sums[2 * i] += number_of_half(words[i] & 0xffff);
            sums[2 * i + 1] += number_of_half(words[i] >> 16);
        } else {
            sums[2 * i] += __uint_as_float(words[i] << 16);
            sums[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
        }
    }
}

__device__ uint4 rounded(const float* sums, int kind) {
    unsigned words[4];
    for (int i = 0; i < 4; ++i) {
        if (kind == 0) words[i] = __float_as_uint(sums[i]);
        else if (kind == 1) words[i] = half_of(sums[2 * i]) | half_of(sums[2 * i + 1]) << 16;
        else words[i] = bfloat16_of(sums[2 * i]) | bfloat16_of(sums[2 * i + 1]) << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ bool has_empty(uint4 unit) {
    return unit.x == EMPTY || unit.y == EMPTY || unit.z == EMPTY || unit.w == EMPTY;
}

// Writes a unit to all other ranks. Words that look like EMPTY become another NaN: the receiver would wait for them.
__device__ void send_term(const Group& group, unsigned launch, uint4 unit, int place) {
    const unsigned nan = 0x7fff7fffu;
    if (has_empty(unit))
        unit = make_uint4(unit.x == EMPTY ? nan : unit.x, unit.y == EMPTY ? nan : unit.y,
                          unit.z == EMPTY ? nan : unit.z, unit.w == EMPTY ? nan : unit.w);
    for (int hop = 1; hop < WORLD; ++hop)
        asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(
                         group.terms((group.rank + hop) % WORLD, launch, group.rank) + place),
                     "r"(unit.x), "r"(unit.y), "r"(unit.z), "r"(unit.w)
                     : "memory");
}

__device__ uint4 read(const uint4* from) {
    uint4 unit;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(unit.x), "=r"(unit.y), "=r"(unit.z), "=r"(unit.w)
                 : "l"(from)
                 : "memory");
    return unit;
}

// Returns the sum of a unit over the ranks: waits until the terms of all others have arrived.
__device__ uint4 sum_of_terms(const Group& group, unsigned launch, uint4 local, int place, int kind) {
    uint4 units[WORLD];
    long long start = 0;
    for (unsigned spins = 0;; ++spins) {
        int missing = -1;
#pragma unroll
        for (int from = 0; from < WORLD; ++from)
            units[from] = from == group.rank ? local : read(group.terms(group.rank, launch, from) + place);
#pragma unroll
        for (int from = 0; from < WORLD; ++from)
            if (from != group.rank && has_empty(units[from])) missing = from;
        if (missing < 0 || is_lost(group, missing, spins, start)) break;
    }
    float sums[8] = {};
#pragma unroll
    for (int from = 0; from < WORLD; ++from) add(sums, units[from], kind);
    return rounded(sums, kind);
}

// All-reduces a row of UNITS units of KIND, in place; the block reads the sum from shared memory (`numbers`). The
// destructor ends the launch, so that it is the last access to memory that other ranks write.
template <int UNITS, int THREADS>
struct RowSum {
    const Group group;
    const unsigned launch;
    const unsigned short* numbers;
    bool last;

    __device__ __forceinline__ RowSum(const Group& of, const unsigned short* values, int row)
        : group(of), launch(of.begin()) {
        constexpr int TURNS = (UNITS + THREADS - 1) / THREADS;
        __shared__ uint4 sums[UNITS];
        uint4 *row_units = (uint4*)values, local[TURNS];
#pragma unroll
        for (int turn = 0, i = threadIdx.x; turn < TURNS; ++turn, i += THREADS)
            if (i < UNITS) send_term(group, launch, local[turn] = row_units[i], row * UNITS + i);
        group.empty_all(launch, row * THREADS + threadIdx.x, gridDim.x * THREADS);
#pragma unroll
        for (int turn = 0, i = threadIdx.x; turn < TURNS; ++turn, i += THREADS)
            if (i < UNITS) sums[i] = row_units[i] = sum_of_terms(group, launch, local[turn], row * UNITS + i, KIND);
        __syncthreads();
        last = threadIdx.x == 0 && group.is_last();
        numbers = (const unsigned short*)sums;
    }
    __device__ __forceinline__ ~RowSum() {
        if (last) group.end(launch, gridDim.x * UNITS);
    }
};
#endif
