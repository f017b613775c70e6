// GEMMs of more than 16 rows of e4m3 with an e4m3 weight [out_features, in_features] on Hopper.
//
// A block computes a tile of 128 outputs and 64 rows. One thread has TMA load stages of 128 columns into a ring buffer,
// and two warpgroups multiply them, 64 outputs each. The tensor cores accumulate a stage with about 14 bits of
// mantissa; stages are accumulated in fp32. A cluster has PAIR * SPLIT blocks: those of a pair have 64 rows each, and
// each loads half of the weight for both; those of a split share the columns. Without a split, clusters take tiles in
// turn. The partial sums of a split are accumulated in the order of its blocks, then multiplied by the row's scale and
// the output's.
#include "tensor_cores.cuh"

#define TILE 128
#define ROWS 64
#define MMA_THREADS 256   // threads of the warpgroups that multiply
#define DEPTH 128         // columns of a stage, which are the 128 bytes of a row that TMA and wgmma swizzle
#define PITCH (TILE + 4)  // numbers from the sums of one row to the next: rows begin in different banks

struct alignas(64) TensorMap {
    u64 v[16];
};

__device__ __forceinline__ void init_barrier(u32 at, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive_expect_bytes(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ u32 map_to_block(u32 address, int block) {  // of the cluster
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
    return remote;
}
__device__ __forceinline__ void arrive_remote(u32 remote) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" : : "r"(remote) : "memory");
}
__device__ __forceinline__ void wait_barrier(u32 at, u32 phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
        :
        : "r"(at), "r"(phase)
        : "memory");
}
__device__ __forceinline__ void tma_load(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        :
        : "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void tma_load_multicast(u32 to, const TensorMap* map, int column, int row, u32 barrier,
                                                   unsigned short blocks) {  // of the cluster
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3}], [%4], %5;"
        :
        : "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
        : "memory");
}
// The descriptor of a matrix for wgmma: rows of 128 bytes, swizzled, 8 of them in 1024.
__device__ __forceinline__ u64 wgmma_descriptor(u32 address) {
    return (u64)1 << 62 | (u64)64 << 32 | (u64)1 << 16 | address >> 4;
}
// d [64 outputs, 64 rows] = or += a [64, 32] times b [64, 32], transposed.
__device__ __forceinline__ void wgmma(float* d, u64 a, u64 b, int add) {
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
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" : : : "memory");
}
__device__ __forceinline__ void cluster_sync_relaxed() {  // without fences, which barriers do not need
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" : : : "memory");
}
__device__ __forceinline__ float4 load_remote(u32 remote) {
    float4 r;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w)
                 : "r"(remote)
                 : "memory");
    return r;
}

