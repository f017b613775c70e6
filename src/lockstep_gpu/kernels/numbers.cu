// Numbers of 16 bits as float32 and back. KIND is the type of a model's activations and weights: 1 fp16, 2 bf16.
#ifndef KIND
#define KIND 1
#endif
#if KIND == 1
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif

#ifndef ON_HOST  // where the test has its own
__device__ __forceinline__ float number_of_half(unsigned short bits) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
    return r;
}
__device__ __forceinline__ float number_of_bfloat16(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }
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
#endif
__device__ __forceinline__ float number(unsigned short bits) { return KIND == 1 ? number_of_half(bits) : number_of_bfloat16(bits); }
__device__ __forceinline__ unsigned short narrow(float value) { return KIND == 1 ? half_of(value) : bfloat16_of(value); }
