// Rows of KIND as e4m3: codes are the numbers over the row's step, its largest magnitude over 448, to nearest, ties to
// even. The step of a row of zeros is TINY; NaN and infinity become NaN.
#pragma once
#include "numbers.cuh"

#define LARGEST 448.0f
#define TINY 1e-30f

typedef Vec8 Halves;  // in the kernels of engines
struct alignas(8) Codes {
    unsigned short v[4];
};  // two numbers each

#ifndef ON_HOST  // where the test has its own
__device__ __forceinline__ unsigned short codes_of(float first, float second) {
    unsigned short r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(second), "f"(first));
    return r;
}
template <int WARPS>
__device__ __forceinline__ u32 block_max(u32 value) {
    __shared__ u32 largest[WARPS];
    value = __reduce_max_sync(0xffffffffu, value);
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = value;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) value = max(value, largest[warp]);
    __syncthreads();
    return value;
}
#endif

// The bits of the largest magnitude of eight, and of `most`: they are ordered as magnitudes are.
__device__ __forceinline__ u32 largest_of(const Vec8& vec, u32 bits) {
#pragma unroll
    for (int j = 0; j < 8; j++) bits = vec.v[j] % 0x8000u > bits ? vec.v[j] % 0x8000u : bits;
    return bits;
}
__device__ __forceinline__ float step_of(u32 bits) {
    float step = number((unsigned short)bits) / LARGEST;
    return step < TINY ? TINY : step;
}
__device__ __forceinline__ Codes encoded(const Vec8& vec, float step) {
    Codes codes;
#pragma unroll
    for (int j = 0; j < 8; j += 2) codes.v[j / 2] = codes_of(number(vec.v[j]) / step, number(vec.v[j + 1]) / step);
    return codes;
}
