// What the attention kernels have in PTX, for the host: functions of attention.cuh and paged_decode.cu, behind host_block.h and host_numbers.h. KIND is fp16.
#include <type_traits>

#define ON_HOST
#define __host__
#define __align__(n) __attribute__((aligned(n)))
struct uint2 { unsigned x, y; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
template <typename X, typename Y> std::common_type_t<X, Y> min(X x, Y y) { std::common_type_t<X, Y> a = x, b = y; return a < b ? a : b; }
template <typename X, typename Y> std::common_type_t<X, Y> max(X x, Y y) { std::common_type_t<X, Y> a = x, b = y; return a > b ? a : b; }
inline void __syncwarp() { exchange(0, threadIdx.x); }

inline unsigned pack(float low, float high) {
    return as<unsigned short>((_Float16)low) | (unsigned)as<unsigned short>((_Float16)high) << 16;
}
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
#include "attention.cuh"

template <typename T> T load_relaxed(const T* from) { return *from; }
template <typename T> T load_constant(const T* from) { return *from; }
template <typename T> T load_cg(const T* from) { return *from; }
inline Words4 loaded(const void* from, bool in, int bytes) {
    Words4 piece = {{0, 0, 0, 0}};
    if (in) memcpy(&piece, from, bytes);
    return piece;
}
inline Words4 load_16(const void* from, bool in) { return loaded(from, in, 16); }
inline Words4 load_8(const void* from, bool in) { return loaded(from, in, 8); }
inline int atomic_increment(int* counter) { return (*counter)++; }
inline float exp2_approx(float x) { return exp2f(x); }
inline float low_of(unsigned pair) { return number_of_half(pair & 0xffff); }
inline float high_of(unsigned pair) { return number_of_half(pair >> 16); }
inline unsigned hmul2(unsigned pair, unsigned other) { return pack(low_of(pair) * low_of(other), high_of(pair) * high_of(other)); }
inline void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const int base = threadIdx.x / 32 * 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const unsigned rows[4] = {a0, a1, a2, a3}, columns[2] = {b0, b1};
    for (int k = 0; k < 4; ++k)
        for (int half = 0; half < 2; ++half) {
            const unsigned row = exchange(rows[2 * half], base + 4 * g + k), below = exchange(rows[2 * half + 1], base + 4 * g + k);
            for (int e = 0; e < 2; ++e) {
                const unsigned column = exchange(columns[half], base + 4 * (2 * t + e) + k);
                c[e] += low_of(row) * low_of(column) + high_of(row) * high_of(column);
                c[2 + e] += low_of(below) * low_of(column) + high_of(below) * high_of(column);
            }
        }
}
