// Adds the LoRA terms of adapters to products of one input.
//
// y [rows, total]: the products, up to three, concatenated. shrunk [rows, ...]: the input times A of all resident
// adapters. B: [columns, out_features], as in the graph. out = y + shrunk B, with the adapter of each row; y for a row
// without one. A thread computes VEC outputs of ROWS rows: rows of one adapter, such as a prompt's, read B once.
#include "rows.cuh"

#define EXPAND_THREADS 256

#define AT_ONCE 8  // rows of B that are loaded together; ranks are multiples of it

template <int VEC>
__device__ __forceinline__ void load(const unsigned short* from, float* to) {
    if (VEC == 8) load8(from, to);
    else to[0] = number(from[0]);
}

// sums[i] += the next AT_ONCE numbers of shrunk row i times as many rows of B.
template <int VEC, int ROWS>
__device__ __forceinline__ void add(float (*sums)[VEC], const unsigned short* const* shrunk, const unsigned short* b,
                                    int width) {
    float b_values[AT_ONCE][VEC], x_values[ROWS][AT_ONCE];
#pragma unroll
    for (int r = 0; r < AT_ONCE; r++) load<VEC>(b + (long long)r * width, b_values[r]);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++) x_values[i][r] = number(shrunk[i][r]);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++) {
#pragma unroll
            for (int j = 0; j < VEC; j++) sums[i][j] += x_values[i][r] * b_values[r][j];
        }
    }
}

template <int VEC, int ROWS>
__device__ __forceinline__ void expand(const unsigned short* y, int y_step, const unsigned short* shrunk,
                                       int shrunk_step, const void* ids, int wide, const void* of_rows,
                                       int of_rows_wide, const unsigned short* b0, const unsigned short* b1,
                                       const unsigned short* b2, unsigned short* out0, unsigned short* out1,
                                       unsigned short* out2, int first_end, int second_end, int total, int column0,
                                       int column1, int column2, int rank, int rows) {
    int chunks = (total / VEC + EXPAND_THREADS - 1) / EXPAND_THREADS;
    int n = (blockIdx.x % chunks * EXPAND_THREADS + threadIdx.x) * VEC;
    long long first = (long long)(blockIdx.x / chunks) * ROWS;
    next_may_start();
    wait_for_previous();
    if (n >= total) return;
    const unsigned short* b = n < first_end ? b0 : n < second_end ? b1 : b2;
    unsigned short* out = n < first_end ? out0 : n < second_end ? out1 : out2;
    int column = n < first_end ? column0 : n < second_end ? column1 : column2;
    int start = n < first_end ? 0 : n < second_end ? first_end : second_end;
    int width = (n < first_end ? first_end : n < second_end ? second_end : total) - start, output = n - start;
    float sums[ROWS][VEC];
    long long id[ROWS];
    bool same = true;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        long long row = first + i < rows ? first + i : rows - 1;
        load<VEC>(y + row * y_step + n, sums[i]);
        id[i] = integer(ids, wide, of_rows_wide < 0 ? row : integer(of_rows, of_rows_wide, row));
        same = same && id[i] == id[0];
    }
    // Each row accumulates in the same order in either branch, so its bits do not depend on its neighbours.
    if (column >= 0 && same && id[0] >= 0) {
        for (int r = 0; r < rank; r += AT_ONCE) {
            const unsigned short* from[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                long long row = first + i < rows ? first + i : rows - 1;
                from[i] = shrunk + row * shrunk_step + column + id[0] * rank + r;
            }
            add<VEC, ROWS>(sums, from, b + (id[0] * rank + r) * width + output, width);
        }
    } else if (column >= 0 && !same) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (id[i] < 0) continue;
            long long row = first + i < rows ? first + i : rows - 1;
            for (int r = 0; r < rank; r += AT_ONCE) {
                const unsigned short* from = shrunk + row * shrunk_step + column + id[i] * rank + r;
                add<VEC, 1>(sums + i, &from, b + (id[i] * rank + r) * width + output, width);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        if (first + i >= rows) continue;
        unsigned short* at = out + (first + i) * width + output;
        if (VEC == 8) store8(at, sums[i]);
        else at[0] = narrow(sums[i][0]);
    }
}

#define EXPAND(NAME, VEC, ROWS) \
    extern "C" __global__ void __launch_bounds__(EXPAND_THREADS) \
        NAME(const unsigned short* y, int y_step, const unsigned short* shrunk, int shrunk_step, const void* ids, \
             int wide, const void* of_rows, int of_rows_wide, const unsigned short* b0, const unsigned short* b1, \
             const unsigned short* b2, unsigned short* out0, unsigned short* out1, unsigned short* out2, \
             int first_end, int second_end, int total, int column0, int column1, int column2, int rank, int rows) { \
        expand<VEC, ROWS>(y, y_step, shrunk, shrunk_step, ids, wide, of_rows, of_rows_wide, b0, b1, b2, out0, out1, \
                          out2, first_end, second_end, total, column0, column1, column2, rank, rows); \
    }
EXPAND(lora_expand_8_1, 8, 1)
EXPAND(lora_expand_8_8, 8, 8)
EXPAND(lora_expand_1_1, 1, 1)
EXPAND(lora_expand_1_8, 1, 8)
