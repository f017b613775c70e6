// Sums and gathers over the ranks of a model, each on a device that reads and writes the others' memory.
//
// Each rank writes into its place of every other's inbox (two inboxes in turn), then raises its flag there, block by block, and waits for the others' flags. A
// number counts the launches, the same on all ranks: a rank that is in launch n has ended launch n-1, in which it saw all others begin that one, so each has ended
// launch n-2, whose inbox is written now. Sums are made in rank order, in float32, and rounded once: all ranks hold the same bits.
//
// Few bytes go as packets instead: 8 bytes, and behind each 4 of them the number of the launch. Who reads both numbers has the bytes, without a flag or a fence.
//
// A rank that waits too long notes for whom, on the host too, and waits no more; the host may note that nobody will come.
typedef unsigned long long Wide;

constexpr int BLOCKS = 128;   // a launch has at most
constexpr int PACKED = 16384;  // units that go as packets at most

struct Group {
    const Wide* peers;    // addresses at each rank, [inbox, flags, outbox, packets][world]
    unsigned* state;      // of this rank: number of the last launch, blocks that are through, rank that did not come, plus 1
    unsigned* lost;       // on the host, the last of these; other than 0: nobody is waited for
    int world, rank, slot;  // slot: 16-byte units of a rank's place in an inbox
    long long limit;      // nanoseconds

    __device__ uint4* inbox(int at, unsigned launch, int from) const { return (uint4*)peers[at] + ((long long)(launch & 1) * world + from) * slot; }
    __device__ unsigned* flag(int at, int phase, int from) const { return (unsigned*)peers[world + at] + (phase * world + from) * BLOCKS + blockIdx.x; }
    __device__ uint4* outbox(int at) const { return (uint4*)peers[2 * world + at]; }
    __device__ uint4* packets(int at, unsigned launch, int from) const { return (uint4*)peers[3 * world + at] + ((launch & 1) * world + from) * 2 * PACKED; }
};

__device__ long long now() {
    long long time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

__device__ unsigned begin(const Group& group) {
    __shared__ unsigned launch;
    if (threadIdx.x == 0) {
        launch = *(volatile unsigned*)group.state + 1;
        if (launch == 0) launch = 2;  // no packet has come yet where the number is 0
    }
    __syncthreads();
    return launch;
}

// Whether to wait no more for a rank that has not come, asked `spins` times since `start`.
__device__ bool is_lost(const Group& group, int other, unsigned spins, long long start) {
    if ((spins & 1023) != 1023) return false;
    if (*(volatile unsigned*)(group.state + 2) || *(volatile unsigned*)group.lost) return true;
    if (now() - start <= group.limit) return false;
    *(volatile unsigned*)(group.state + 2) = other + 1;
    *(volatile unsigned*)group.lost = other + 1;
    __threadfence_system();
    return true;
}

__device__ void send(uint4* to, unsigned one, unsigned two, unsigned launch) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %3, %2, %3};" ::"l"(to), "r"(one), "r"(two), "r"(launch) : "memory");
}

__device__ uint4 read(const uint4* from) {
    uint4 packet;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(packet.x), "=r"(packet.y), "=r"(packet.z), "=r"(packet.w) : "l"(from) : "memory");
    return packet;
}

// The unit that a rank sends as two packets.
__device__ uint4 received(const Group& group, unsigned launch, int from, int place) {
    const uint4* at = group.packets(group.rank, launch, from) + 2 * place;
    uint4 first, second;
    long long start = now();
    for (unsigned spins = 0;; ++spins) {
        first = read(at), second = read(at + 1);
        if (first.y == launch && first.w == launch && second.y == launch && second.w == launch) break;
        if (is_lost(group, from, spins, start)) break;
    }
    return make_uint4(first.x, first.z, second.x, second.z);
}

// What all blocks of this number wrote before it at any rank can be read behind it.
__device__ void exchange(const Group& group, unsigned launch, int phase) {
    __syncthreads();
    int other = threadIdx.x;
    if (other < group.world && other != group.rank) {
        __threadfence_system();
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(group.flag(other, phase, group.rank)), "r"(launch) : "memory");
        unsigned *flag = group.flag(group.rank, phase, other), seen;
        long long start = now();
        for (unsigned spins = 0;; ++spins) {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
            if ((int)(seen - launch) >= 0 || is_lost(group, other, spins, start)) break;
        }
    }
    __syncthreads();
}

__device__ void end(const Group& group, unsigned launch) {
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(group.state + 1, 1u) == gridDim.x - 1) {
        group.state[1] = 0;
        group.state[0] = launch;
    }
}

__device__ float from_half(unsigned bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
    return value;
}

