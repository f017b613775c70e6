// Shared by the attention kernels, which are compiled for an `AttentionKernelSpec` (kernel_spec.py), by macros.
#pragma once
#include "numbers.cuh"

#ifndef DIM  // for editors and checks of the syntax, which compile without the options of a spec
#define QK_KIND KIND
#define WIDE 0
#define KV_HEADS 2
#define GROUP 4
#define HEADS 4
#define DIM 128
#define VALUE_DIM 128
#define WINDOW 0
#define SINKS 0
#define FP8 0
#define SEPARATE 0
#define SOFTCAP 0
#define PAGE 64
#define THREADS 128
#endif

#if KIND == 0
typedef float Bits;
#else
typedef unsigned short Bits;  // a number of KIND
#endif

#if QK_KIND == 0  // of queries and keys before RoPE
typedef float QK;
#else
typedef Bits QK;
#endif

__device__ __forceinline__ float number(float value) { return value; }
#ifndef ON_HOST  // where the test has its own
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned result;
    asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}
#endif

// RoPE of one element, by intrinsics that leave the compiler no choice of roundings, so that all kernels cache the same
// numbers.
__device__ __forceinline__ float rope(float first, float first_weight, float second, float second_weight) {
    return __fmaf_rn(second, second_weight, __fmul_rn(first, first_weight));
}
