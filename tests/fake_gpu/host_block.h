// CUDA C++ of a kernel as C++ for the host: the threads of a block take turns, one runs until it waits for others. Blocks run one after another.
//
// What it does not imitate: memory that several blocks share, asm, and the last bits of expf and log1pf.
#undef _FORTIFY_SOURCE  // its longjmp knows one stack
#include <math.h>
#include <setjmp.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(threads)

namespace host_block {
#ifndef BLOCK_THREADS
#define BLOCK_THREADS 1024
#endif
constexpr int COUNT = BLOCK_THREADS, STACK = 1 << 15;
struct Thread {
    ucontext_t first;
    jmp_buf at;
    bool begun, over;
};
Thread threads[COUNT];
int current;
jmp_buf scheduler;
ucontext_t home;
std::function<void()> work;
unsigned long long exchanged[COUNT];
struct Barrier {
    int size, arrived = 0, round = 0;
};
Barrier block{COUNT}, warps[COUNT / 32];

inline void turn() {
    if (!_setjmp(threads[current].at)) _longjmp(scheduler, 1);
}
inline void wait(Barrier& barrier) {
    const int round = barrier.round;
    if (++barrier.arrived == barrier.size) {
        barrier.arrived = 0;
        ++barrier.round;
    } else
        while (barrier.round == round) turn();
}
inline void body() {
    work();
    threads[current].over = true;
    _longjmp(scheduler, 1);
}
}  // namespace host_block

struct Index { int x, y, z; };
static Index threadIdx, blockIdx, gridDim;

inline void __syncthreads() { const Index own = threadIdx; host_block::wait(host_block::block); threadIdx = own; }

template <typename T> T exchange(T value, int from) {
    const int self = threadIdx.x;
    memcpy(&host_block::exchanged[self], &value, sizeof(T));
    host_block::wait(host_block::warps[self / 32]);
    T found;
    memcpy(&found, &host_block::exchanged[from / 32 == self / 32 && from >= 0 ? from : self], sizeof(T));
    host_block::wait(host_block::warps[self / 32]);
    threadIdx.x = self;
    return found;
}
template <typename T> T __shfl_sync(unsigned, T value, int lane) { return exchange(value, threadIdx.x / 32 * 32 + lane); }
template <typename T> T __shfl_xor_sync(unsigned, T value, int mask) { return exchange(value, threadIdx.x ^ mask); }
template <typename T> T __shfl_up_sync(unsigned, T value, int offset) { return exchange(value, threadIdx.x - offset); }
template <typename T> T atomicAdd(T* at, T value) { const T before = *at; *at += value; return before; }

template <typename To, typename From> To as(From value) { To to; memcpy(&to, &value, sizeof(To)); return to; }
inline unsigned __float_as_uint(float value) { return as<unsigned>(value); }
inline float __uint_as_float(unsigned value) { return as<float>(value); }
inline float __int_as_float(int value) { return as<float>(value); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long from = a | (unsigned long long)b << 32;
    unsigned long long result = 0;
    for (int n = 0; n < 4; ++n) result |= (from >> (selector >> 4 * n & 7) * 8 & 0xff) << 8 * n;
    return result;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned __int128)a * b >> 64; }

// Runs `work` as blocks 0 to `blocks`-1 of COUNT threads. static: of inline functions libraries of one process share what is static inside.
static void launch(int blocks, std::function<void()> work) {
    using namespace host_block;
    static std::vector<char> stacks((size_t)COUNT * STACK);
    host_block::work = work;
    for (Barrier& warp : warps) warp.size = 32;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        for (int n = 0; n < COUNT; ++n) {
            threads[n].begun = threads[n].over = false;
            getcontext(&threads[n].first);
            threads[n].first.uc_stack.ss_sp = &stacks[(size_t)n * STACK];
            threads[n].first.uc_stack.ss_size = STACK;
            threads[n].first.uc_link = &home;
            makecontext(&threads[n].first, body, 0);
        }
        for (volatile int left = COUNT; left;) {
            left = 0;
            for (volatile int n = 0; n < COUNT; n = n + 1) {
                if (threads[n].over) continue;
                left = left + 1;
                threadIdx.x = current = n;
                if (_setjmp(scheduler)) continue;
                if (threads[n].begun) _longjmp(threads[n].at, 1);
                threads[n].begun = true;
                setcontext(&threads[n].first);
            }
        }
    }
}
