// Numbers of 16 bits as float32 and back. KIND is the type of a model's activations and weights: 1 fp16, 2 bf16, in the
// files that say so 0, float32.
#pragma once

#ifndef KIND
#define KIND 1
#endif
#if KIND == 1
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif

typedef unsigned int u32;
typedef unsigned long long u64;

// Vectors, which one instruction loads and stores.
struct alignas(16) Vec8 {
    unsigned short v[8];
};
struct alignas(16) Vec4 {
    float v[4];
};
struct alignas(16) Words4 {
    u32 w[4];
};
struct alignas(8) Words2 {
    u32 w[2];
};

#ifndef ON_HOST  // where the test has its own
__device__ __forceinline__ float number_of_half(unsigned short bits) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
    return r;
}
__device__ __forceinline__ float number_of_bfloat16(unsigned short bits) {
    return __uint_as_float((unsigned)bits << 16);
}
__device__ __forceinline__ unsigned short half_of(float value) {
    unsigned short r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(value));
    return r;
}
__device__ __forceinline__ unsigned short bfloat16_of(float value) {
    unsigned short r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(value));
    return r;
}
__device__ __forceinline__ u32 hsub2(u32 a, u32 b) {  // two numbers of fp16 each
    u32 r;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
#endif
__device__ __forceinline__ float number(unsigned short bits) {
    return KIND == 1 ? number_of_half(bits) : number_of_bfloat16(bits);
}
__device__ __forceinline__ unsigned short narrow(float value) {
    return KIND == 1 ? half_of(value) : bfloat16_of(value);
}
__device__ __forceinline__ long long integer(const void* values, int wide, long long i) {
    return wide ? ((const long long*)values)[i] : ((const int*)values)[i];
}
