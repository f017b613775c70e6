// How kernels read RoPE tables (kernel_spec.DeviceRopeTables): DIM elements a head; SEPARATE: queries and keys have
// their own.
#pragma once
#include "attention.cuh"

// Where a position's weights begin.
__device__ __forceinline__ long long rope_weights_at(long long position, bool is_key) {
    return (SEPARATE ? 2 * position + is_key : position) * DIM;
}
// The two elements that RoPE combines to element j.
__device__ __forceinline__ int first_element(const int* partner, bool is_key, int j) {
    return SEPARATE ? partner[2 * is_key * DIM + j] : j;
}
__device__ __forceinline__ int second_element_at(bool is_key, int j) {
    return (SEPARATE ? 2 * is_key + 1 : 0) * DIM + j;
}
__device__ __forceinline__ int second_element(const int* partner, bool is_key, int j) {
    return partner[second_element_at(is_key, j)];
}
