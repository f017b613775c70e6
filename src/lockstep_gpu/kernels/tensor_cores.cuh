// What the GEMMs on tensor cores share: asynchronous copies through stages of shared memory, ldmatrix and mma, and the
// arrays that results go to.
#pragma once
#include "outputs.cuh"

#ifndef FACTORS
#define FACTORS TYPE  // what tensor cores multiply
#endif

#ifndef ON_HOST  // where the test has its own
extern __shared__ __align__(128) unsigned char memory[];
__device__ __forceinline__ u32 shared_memory() { return (u32)__cvta_generic_to_shared(memory); }
__device__ __forceinline__ void cp_async(u32 to, const void* from, bool in) {  // 16 bytes; zeros where not `in`
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :
                 : "r"(to), "l"(from), "r"(in ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" : : : "memory"); }
template <int GROUPS>
__device__ __forceinline__ void cp_async_wait() {  // for all but the last GROUPS groups
    asm volatile("cp.async.wait_group %0;" : : "n"(GROUPS) : "memory");
}
__device__ __forceinline__ void ldmatrix(u32 from, u32* r) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from));
}
__device__ __forceinline__ void ldmatrix_trans(u32 from, u32* r) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from));
}
__device__ __forceinline__ void mma(float* d, const u32* a, const u32* b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." FACTORS "." FACTORS
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif
