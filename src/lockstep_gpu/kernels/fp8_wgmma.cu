// GEMMs of more than 16 rows of e4m3 with an e4m3 weight [out_features, in_features] on Hopper.
//
// A block computes a tile of 128 outputs and 64 rows. One thread has TMA load stages of 128 columns into a ring buffer,
// and two warpgroups multiply them, 64 outputs each. The tensor cores accumulate a stage with about 14 bits of
// mantissa; stages are accumulated in fp32. A cluster has PAIR * SPLIT blocks: those of a pair have 64 rows each, and
// each loads half of the weight for both; those of a split share the columns. Without a split, clusters take tiles in
// turn. The partial sums of a split are accumulated in the order of its blocks, then multiplied by the row's step and
// the output's scale.
#include "tensor_cores.cuh"

#define TILE 128
#define ROWS 64
#define MULTIPLIERS 256   // threads of the warpgroups that multiply
#define DEPTH 128         // columns of a stage, which are the 128 bytes of a row that TMA and wgmma swizzle
#define PITCH (TILE + 4)  // numbers from the sums of one row to the next: rows begin in different banks

struct alignas(64) TensorMap {
    u64 v[16];
};

__device__ __forceinline__ void init_barrier(u32 at, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void expect_bytes(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ u32 in_block(u32 address, int block) {  // of the cluster
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
    return remote;
}
__device__ __forceinline__ void arrive(u32 remote) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" : : "r"(remote) : "memory");
}
__device__ __forceinline__ void wait_at(u32 at, u32 phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
        :
        : "r"(at), "r"(phase)
        : "memory");
}
__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        :
        : "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void load_box_for(u32 to, const TensorMap* map, int column, int row, u32 barrier,
                                             unsigned short blocks) {  // of the cluster
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3}], [%4], %5;"
        :
        : "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
        : "memory");
}
// The descriptor of a matrix for wgmma: rows of 128 bytes, swizzled, 8 of them in 1024.
__device__ __forceinline__ u64 matrix_at(u32 address) {
    return (u64)1 << 62 | (u64)64 << 32 | (u64)1 << 16 | address >> 4;
}
// d [64 outputs, 64 rows] = or += a [64, 32] times b [64, 32], transposed.
__device__ __forceinline__ void multiply_tiles(float* d, u64 a, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, "
        "%15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, add, 1, 1;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void meet_in_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" : : : "memory");
}
__device__ __forceinline__ void meet_for_barriers() {  // without fences, which barriers do not need
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" : : : "memory");
}
__device__ __forceinline__ float4 load_four(u32 remote) {
    float4 r;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w)
                 : "r"(remote)
                 : "memory");
    return r;
}

