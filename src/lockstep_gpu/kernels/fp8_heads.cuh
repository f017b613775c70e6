// Keys and values of a head as e4m3 with a scale.
//
// A page of a KV head is PAGE times its numbers, one byte each, then PAGE scales. A scale is a power of two, stored as
// the high byte of its fp16: the smallest for which no code is above 448, from 2^-22 to 2^7. So a code times its scale
// is a number of fp16, and the product rounds nothing. A head with a NaN or an infinity has a scale of NaN. Numbers
// above 57344 are clamped to it.
#pragma once
#include "attention.cuh"

typedef unsigned char Code;

constexpr __host__ __device__ int head_bytes(int dim) { return PAGE * (dim + 1); }

// The exponent of the scale 2^(exponent - 15). max_bits: the fp16 bits of the largest magnitude of the head.
__device__ __forceinline__ unsigned scale_exponent(unsigned max_bits) {
    const unsigned exponent = (max_bits + 0xff) >> 10;  // one more where the magnitude's bits begin with more than 1.75
    return exponent < 1 ? 1 : exponent > 30 ? 30 : exponent;
}
__device__ __forceinline__ Code scale_code(unsigned max_bits) {
    return max_bits >= 0x7c00 ? 0x7e : scale_exponent(max_bits) << 2;
}

// To nearest, ties to even, and to the largest where it is beyond.
__device__ __forceinline__ Code e4m3_code(Bits value, unsigned exponent) {
    const unsigned bits = __float_as_uint(number_of_half(value) * __uint_as_float((142 - exponent) << 23));
    const unsigned magnitude = bits & 0x7fffffff;
    unsigned code = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (112 << 3);
    // Below 2^-14 codes are in steps of 2^-17, which are those of a float32 at 64.
    if (magnitude < 0x38800000) code = __float_as_uint(__uint_as_float(magnitude) + 64.0f) & 0xff;
    return (code < 0x7e ? code : 0x7e) | (bits >> 24 & 0x80);
}

// Codes 2 * half and 2 * half + 1 of a word, as fp16; times CODE_UNIT and the scale they are the cached numbers.
#if !defined ON_HOST && __CUDA_ARCH__ >= 890
#define CODE_UNIT 0.00390625f
__device__ __forceinline__ unsigned e4m3_to_half2(unsigned codes, int half) {
    unsigned result;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"((unsigned short)(half ? codes >> 16 : codes)));
    return result;
}
#else  // over 256: bits that are moved
#define CODE_UNIT 1.0f
__device__ __forceinline__ unsigned e4m3_to_half2(unsigned codes, int half) {
    const unsigned spread = __byte_perm(codes, 0, half ? 0x3424 : 0x1404);
    return (spread >> 1 & 0x3f803f80) | (spread & 0x80008000);
}
#endif

// A warp writes a head of SIZE numbers; read(i): the bits of number i.
template <int SIZE, typename Read>
__device__ __forceinline__ void encode_head(Read read, int lane, Code* codes, Code* scale) {
    constexpr int ROUNDS = (SIZE + 31) / 32;
    Bits numbers[ROUNDS];
    unsigned max_bits = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        numbers[r] = r * 32 + lane < SIZE ? read(r * 32 + lane) : 0;
        if ((numbers[r] & 0x7fffu) > max_bits) max_bits = numbers[r] & 0x7fff;
    }
#pragma unroll
    for (int step = 16; step; step /= 2) {
        const unsigned other = __shfl_xor_sync(~0u, max_bits, step);
        if (other > max_bits) max_bits = other;
    }
    const unsigned exponent = scale_exponent(max_bits);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r)
        if (r * 32 + lane < SIZE) codes[r * 32 + lane] = e4m3_code(numbers[r], exponent);
    if (lane == 0) *scale = scale_code(max_bits);
}
