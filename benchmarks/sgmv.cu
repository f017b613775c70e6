// What adapters add to layers that read the same values, each row by its own adapter (segmented gather matrix-vector
// products): shrink x A, then expand onto the layers' results. Rows of one adapter are a segment, and its matrices are read
// once for them.
//
// x fp16 [tokens, in_features]; a fp16 [adapters, columns, in_features] with RANK columns for each layer; b fp16 [adapters,
// out_features, RANK], layers side by side; y fp16 [tokens, out_features]. rows: tokens by segment; starts [segments + 1];
// adapters: of each segment.

constexpr int THREADS = 128, CHUNK = 4, RANK = 16;

#ifdef __CUDA_ARCH__
__device__ __forceinline__ float wide(unsigned short bits) { float v; asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits)); return v; }
__device__ __forceinline__ unsigned short narrow(float v) { unsigned short r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v)); return r; }
#endif

// Eight numbers, of 16 bytes that are read at once.
__device__ __forceinline__ void unpack(uint4 unit, float* to) {
    const unsigned words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[2 * i] = wide((unsigned short)words[i]);
        to[2 * i + 1] = wide((unsigned short)(words[i] >> 16));
    }
}

// shrunk fp32 [tokens, columns]. A block a segment and column.
extern "C" __global__ void __launch_bounds__(THREADS) sgmv_shrink(const uint4* x, const uint4* a, const int* rows, const int* starts, const int* adapters, float* shrunk, int columns, int units) {
    __shared__ float parts[THREADS / 32][CHUNK];
    const int segment = blockIdx.x / columns, column = blockIdx.x % columns, end = starts[segment + 1];
    const uint4* weights = a + ((long long)adapters[segment] * columns + column) * units;
    for (int first = starts[segment]; first < end; first += CHUNK) {
        float sums[CHUNK] = {};
#pragma unroll 4
        for (int unit = threadIdx.x; unit < units; unit += THREADS) {
            float weight[8], given[8];
            unpack(weights[unit], weight);
#pragma unroll
            for (int n = 0; n < CHUNK; ++n) {
                if (first + n >= end) continue;
                unpack(x[(long long)rows[first + n] * units + unit], given);
#pragma unroll
                for (int i = 0; i < 8; ++i) sums[n] += given[i] * weight[i];
            }
        }
#pragma unroll
        for (int n = 0; n < CHUNK; ++n) {
            for (int lanes = 16; lanes; lanes /= 2) sums[n] += __shfl_xor_sync(~0u, sums[n], lanes);
            if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32][n] = sums[n];
        }
        __syncthreads();
        if (threadIdx.x < CHUNK && first + threadIdx.x < end) {
            float sum = 0;
            for (int warp = 0; warp < THREADS / 32; ++warp) sum += parts[warp][threadIdx.x];
            shrunk[(long long)rows[first + threadIdx.x] * columns + column] = sum;
        }
        __syncthreads();
    }
}

// A block a segment and THREADS columns of y. second, third: where the second and the third layer begin.
extern "C" __global__ void __launch_bounds__(THREADS) sgmv_expand(const float* shrunk, const uint4* b, const int* rows, const int* starts, const int* adapters, unsigned short* y, int columns, int out_features, int second, int third) {
    const int tiles = (out_features + THREADS - 1) / THREADS, segment = blockIdx.x / tiles;
    const int column = blockIdx.x % tiles * THREADS + threadIdx.x;
    if (column >= out_features) return;
    const uint4* weights = b + ((long long)adapters[segment] * out_features + column) * (RANK / 8);
    const int layer = (column >= second) + (column >= third);
    float weight[RANK];
#pragma unroll
    for (int unit = 0; unit < RANK / 8; ++unit) unpack(weights[unit], weight + unit * 8);
    for (int at = starts[segment]; at < starts[segment + 1]; ++at) {
        const int row = rows[at];
        const float* own = shrunk + (long long)row * columns + layer * RANK;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < RANK; ++i) sum += own[i] * weight[i];
        unsigned short& to = y[(long long)row * out_features + column];
        to = narrow(wide(to) + sum);
    }
}
