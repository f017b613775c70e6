// What kernels of rows share: loops over a row, accumulation over it, loads and stores of 8 numbers.
#pragma once
#include "overlap.cuh"

#ifndef ON_HOST  // where the test has its own
// The pieces of a row, or of a part of it, that a thread has.
#define EACH(v, count) for (int v = chunk * THREADS + threadIdx.x; v < count; v += BLOCKS * THREADS)
#define EACH_GROUP(group, count) for (int group = threadIdx.x / 32; group < count; group += THREADS / 32)
#define EACH_OF_GROUP(v, count) for (int v = threadIdx.x % 32; v < count; v += 32)
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
    return value;
}
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, mask));
    return value;
}
template <int WARPS>
__device__ __forceinline__ float block_sum(float value) {
    __shared__ float sums[WARPS];
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) total += sums[warp];
    __syncthreads();
    return total;
}
#endif

__device__ __forceinline__ void load8(const unsigned short* __restrict__ from, float* to) {
    Vec8 vec = *(const Vec8*)from;
#pragma unroll
    for (int j = 0; j < 8; j++) to[j] = number(vec.v[j]);
}
__device__ __forceinline__ void store8(unsigned short* to, const float* from) {
    Vec8 vec;
#pragma unroll
    for (int j = 0; j < 8; j++) vec.v[j] = narrow(from[j]);
    *(Vec8*)to = vec;
}
// Of rows that are float32 already: the residual stream.
__device__ __forceinline__ float number(float value) { return value; }
__device__ __forceinline__ void load8(const float* __restrict__ from, float* to) {
    Vec4 vec[2] = {((const Vec4*)from)[0], ((const Vec4*)from)[1]};
#pragma unroll
    for (int j = 0; j < 8; j++) to[j] = vec[j / 4].v[j % 4];
}
__device__ __forceinline__ void store8(float* to, const float* from) {
    Vec4 vec[2];
#pragma unroll
    for (int j = 0; j < 8; j++) vec[j / 4].v[j % 4] = from[j];
    ((Vec4*)to)[0] = vec[0];
    ((Vec4*)to)[1] = vec[1];
}