template <int PAIR, int SPLIT, int RING>
__device__ __forceinline__ void wgmma_fp8(const TensorMap& weight, const TensorMap& x, const float* weight_scales,
                                          const float* row_scales, unsigned short* first_out,
                                          unsigned short* second_out, unsigned short* third_out, int first_end,
                                          int second_end, int out_features, int in_features, int loaded, int rows) {
    constexpr u32 STAGE = (TILE + ROWS) * DEPTH;
    constexpr u32 SUMS = SPLIT > 1 ? 0 : RING * STAGE;  // a block of one tile writes sums over the ring
    __shared__ __align__(8) u64 barriers[2 * RING];

    u32 ring = (shared_memory() + 1023) & ~1023u, sums_at = ring + SUMS;
    float* sums = (float*)(memory + (sums_at - shared_memory()));
    u32 full = (u32)__cvta_generic_to_shared(barriers), empty = full + RING * 8;
    int tid = threadIdx.x, pair_rank = blockIdx.x % PAIR, split_rank = blockIdx.x / PAIR % SPLIT;
    int output_tiles = (out_features + TILE - 1) / TILE, row_tiles = (rows + ROWS * PAIR - 1) / (ROWS * PAIR);
    int stages = (in_features + DEPTH - 1) / DEPTH, stages_per_block = (stages + SPLIT - 1) / SPLIT;
    int from = min(split_rank * stages_per_block, stages), to = min(from + stages_per_block, stages);
    int num_tiles = output_tiles * row_tiles, stride = gridDim.x / (PAIR * SPLIT);
    if (tid == 0) {
        for (int i = 0; i < RING; i++) {
            init_barrier(full + i * 8, 1);
            init_barrier(empty + i * 8, MMA_THREADS / 32 * PAIR);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" : : : "memory");
    }
    if (PAIR > 1) {
        __syncwarp();
        cluster_sync_relaxed();
    } else __syncthreads();
    next_may_start();
    if (tid >= MMA_THREADS) {  // the warp that loads
        if (tid == MMA_THREADS) {
            // Stages whose weights are loaded before the previous kernel has ended: it may still write rows, but no
            // weights.
            int count = 0, num_prefetched = min(RING, to - from);
            u32 bytes = (TILE + loaded) * DEPTH;
            auto load_x = [&](int tile, int stage, int slot) {
                tma_load(ring + slot * STAGE + TILE * DEPTH, &x, stage * DEPTH,
                         (tile % row_tiles * PAIR + pair_rank) * ROWS, full + slot * 8);
            };
            for (int tile = blockIdx.x / (PAIR * SPLIT); tile < num_tiles; tile += stride)
                for (int stage = from; stage < to; stage++, count++) {
                    int slot = count % RING, row = tile / row_tiles * TILE;
                    if (count >= RING) wait_barrier(empty + slot * 8, (count / RING - 1) & 1);
                    arrive_expect_bytes(full + slot * 8, bytes);
                    if (PAIR == 1) tma_load(ring + slot * STAGE, &weight, stage * DEPTH, row, full + slot * 8);
                    else {
                        int half = pair_rank * (TILE / PAIR);
                        tma_load_multicast(ring + slot * STAGE + half * DEPTH, &weight, stage * DEPTH, row + half,
                                           full + slot * 8, 3 << split_rank * PAIR);
                    }
                    if (count >= num_prefetched) load_x(tile, stage, slot);
                    else if (count == num_prefetched - 1) {
                        wait_for_previous();
                        for (int j = 0; j < num_prefetched; j++) load_x(tile, from + j, j);
                    }
                }
        }
        __syncwarp();
        if (SPLIT > 1) cluster_sync();
        if (SPLIT > 1 || PAIR > 1) cluster_sync_relaxed();
        return;
    }
    int lane = tid % 32, warpgroup_output = tid / 128 * 64, count = 0;
    for (int tile = blockIdx.x / (PAIR * SPLIT); tile < num_tiles; tile += stride) {
        float total[32] = {};
        for (int stage = from; stage < to; stage++, count++) {
            int slot = count % RING;
            float partial[32];
#pragma unroll
            for (int j = 0; j < 32; j++) partial[j] = 0;
            wait_barrier(full + slot * 8, count / RING & 1);
            u64 a = wgmma_descriptor(ring + slot * STAGE + warpgroup_output * DEPTH),
                b = wgmma_descriptor(ring + slot * STAGE + TILE * DEPTH);
            asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
#pragma unroll
            for (int k = 0; k < 4; k++) wgmma(partial, a + k * 2, b + k * 2, k);
            asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" : : : "memory");
#pragma unroll
            for (int j = 0; j < 32; j++) asm volatile("" : "+f"(partial[j]) : : "memory");  // not to be read before
            // The stage is free: tell each block of the pair, which writes half of the weight into it.
            if (lane < PAIR) arrive_remote(map_to_block(empty + slot * 8, split_rank * PAIR + lane));
#pragma unroll
            for (int j = 0; j < 32; j++) total[j] += partial[j];
        }
        // Before outputs are written, which the previous kernel may still read.
        wait_for_previous();
        asm volatile("bar.sync 1, %0;" : : "n"(MMA_THREADS) : "memory");  // all have read the ring, and the sums before
        int output = warpgroup_output + tid % 128 / 32 * 16 + lane / 4, row = lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 32; j++) sums[(row + j / 4 * 8 + j % 2) * PITCH + output + j / 2 % 2 * 8] = total[j];
        if (SPLIT > 1) {
            __syncwarp();
            cluster_sync();
        } else asm volatile("bar.sync 1, %0;" : : "n"(MMA_THREADS) : "memory");
        int first_output = tile / row_tiles * TILE, first_row = (tile % row_tiles * PAIR + pair_rank) * ROWS;
#pragma unroll 1
        for (int n = tid; n < ROWS / SPLIT * (TILE / 4); n += MMA_THREADS) {
            int local_row = split_rank * (ROWS / SPLIT) + n / (TILE / 4), row = first_row + local_row,
                output = first_output + n % (TILE / 4) * 4;
            if (output >= out_features || row >= rows) continue;
            float4 sum = *(const float4*)(sums + local_row * PITCH + output - first_output);
            if (SPLIT > 1) {
                u32 at = sums_at + (local_row * PITCH + output - first_output) * 4;
                sum = load_remote(map_to_block(at, pair_rank));
#pragma unroll
                for (int block = 1; block < SPLIT; block++) {
                    float4 more = load_remote(map_to_block(at, block * PAIR + pair_rank));
                    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
                }
            }
            float row_scale = row_scales[row];
            float4 weight_scale = *(const float4*)(weight_scales + output);
            struct alignas(8) {
                unsigned short v[4];
            } results = {narrow(sum.x * row_scale * weight_scale.x), narrow(sum.y * row_scale * weight_scale.y),
                         narrow(sum.z * row_scale * weight_scale.z), narrow(sum.w * row_scale * weight_scale.w)};
            unsigned short* target =
                output < first_end    ? first_out + (long long)row * first_end + output
                : output < second_end ? second_out + (long long)row * (second_end - first_end) + output - first_end
                                      : third_out + (long long)row * (out_features - second_end) + output - second_end;
            *(decltype(results)*)target = results;
        }
    }
    __syncwarp();
    if (SPLIT > 1 || PAIR > 1)
        cluster_sync_relaxed();  // none ends before the others have read its sums, and met its barriers
}

#define WGMMA(NAME, PAIR, SPLIT, RING) \
    extern "C" __global__ void __cluster_dims__(PAIR* SPLIT, 1, 1) __launch_bounds__(MMA_THREADS + 32, 2) NAME( \
        const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const float* weight_scales, \
        const float* row_scales, unsigned short* first_out, unsigned short* second_out, unsigned short* third_out, \
        int first_end, int second_end, int out_features, int in_features, int loaded, int rows) { \
        wgmma_fp8<PAIR, SPLIT, RING>(weight, x, weight_scales, row_scales, first_out, second_out, third_out, \
                                     first_end, second_end, out_features, in_features, loaded, rows); \
    }
WGMMA(wgmma_fp8_1_1, 1, 1, 3)
WGMMA(wgmma_fp8_1_2, 1, 2, 4)
WGMMA(wgmma_fp8_1_4, 1, 4, 4)
WGMMA(wgmma_fp8_2_1, 2, 1, 3)
WGMMA(wgmma_fp8_2_2, 2, 2, 4)
WGMMA(wgmma_fp8_2_4, 2, 4, 4)
