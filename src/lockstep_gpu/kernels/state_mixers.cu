// Token mixers with a state, float32, in the row of a request. The sizes of a mixer are macros (state_kernels.py). A
// block takes some columns of a request's new tokens, one token after another, so a request has the same bits however
// its prompt is chunked, and in any batch. KIND: the type of inputs and outputs, 0 for fp32 (numbers.cuh).
#include "rows.cuh"

#ifndef WIDTH  // for editors and checks of the syntax
#define WIDTH 0
#define WIDE 0
#define THREADS 128
#define KEY_HEADS 2
#define VALUE_HEADS 4
#define KEY_DIM 16
#define VALUE_DIM 20
#define BETA 1
#define LANES 4
#endif

#if KIND
typedef unsigned short Element;
__device__ __forceinline__ float wide(Element value) { return number(value); }
__device__ __forceinline__ Element stored(float value) { return narrow(value); }
#else
typedef float Element;
__device__ __forceinline__ float wide(Element value) { return value; }
__device__ __forceinline__ Element stored(float value) { return value; }
#endif

struct Span {
    int first, last, row, goes_on;
};  // tokens of a request, the row of its state, whether it has one yet

// single: request i is token i; else its tokens are bounds[2 i] to bounds[2 i + 1] - 1.
__device__ __forceinline__ Span span_of(int request, const int* bounds, int single, const int* rows,
                                        const void* positions) {
    Span span;
    span.first = single ? request : bounds[2 * request];
    span.last = single ? request + 1 : bounds[2 * request + 1];
    span.row = rows[span.first];
    span.goes_on = integer(positions, WIDE, span.first) > 0;
    return span;
}

#if WIDTH
// Writes each token with the WIDTH - 1 tokens before it, the oldest first. state: [WIDTH - 1, SIZE].
extern "C" __global__ void __launch_bounds__(THREADS)
    token_window(const Element* value, Element* out, float* states, const int* bounds, int single, const int* rows,
                 const void* positions) {
    constexpr int BLOCKS = (SIZE + THREADS - 1) / THREADS;
    const Span span = span_of(blockIdx.x / BLOCKS, bounds, single, rows, positions);
    const int column = blockIdx.x % BLOCKS * THREADS + threadIdx.x;
    if (span.row < 0 || column >= SIZE) return;
    float* state = states + (long long)span.row * (WIDTH - 1) * SIZE + column;
    Element window[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH - 1; ++i) window[i] = stored(span.goes_on ? state[i * SIZE] : 0);
    for (int token = span.first; token < span.last; ++token) {
        window[WIDTH - 1] = value[(long long)token * SIZE + column];
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) out[((long long)token * WIDTH + i) * SIZE + column] = window[i];
#pragma unroll
        for (int i = 0; i < WIDTH - 1; ++i) window[i] = window[i + 1];
    }
#pragma unroll
    for (int i = 0; i < WIDTH - 1; ++i) state[i * SIZE] = wide(window[i]);
}
#else
// The gated delta rule, or without BETA linear attention with decay: export/state_mixer.py, Recurrence. state
// [VALUE_HEADS, KEY_DIM, VALUE_DIM], of which LANES threads have a column, a part of its numbers each.
constexpr int PART = (KEY_DIM + LANES - 1) / LANES;

__device__ __forceinline__ void load_part(float (&to)[PART], const Element* head, int lane) {
#if KIND
    if (KEY_DIM % (8 * LANES) == 0) {
#pragma unroll
        for (int e = 0; e < PART / 8 * 8; e += 8) load8(head + lane * PART + e, to + e);
        return;
    }
#endif
#pragma unroll
    for (int e = 0; e < PART; ++e) to[e] = lane * PART + e < KEY_DIM ? wide(head[lane * PART + e]) : 0;
}

__device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
    for (int mask = LANES / 2; mask; mask /= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    recurrence(const Element* query, const Element* key, const Element* value, const Element* decay,
               const Element* beta, Element* out, float* states, const int* bounds, int single, const int* rows,
               const void* positions) {
    constexpr int COLUMNS = VALUE_HEADS * VALUE_DIM, OWN = THREADS / LANES, BLOCKS = (COLUMNS + OWN - 1) / OWN;
    const Span span = span_of(blockIdx.x / BLOCKS, bounds, single, rows, positions);
    if (span.row < 0) return;
    const int lane = threadIdx.x % LANES, place = blockIdx.x % BLOCKS * OWN + threadIdx.x / LANES;
    // Threads after the last column compute it again, because all lanes of a warp take part in its shuffles.
    const int column = place < COLUMNS ? place : COLUMNS - 1, head = column / VALUE_DIM,
              key_head = head / (VALUE_HEADS / KEY_HEADS);
    float* at = states + ((long long)span.row * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM) + column % VALUE_DIM;
    float state[PART], k[PART], q[PART];
#pragma unroll
    for (int e = 0; e < PART; ++e)
        state[e] = span.goes_on && lane * PART + e < KEY_DIM ? at[(lane * PART + e) * VALUE_DIM] : 0;
    for (int token = span.first; token < span.last; ++token) {
        load_part(k, key + ((long long)token * KEY_HEADS + key_head) * KEY_DIM, lane);
        load_part(q, query + ((long long)token * KEY_HEADS + key_head) * KEY_DIM, lane);
        // The state stays in registers from token to token: memory is read and written once a chunk.
        const float kept = expf(wide(decay[(long long)token * VALUE_HEADS + head]));
        float v = wide(value[(long long)token * COLUMNS + column]);
#pragma unroll
        for (int e = 0; e < PART; ++e) state[e] *= kept;
#if BETA
        float predicted = 0;
#pragma unroll
        for (int e = 0; e < PART; ++e) predicted += k[e] * state[e];
        v = (v - sum_of_lanes(predicted)) * wide(beta[(long long)token * VALUE_HEADS + head]);
#endif
        float sum = 0;
#pragma unroll
        for (int e = 0; e < PART; ++e) {
            state[e] += k[e] * v;
            sum += q[e] * state[e];
        }
        sum = sum_of_lanes(sum);
        if (lane == 0 && place < COLUMNS) out[(long long)token * COLUMNS + column] = stored(sum);
    }
#pragma unroll
    for (int e = 0; e < PART; ++e)
        if (place < COLUMNS && lane * PART + e < KEY_DIM) at[(lane * PART + e) * VALUE_DIM] = state[e];
}
#endif
