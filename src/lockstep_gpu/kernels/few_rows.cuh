// The shape of a block of few_rows.cu and fp8_products.cu.
#pragma once
#include "tensor_cores.cuh"

#define OUTPUTS 32
#define STAGES 4
#define THREADS 128
#define PIECES 32  // of 16 bytes, in the row of a stage

// The offset in shared memory of a piece of a row. Swizzled: the pieces of 8 rows that ldmatrix reads at once are in
// different banks.
__device__ __forceinline__ int swizzle(int row, int piece) {
    return (row * PIECES + ((piece & ~7) | ((piece ^ row) & 7))) * 16;
}
