// What few_rows.cu and fp8_products.cu share: the shape of a block, its shared memory, and instructions of tensor
// cores.
#pragma once
#include "overlap.cuh"

#define OUTPUTS 32
#define STAGES 4
#define THREADS 128
#define PIECES 32  // of 16 bytes, in the row of a stage
#ifndef FACTORS
#define FACTORS TYPE  // what tensor cores multiply
#endif

#ifndef ON_HOST  // where the test has its own
extern __shared__ __align__(128) unsigned char memory[];
__device__ __forceinline__ u32 shared_memory() { return (u32)__cvta_generic_to_shared(memory); }
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool in) {  // 16 bytes; zeros where not `in`
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :
                 : "r"(to), "l"(from), "r"(in ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" : : : "memory"); }
__device__ __forceinline__ void wait_for_stage() {
    asm volatile("cp.async.wait_group %0;" : : "n"(STAGES - 2) : "memory");
}
__device__ __forceinline__ void load_matrices(u32 from, u32* r) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
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

// Where 16 bytes of a row lie in shared memory: those of 8 rows that ldmatrix reads at once are in different banks.
__device__ __forceinline__ int place(int row, int piece) {
    return (row * PIECES + ((piece & ~7) | ((piece ^ row) & 7))) * 16;
}