template <int PAIR, int SPLIT, int RING>
__device__ __forceinline__ void wgmma_fp8(const TensorMap& weight, const TensorMap& x, const float* scales,
                                          const float* steps, unsigned short* first_out, unsigned short* second_out,
                                          unsigned short* third_out, int first_end, int second_end, int out_features,
                                          int in_features, int loaded, int rows) {
    constexpr u32 STAGE = (TILE + ROWS) * DEPTH,
                  SUMS = SPLIT > 1 ? 0 : RING * STAGE;  // a block of one tile writes sums over the ring
    __shared__ __align__(8) u64 barriers[2 * RING];
    u32 ring = (shared_memory() + 1023) & ~1023u, sums_at = ring + SUMS;
    float* sums = (float*)(memory + (sums_at - shared_memory()));
    u32 full = (u32)__cvta_generic_to_shared(barriers), empty = full + RING * 8;
    int tid = threadIdx.x, member = blockIdx.x % PAIR, rank = blockIdx.x / PAIR % SPLIT;
    int tiles = (out_features + TILE - 1) / TILE, beside = (rows + ROWS * PAIR - 1) / (ROWS * PAIR);
    int turns = (in_features + DEPTH - 1) / DEPTH, turns_per_block = (turns + SPLIT - 1) / SPLIT;
    int from = min(rank * turns_per_block, turns), to = min(from + turns_per_block, turns), items = tiles * beside,
        stride = gridDim.x / (PAIR * SPLIT);
    if (tid == 0) {
        for (int i = 0; i < RING; i++) {
            init_barrier(full + i * 8, 1);
            init_barrier(empty + i * 8, MULTIPLIERS / 32 * PAIR);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" : : : "memory");
    }
    if (PAIR > 1) {
        __syncwarp();
        meet_for_barriers();
    } else __syncthreads();
    next_may_start();
    if (tid >= MULTIPLIERS) {  // the warp that loads
        if (tid == MULTIPLIERS) {
            int turn = 0,
                ahead = min(RING, to - from);  // the previous kernel may still write rows, but not weights
            u32 bytes = (TILE + loaded) * DEPTH;
            auto load_x = [&](int item, int i, int place) {
                load_box(ring + place * STAGE + TILE * DEPTH, &x, i * DEPTH, (item % beside * PAIR + member) * ROWS,
                         full + place * 8);
            };
            for (int item = blockIdx.x / (PAIR * SPLIT); item < items; item += stride)
                for (int i = from; i < to; i++, turn++) {
                    int place = turn % RING, row = item / beside * TILE;
                    if (turn >= RING) wait_at(empty + place * 8, (turn / RING - 1) & 1);
                    expect_bytes(full + place * 8, bytes);
                    if (PAIR == 1) load_box(ring + place * STAGE, &weight, i * DEPTH, row, full + place * 8);
                    else {
                        int half = member * (TILE / PAIR);
                        load_box_for(ring + place * STAGE + half * DEPTH, &weight, i * DEPTH, row + half,
                                     full + place * 8, 3 << rank * PAIR);
                    }
                    if (turn >= ahead) load_x(item, i, place);
                    else if (turn == ahead - 1) {
                        wait_for_previous();
                        for (int j = 0; j < ahead; j++) load_x(item, from + j, j);
                    }
                }
        }
        __syncwarp();
        if (SPLIT > 1) meet_in_cluster();
        if (SPLIT > 1 || PAIR > 1) meet_for_barriers();
        return;
    }
    int lane = tid % 32, across = tid / 128 * 64, turn = 0;
    for (int item = blockIdx.x / (PAIR * SPLIT); item < items; item += stride) {
        float total[32] = {};
        for (int i = from; i < to; i++, turn++) {
            int place = turn % RING;
            float partial[32];
#pragma unroll
            for (int j = 0; j < 32; j++) partial[j] = 0;
            wait_at(full + place * 8, turn / RING & 1);
            u64 a = matrix_at(ring + place * STAGE + across * DEPTH),
                b = matrix_at(ring + place * STAGE + TILE * DEPTH);
            asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
#pragma unroll
            for (int k = 0; k < 4; k++) multiply_tiles(partial, a + k * 2, b + k * 2, k);
            asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" : : : "memory");
#pragma unroll
            for (int j = 0; j < 32; j++) asm volatile("" : "+f"(partial[j]) : : "memory");  // not to be read before
            // The stage is free: tell each block of the pair, which writes half of the weight into it.
            if (lane < PAIR) arrive(in_block(empty + place * 8, rank * PAIR + lane));
#pragma unroll
            for (int j = 0; j < 32; j++) total[j] += partial[j];
        }
        // Before outputs are written, which the previous kernel may still read.
        wait_for_previous();
        asm volatile("bar.sync 1, %0;" : : "n"(MULTIPLIERS) : "memory");  // all have read the ring, and the sums before
        int output = across + tid % 128 / 32 * 16 + lane / 4, row = lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 32; j++) sums[(row + j / 4 * 8 + j % 2) * PITCH + output + j / 2 % 2 * 8] = total[j];
        if (SPLIT > 1) {
            __syncwarp();
            meet_in_cluster();
        } else asm volatile("bar.sync 1, %0;" : : "n"(MULTIPLIERS) : "memory");
        int first = item / beside * TILE, first_row = (item % beside * PAIR + member) * ROWS;
#pragma unroll 1
        for (int n = tid; n < ROWS / SPLIT * (TILE / 4); n += MULTIPLIERS) {
            int local_row = rank * (ROWS / SPLIT) + n / (TILE / 4), request = first_row + local_row,
                out = first + n % (TILE / 4) * 4;
            if (out >= out_features || request >= rows) continue;
            float4 sum = *(const float4*)(sums + local_row * PITCH + out - first);
            if (SPLIT > 1) {
                u32 at = sums_at + (local_row * PITCH + out - first) * 4;
                sum = load_four(in_block(at, member));
#pragma unroll
                for (int block = 1; block < SPLIT; block++) {
                    float4 more = load_four(in_block(at, block * PAIR + member));
                    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
                }
            }
            float step = steps[request];
            float4 scale = *(const float4*)(scales + out);
            struct alignas(8) {
                unsigned short v[4];
            } result = {narrow(sum.x * step * scale.x), narrow(sum.y * step * scale.y), narrow(sum.z * step * scale.z),
                        narrow(sum.w * step * scale.w)};
            unsigned short* target =
                out < first_end    ? first_out + (long long)request * first_end + out
                : out < second_end ? second_out + (long long)request * (second_end - first_end) + out - first_end
                                   : third_out + (long long)request * (out_features - second_end) + out - second_end;
            *(decltype(result)*)target = result;
        }
    }
    __syncwarp();
    if (SPLIT > 1 || PAIR > 1)
        meet_for_barriers();  // none ends before the others have read its sums, and met its barriers
}

#define WGMMA(NAME, PAIR, SPLIT, RING) \
    extern "C" __global__ void __cluster_dims__(PAIR* SPLIT, 1, 1) __launch_bounds__(MULTIPLIERS + 32, 2) \
        NAME(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const float* scales, \
             const float* steps, unsigned short* first_out, unsigned short* second_out, unsigned short* third_out, \
             int first_end, int second_end, int out_features, int in_features, int loaded, int rows) { \
        wgmma_fp8<PAIR, SPLIT, RING>(weight, x, scales, steps, first_out, second_out, third_out, first_end, \
                                     second_end, out_features, in_features, loaded, rows); \
    }
WGMMA(wgmma_fp8_1_1, 1, 1, 3)
WGMMA(wgmma_fp8_1_2, 1, 2, 4)
WGMMA(wgmma_fp8_1_4, 1, 4, 4)
WGMMA(wgmma_fp8_2_1, 2, 1, 3)
WGMMA(wgmma_fp8_2_2, 2, 2, 4)
WGMMA(wgmma_fp8_2_4, 2, 4, 4)