__device__ unsigned to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ unsigned to_bfloat16(float value) {
    unsigned bits = __float_as_uint(value);
    return value != value ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

// kind: 0 float32, 1 float16, 2 bfloat16
__device__ void add(float* sums, uint4 values, int kind) {
    unsigned words[4] = {values.x, values.y, values.z, values.w};
    for (int i = 0; i < 4; ++i) {
        if (kind == 0) {
            sums[i] += __uint_as_float(words[i]);
        } else if (kind == 1) {
            sums[2 * i] += from_half(words[i] & 0xffff);
            sums[2 * i + 1] += from_half(words[i] >> 16);
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
        else if (kind == 1) words[i] = to_half(sums[2 * i]) | to_half(sums[2 * i + 1]) << 16;
        else words[i] = to_bfloat16(sums[2 * i]) | to_bfloat16(sums[2 * i + 1]) << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// What the ranks hold of one unit, accumulated; `place`: in a rank's place of the inbox, or among its packets.
__device__ uint4 sum(const Group& group, unsigned launch, uint4 mine, int place, int kind, bool packed = false) {
    float sums[8] = {};
    for (int from = 0; from < group.world; ++from) {
        if (from == group.rank) add(sums, mine, kind);
        else if (packed) add(sums, received(group, launch, from, place), kind);
        else add(sums, __ldcv(group.inbox(group.rank, launch, from) + place), kind);
    }
    return rounded(sums, kind);
}

// values: `units` of 16 bytes, replaced by the sum. shots 1: each rank sends all of it to all, and accumulates; 0: as packets. 2: each rank accumulates its part, and
// sends that to all.
extern "C" __global__ void all_reduce(void* values, const void* peers, void* state, void* lost, int world, int rank, int slot, int seconds, int kind, int shots,
                                      int units) {
    next_may_start();
    wait_for_previous();
    Group group = {(const Wide*)peers, (unsigned*)state, (unsigned*)lost, world, rank, slot, seconds * 1000000000ll};
    uint4* mine = (uint4*)values;
    unsigned launch = begin(group);
    int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    if (shots == 0) {
        for (int i = first; i < units; i += step) {
            uint4 own = mine[i];
            for (int hop = 1; hop < world; ++hop) {
                uint4* to = group.packets((rank + hop) % world, launch, rank) + 2 * i;
                send(to, own.x, own.y, launch);
                send(to + 1, own.z, own.w, launch);
            }
        }
        for (int i = first; i < units; i += step) mine[i] = sum(group, launch, mine[i], i, kind, true);
    } else if (shots == 1) {
        for (int i = first; i < units; i += step) {
            uint4 own = mine[i];
            for (int hop = 1; hop < world; ++hop) group.inbox((rank + hop) % world, launch, rank)[i] = own;
        }
        exchange(group, launch, 0);
        for (int i = first; i < units; i += step) mine[i] = sum(group, launch, mine[i], i, kind);
    } else {
        int part = (units + world - 1) / world;
        for (int hop = 1; hop < world; ++hop) {
            int to = (rank + hop) % world;
            for (int i = first; i < part && to * part + i < units; i += step) group.inbox(to, launch, rank)[i] = mine[to * part + i];
        }
        exchange(group, launch, 0);
        for (int i = first; i < part && rank * part + i < units; i += step) {
            int at = rank * part + i;
            uint4 total = mine[at] = sum(group, launch, mine[at], i, kind);
            for (int hop = 1; hop < world; ++hop) group.outbox((rank + hop) % world)[at] = total;
        }
        exchange(group, launch, 1);
        for (int hop = 1; hop < world; ++hop) {
            int from = (rank + hop) % world;
            for (int i = first; i < part && from * part + i < units; i += step) mine[from * part + i] = __ldcv(group.outbox(rank) + from * part + i);
        }
    }
    end(group, launch);
}

template <typename T>
__device__ void put_together(const Group& group, unsigned launch, const T* mine, T* whole, int rows, int columns) {
    int width = columns * group.world;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < rows * width; i += gridDim.x * blockDim.x) {
        int row = i / width, from = i % width / columns, at = row * columns + i % columns;
        whole[i] = from == group.rank ? mine[at] : __ldcv((const T*)group.inbox(group.rank, launch, from) + at);
    }
}

// part [rows, columns] of each rank, numbers of `size` bytes (2, 4 or 16), side by side into whole [rows, world * columns].
extern "C" __global__ void all_gather(const void* part, void* whole, const void* peers, void* state, void* lost, int world, int rank, int slot, int seconds, int units,
                                      int rows, int columns, int size) {
    Group group = {(const Wide*)peers, (unsigned*)state, (unsigned*)lost, world, rank, slot, seconds * 1000000000ll};
    unsigned launch = begin(group);
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < units; i += gridDim.x * blockDim.x) {
        uint4 own = ((const uint4*)part)[i];
        for (int hop = 1; hop < world; ++hop) group.inbox((rank + hop) % world, launch, rank)[i] = own;
    }
    // A block reads what other blocks were sent: all flags of this launch.
    exchange(group, launch, 0);
    for (int other = 0; other < world; ++other) {
        if (other == rank) continue;
        for (int block = threadIdx.x; block < gridDim.x; block += blockDim.x) {
            unsigned *flag = group.flag(rank, 0, other) - blockIdx.x + block, seen;
            do {
                asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
            } while ((int)(seen - launch) < 0 && !*(volatile unsigned*)(group.state + 2) && !*(volatile unsigned*)group.lost);
        }
    }
    __syncthreads();
    if (size == 16) put_together(group, launch, (const uint4*)part, (uint4*)whole, rows, columns);
    else if (size == 4) put_together(group, launch, (const unsigned*)part, (unsigned*)whole, rows, columns);
    else put_together(group, launch, (const unsigned short*)part, (unsigned short*)whole, rows, columns);
    end(group, launch);
}
