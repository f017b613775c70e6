// Kernels for `cuda.Launch.overlaps`: one may be scheduled while the previous one runs, so it must not touch what that
// one writes or reads before `wait_for_previous`.
#pragma once
#include "numbers.cuh"

#ifndef ON_HOST  // where the test has its own
__device__ __forceinline__ void next_may_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}
#endif
