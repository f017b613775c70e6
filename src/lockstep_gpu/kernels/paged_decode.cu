// Paged decode attention: RoPE, the write to the cache and attention in one launch.
#include "fp8_heads.cuh"
#include "rope_tables.cuh"

#ifndef BY_ROW
#define BY_ROW 0
#endif
#define INFINITE __int_as_float(0x7f800000)

#ifndef ON_HOST  // where the test has its own
// Loads that the compiler does not move: those that are issued together cost one latency. It moves plain loads to their
// first use, and constant ones (.nc) even past a branch that may end the block; relaxed ones stay before it.
#define LOADS(T, TYPE, REGISTER) \
    __device__ __forceinline__ T load_relaxed(const T* from) { \
        T value; \
        asm volatile("ld.relaxed.gpu.global." TYPE " %0, [%1];" \
                     : REGISTER(value) \
                     : "l"(__cvta_generic_to_global(from))); \
        return value; \
    } \
    __device__ __forceinline__ T load_constant(const T* from) { \
        T value; \
        asm volatile("ld.global.nc." TYPE " %0, [%1];" : REGISTER(value) : "l"(__cvta_generic_to_global(from))); \
        return value; \
    }
LOADS(int, "s32", "=r")
LOADS(float, "f32", "=f")
LOADS(unsigned short, "u16", "=h")

// 16 bytes of the cache, which are read once; zeros where not `in`.
__device__ __forceinline__ Words4 load_16(const void* from, bool in) {
    Words4 piece;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
        "@p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(piece.w[0]), "=&r"(piece.w[1]), "=&r"(piece.w[2]), "=&r"(piece.w[3])
        : "l"(__cvta_generic_to_global(from)), "r"((int)in));
    return piece;
}
__device__ __forceinline__ Words4 load_8(const void* from, bool in) {  // bytes; the rest is zeros
    Words4 piece = {{0, 0, 0, 0}};
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.s32 p, %3, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\n@p "
        "ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];\n}"
        : "=&r"(piece.w[0]), "=&r"(piece.w[1])
        : "l"(__cvta_generic_to_global(from)), "r"((int)in));
    return piece;
}

// Loads of what other blocks have written: they bypass the L1 cache.
__device__ __forceinline__ float load_cg(const float* from) { return __ldcg(from); }
__device__ __forceinline__ Vec4 load_cg(const Vec4* from) {
    float4 value = __ldcg((const float4*)from);
    return Vec4{{value.x, value.y, value.z, value.w}};
}

// Adds 1, returns the value before. Release and acquire: the last block that is counted sees what all others wrote.
__device__ __forceinline__ int atomic_increment(int* counter) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(counter))
                 : "memory");
    return before;
}

__device__ __forceinline__ float exp2_approx(float x) {  // of 2
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// c [16, 8] += a [16, 16] b [16, 8]. Lane 4g + t has c[g][2t, 2t + 1] and c[g + 8][2t, 2t + 1]; in a0 to a3 of a the
// pairs [g][2t], [g + 8][2t], [g][2t + 8], [g + 8][2t + 8] and their right neighbours; in b0, b1 of b the pairs
// [2t][g], [2t + 8][g] and their lower neighbours.
__device__ __forceinline__ void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                    unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned hmul2(unsigned pair, unsigned other) {  // two of fp16 each
    unsigned result;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(other));
    return result;
}
#endif

// A block: a request, a KV head with up to HEADS of its query heads (`chunk`), some splits of the row. A unit is 16
// tokens, which a warp computes at once; units are counted from the first one in the window. A split is LEAST
// contiguous units, or twice, four times ... as many, so that there are at most MOST splits: the splits depend on the
// row alone. Unit n of a split goes to warp n % WARPS; the warps of a split are combined, then the splits in order. So
// a row has the same bits however its splits are shared between blocks, and in any batch.
//
// In a warp, lane 4g + t. Scores are queries (8 rows; the other 8 are unused) times keys: lanes read 16 bytes of the
// key of token g and of token g + 8, dims 8t to 8t + 7 of each 32, or of codes 16t to 16t + 15 of each 64. So the k-th
// dim of a product is another one than in memory, but the same one in queries and keys, which does not change the sum.
// Outputs are values (rows: dims) times weights (columns: heads): weights are in the registers in which the scores'
// product left them, and lanes read 16 bytes of the values of tokens 2t, 2t + 1, 2t + 8, 2t + 9, of dims 8g to 8g + 7
// of each 64 (of codes 16g to 16g + 15 of each 128). The cache is never staged in shared memory: no byte of it is used
// by two warps.
constexpr int WARPS = THREADS / 32, UNIT = 16, LEAST = 2 * WARPS, MOST = 16;
constexpr int CHUNKS = (GROUP + HEADS - 1) / HEADS;  // blocks that share a KV head; HEADS: query heads of a block
#if FP8
typedef Code Cached;
#else
typedef Bits Cached;
#endif
constexpr int LOADED = FP8 && DIM % 16 == 0 && VALUE_DIM % 16 == 0 ? 16 : 8;  // numbers of a load
constexpr int EIGHTS = LOADED / 8;                                            // a piece is eight numbers
constexpr int KEY_LOADS = (DIM + 4 * LOADED - 1) / (4 * LOADED);              // of a lane, for each of its two tokens
constexpr int VALUE_LOADS = (VALUE_DIM + 8 * LOADED - 1) / (8 * LOADED);      // likewise, of four tokens
constexpr int KEY_PIECES = KEY_LOADS * EIGHTS, VALUE_PIECES = VALUE_LOADS * EIGHTS;
// Elements of a KV head in a page: an fp8 head has a scale for each token after its numbers.
constexpr int KEY_HEAD = PAGE * (DIM + FP8), VALUE_HEAD = PAGE * (VALUE_DIM + FP8);
constexpr int LINE = DIM + 8;                 // of a head in shared memory, so that lanes do not meet in a bank
constexpr int ROPE_SIZE = (HEADS + 1) * DIM;  // numbers that a block applies RoPE to
constexpr int ROUNDS = (ROPE_SIZE + THREADS - 1) / THREADS;
constexpr int ITEMS = HEADS * VALUE_DIM / 4;  // of four outputs of a block
constexpr int OWN = (ITEMS + THREADS - 1) / THREADS;
// The cap of scores times log2(e), as scores are exponents of 2. SOFTCAP: the bits of a float; 0: no cap.
#define SCORE_CAP (__uint_as_float(SOFTCAP) * 1.44269504f)
constexpr int QUERY_DIM = DIM + SINKS;  // of a head in the query: a sink is its last element
constexpr float LOWEST = -1e30f;        // finite, so that a difference of two is a number

__device__ __forceinline__ int page_of(const int* row_table, int unit, int pages_per_row) {
    return load_relaxed(row_table + min(unit / (PAGE / UNIT), pages_per_row - 1));
}

// A load of a lane: 16 bytes; for codes of heads whose size 16 does not divide 8 bytes, padded with zeros.
__device__ __forceinline__ Words4 load_cached(const Cached* from, bool in) {
    return LOADED * sizeof(Cached) == 16 ? load_16(from, in) : load_8(from, in);
}
__device__ __forceinline__ Words4 piece_at(const Cached* from) {
    if (LOADED * sizeof(Cached) == 16) return *(const Words4*)from;
    const uint2 words = *(const uint2*)from;
    return Words4{{words.x, words.y, 0, 0}};
}
__device__ __forceinline__ void put_piece(Cached* to, const Words4& piece) {
    if (LOADED * sizeof(Cached) == 16) *(Words4*)to = piece;
    else *(uint2*)to = make_uint2(piece.w[0], piece.w[1]);
}

// The first dim of a lane's piece n of a key, and of its piece c of a value.
__device__ __forceinline__ int key_dim(int n, int t) { return (n / EIGHTS * 4 + t) * LOADED + n % EIGHTS * 8; }
__device__ __forceinline__ int value_dim(int c, int g) { return (c / EIGHTS * 8 + g) * LOADED + c % EIGHTS * 8; }

// A lane's share of tokens base to base + 15: those from `window_start` on and before the new one, which is in shared
// memory.
__device__ __forceinline__ void load_keys(Words4 (&out)[2][KEY_LOADS], const Cached* k_cache, int page, int kv,
                                          int base, int window_start, int position, int g, int t) {
    const Cached* at =
        k_cache + ((long long)page * KV_HEADS + kv) * KEY_HEAD + ((base & (PAGE - 1)) + g) * DIM + LOADED * t;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int token = base + 8 * i + g;
        const bool in = token >= window_start && token < position;
#pragma unroll
        for (int n = 0; n < KEY_LOADS; ++n)
            out[i][n] = load_cached(at + 8 * i * DIM + 4 * LOADED * n, in && LOADED * (4 * n + t) < DIM);
    }
}

__device__ __forceinline__ void load_values(Words4 (&out)[VALUE_LOADS][4], const Cached* v_cache, int page, int kv,
                                            int base, int window_start, int position, int g, int t) {
    const Cached* at = v_cache + ((long long)page * KV_HEADS + kv) * VALUE_HEAD +
                       ((base & (PAGE - 1)) + 2 * t) * VALUE_DIM + LOADED * g;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int offset = i / 2 * 8 + i % 2, token = base + 2 * t + offset;
        const bool in = token >= window_start && token < position;
#pragma unroll
        for (int c = 0; c < VALUE_LOADS; ++c)
            out[c][i] = load_cached(at + offset * VALUE_DIM + 8 * LOADED * c, in && LOADED * (8 * c + g) < VALUE_DIM);
    }
}

#if FP8
// The scales of the tokens base + 2t and base + 2t + 1, then those 8 further: keys' and values', two in 16 bits.
__device__ __forceinline__ void load_scales(unsigned short (&out)[4], const Code* k_cache, const Code* v_cache,
                                            int page, int kv, int base, int t) {
    const long long head = (long long)page * KV_HEADS + kv;
    const int at = (base & (PAGE - 1)) + 2 * t;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        out[i] = load_constant((const unsigned short*)(k_cache + head * KEY_HEAD + PAGE * DIM + at + 8 * i));
        out[2 + i] =
            load_constant((const unsigned short*)(v_cache + head * VALUE_HEAD + PAGE * VALUE_DIM + at + 8 * i));
    }
}
#endif
// Numbers 2w and 2w + 1 of piece `piece` of what a lane has loaded; of codes without their scale.
__device__ __forceinline__ unsigned pair_of(const Words4& load, int piece, int w) {
#if FP8
    return e4m3_to_half2(load.w[piece % EIGHTS * 2 + w / 2], w % 2);
#else
    return load.w[w];
#endif
}

// Four outputs of a head, combined from several parts of a row: each part has its largest score, the sum of its
// weights, and its weighted values.
struct SoftmaxPart {
    float max_score = LOWEST, sum = 0;
    Vec4 values = {{0, 0, 0, 0}};
    __device__ __forceinline__ void add(float other_max, float other_sum, const Vec4& other_values) {
        const float new_max = fmaxf(max_score, other_max), scale = exp2_approx(max_score - new_max),
                    other_scale = exp2_approx(other_max - new_max);
        max_score = new_max;
        // By intrinsics, as RoPE: the compiler might contract otherwise in the two places that it is inlined into.
        sum = __fmaf_rn(sum, scale, __fmul_rn(other_sum, other_scale));
#pragma unroll
        for (int e = 0; e < 4; ++e)
            values.v[e] = __fmaf_rn(values.v[e], scale, __fmul_rn(other_values.v[e], other_scale));
    }
    // sink: the address of the head's. It takes a share of the weights, after all splits, and has no value.
    __device__ __forceinline__ void write(Bits* out, const QK* sink) {
        if (SINKS) add(__fmul_rn(number(load_constant(sink)), 1.44269504f), 1, Vec4{{0, 0, 0, 0}});
        const float inverse = 1.f / sum;
        *(uint2*)out = make_uint2(pack(values.v[0] * inverse, values.v[1] * inverse),
                                  pack(values.v[2] * inverse, values.v[3] * inverse));
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    decode_attention(const QK* q, const QK* k, const Bits* v, Bits* out, Cached* k_cache, Cached* v_cache,
                     const float* first_weight, const float* second_weight, const int* partner, const int* rows,
                     const void* positions, const int* page_table, int pages_per_row, float scale, float* partials,
                     float* stats, int* counters) {
    __shared__ __align__(16) Bits with_rope[(HEADS + 1) * LINE];  // queries, then the new key
    __shared__ __align__(16) Bits fresh[VALUE_DIM];               // the new value
    // Of each warp and head: the largest score, the sum of the weights, the weighted values.
    __shared__ float tops[WARPS * HEADS], weights[WARPS * HEADS];
    __shared__ __align__(16) float parts[WARPS * HEADS * VALUE_DIM];
    __shared__ int is_last;
#if FP8
    __shared__ __align__(16) Code new_key[DIM], new_value[VALUE_DIM];
    __shared__ Code new_scales[2];
#endif
    const unsigned tid = threadIdx.x;
    const int warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
    const int kv = blockIdx.y / CHUNKS, chunk = blockIdx.y % CHUNKS, request = blockIdx.z;
    // Request i is row i, so that no load waits for rows[i]; BY_ROW: it is a token of row rows[i].
    const int* row_table = page_table + (BY_ROW ? max(load_relaxed(rows + request), 0) : request) * pages_per_row;
    const int first_head = kv * GROUP + chunk * HEADS, heads = min(HEADS, GROUP - chunk * HEADS);
    const QK* queries = q + ((long long)request * KV_HEADS * GROUP + first_head) * QUERY_DIM;

    // Issue all loads that do not depend on the position. Heads after the last one load the last one's RoPE.
    const int row = load_relaxed(rows + request);
    const int position = load_relaxed((const int*)positions + (WIDE ? 2 * request : request));  // the low half will do
    // This warp's first unit in a row of a usual length: its pages are looked up before the position has arrived.
    const int guessed_unit = gridDim.x == 1 ? warp : blockIdx.x * LEAST + warp;
    // Lane n has the page of this warp's n-th unit.
    int lane_page = WINDOW ? 0 : page_of(row_table, guessed_unit + lane * WARPS, pages_per_row);
    // The number that a thread applies RoPE to in round r.
    auto rope_index = [&](int r) {
        return ROPE_SIZE % THREADS ? min(r * THREADS + tid, ROPE_SIZE - 1u) : r * THREADS + tid;
    };
    auto head_of = [&](unsigned i) {
        const int head = i / DIM;
        return head == HEADS ? k + ((long long)request * KV_HEADS + kv) * DIM
                             : queries + min(head, heads - 1) * QUERY_DIM;
    };
    const QK* heads_read[ROUNDS];
    int partners[ROUNDS];
    QK first_values[ROUNDS], second_values[ROUNDS];
    float first_weights[ROUNDS], second_weights[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const unsigned i = rope_index(r);
        const bool is_key = i / DIM == HEADS;
        partners[r] = load_relaxed(partner + second_element_at(is_key, i % DIM));
        heads_read[r] = head_of(i);
        first_values[r] = load_relaxed(heads_read[r] + first_element(partner, is_key, i % DIM));
    }
    const Words4 value_piece =
        load_16(v + (request * KV_HEADS + kv) * VALUE_DIM + min(tid, VALUE_DIM / 8 - 1u) * 8, true);
    Bits* out_heads = out + ((long long)request * KV_HEADS * GROUP + first_head) * VALUE_DIM;
    if (row < 0) {
        if (blockIdx.x == 0)
            for (unsigned item = tid; item < heads * VALUE_DIM / 4; item += THREADS)
                *(uint2*)(out_heads + item * 4) = make_uint2(0, 0);
        return;
    }
    const int window_start = WINDOW && position >= WINDOW ? position - WINDOW + 1 : 0;
    const int first_unit = window_start / UNIT, units = position / UNIT - first_unit + 1;
    int split_units = LEAST;
    while (split_units * MOST < units) split_units *= 2;
    const int splits = (units + split_units - 1) / split_units, block_splits = (splits + gridDim.x - 1) / gridDim.x,
              blocks = (splits + block_splits - 1) / block_splits;
    if (blockIdx.x >= blocks) return;
    const int first_split = blockIdx.x * block_splits, last_split = min(splits, first_split + block_splits),
              end = min(units, last_split * split_units);
    int unit = first_split * split_units + warp;

    // Then the loads that depend on the position, and those of the first unit.
    if (WINDOW || unit != guessed_unit) lane_page = page_of(row_table, first_unit + unit + lane * WARPS, pages_per_row);
    const int new_page = load_constant(row_table + position / PAGE);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const unsigned i = rope_index(r);
        const long long weights = rope_weights_at(position, i / DIM == HEADS);
        first_weights[r] = load_constant(first_weight + weights + i % DIM);
        second_weights[r] = load_constant(second_weight + weights + i % DIM);
        second_values[r] = load_constant(heads_read[r] + partners[r]);
    }
    Words4 k_frag[2][KEY_LOADS], v_frag[VALUE_LOADS][4];
#if FP8
    unsigned short scales[4];
#endif
    if (unit < end) {
        const int page = __shfl_sync(~0u, lane_page, 0), base = (first_unit + unit) * UNIT;
        load_keys(k_frag, k_cache, page, kv, base, window_start, position, g, t);
        load_values(v_frag, v_cache, page, kv, base, window_start, position, g, t);
#if FP8
        load_scales(scales, k_cache, v_cache, page, kv, base, t);
#endif
    }

    // Apply RoPE while these loads are in flight.
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const unsigned i = rope_index(r);
        if (r * THREADS + tid < ROPE_SIZE)
            with_rope[i / DIM * LINE + i % DIM] = (Bits)pack(
                rope(number(first_values[r]), first_weights[r], number(second_values[r]), second_weights[r]), 0);
    }
    if (tid < VALUE_DIM / 8) *(Words4*)(fresh + tid * 8) = value_piece;
    __syncthreads();
#if FP8
    if (end == units && warp == (units - 1) % WARPS) {  // this warp computes the new token; the others need not wait
        encode_head<DIM>([&](int i) { return with_rope[HEADS * LINE + i]; }, lane, new_key, new_scales);
        encode_head<VALUE_DIM>([&](int i) { return fresh[i]; }, lane, new_value, new_scales + 1);
        __syncwarp();
    }
#else
    const Bits *new_key = with_rope + HEADS * LINE, *new_value = fresh;
#endif
    Words4 q_frag[KEY_PIECES];
#pragma unroll
    for (int n = 0; n < KEY_PIECES; ++n) {
        q_frag[n] = Words4{{0, 0, 0, 0}};
        if (g < HEADS && key_dim(n, t) < DIM) q_frag[n] = *(const Words4*)(with_rope + g * LINE + key_dim(n, t));
    }

    const long long group = (long long)request * gridDim.y + blockIdx.y;
    SoftmaxPart total[OWN];  // where this block has all splits
    int loaded_units = 1;    // by this warp so far; a lane has the pages of 32
#pragma unroll 1
    for (int split = first_split; split < last_split; ++split) {
        float max_score = LOWEST, sum = 0;  // of head g: its largest score, the sum of its weights
        // Weighted values [c][j]: of dim value_dim(c, g) + 2j (of the next one in 2, 3), head 2t (the next one in 1,
        // 3).
        float acc[VALUE_PIECES][4][4] = {};
        const int split_end = min(units, (split + 1) * split_units);
#pragma unroll 1
        for (; unit < split_end; unit += WARPS, ++loaded_units) {
            // Keys are free once the scores are computed, values once they are multiplied: right then the loads of the
            // warp's next unit are issued into the same registers, so that they take the time of the other half.
            const int base = (first_unit + unit) * UNIT, next = base + WARPS * UNIT;
            const bool has_next = unit + WARPS < end;
            if ((loaded_units & 31) == 0) lane_page = page_of(row_table, next / UNIT + lane * WARPS, pages_per_row);
            const int next_page = __shfl_sync(~0u, lane_page, loaded_units & 31);
            if (base + UNIT > position) {  // the new token: also write it to the cache, once per KV head
                const long long head = (long long)new_page * KV_HEADS + kv;
                const int in_page = position % PAGE;
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    if (base + 8 * i + g == position)
#pragma unroll
                        for (int n = 0; n < KEY_LOADS; ++n)
                            if (const int dim = LOADED * (4 * n + t); dim < DIM) {
                                k_frag[i][n] = piece_at(new_key + dim);
                                if (chunk == 0 && !BY_ROW)
                                    put_piece(k_cache + head * KEY_HEAD + in_page * DIM + dim, k_frag[i][n]);
                            }
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (base + i / 2 * 8 + 2 * t + i % 2 == position)
#pragma unroll
                        for (int c = 0; c < VALUE_LOADS; ++c)
                            if (const int dim = LOADED * (8 * c + g); dim < VALUE_DIM) {
                                v_frag[c][i] = piece_at(new_value + dim);
                                if (chunk == 0 && !BY_ROW)
                                    put_piece(v_cache + head * VALUE_HEAD + in_page * VALUE_DIM + dim, v_frag[c][i]);
                            }
#if FP8
                if (chunk == 0 && !BY_ROW && lane < 2) {
                    Code* page =
                        lane ? v_cache + head * VALUE_HEAD + PAGE * VALUE_DIM : k_cache + head * KEY_HEAD + PAGE * DIM;
                    page[in_page] = new_scales[lane];
                }
#endif
            }
#if FP8
            // Of tokens 2t, 2t + 1, 2t + 8, 2t + 9; 0 where a stale scale may be NaN.
            unsigned key_scales[4], value_scales[4], pair_scales[2];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = base + i / 2 * 8 + 2 * t + i % 2;
                const bool is_new = token == position, in = token >= window_start && token < position;
                key_scales[i] = is_new ? new_scales[0] : in ? scales[i / 2] >> i % 2 * 8 & 0xff : 0;
                value_scales[i] = is_new ? new_scales[1] : in ? scales[2 + i / 2] >> i % 2 * 8 & 0xff : 0;
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {  // two of fp16, in their high bytes
                pair_scales[i] = value_scales[2 * i] << 8 | value_scales[2 * i + 1] << 24;
                if (CODE_UNIT != 1) pair_scales[i] = hmul2(pair_scales[i], 0x1c001c00);  // 2^-8
            }
#endif
            // Rows 8 to 15 of the queries' matrix are zeros: heads are at most 8.
            // Scores of head g and tokens 2t, 2t + 1; in scores[1] of those 8 further.
            float scores[2][4] = {}, new_max = LOWEST;
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int n = 0; n < KEY_PIECES; ++n) {
                    mma(scores[i], q_frag[n].w[0], 0, q_frag[n].w[1], 0, pair_of(k_frag[i][n / EIGHTS], n, 0),
                        pair_of(k_frag[i][n / EIGHTS], n, 1));
                    mma(scores[i], q_frag[n].w[2], 0, q_frag[n].w[3], 0, pair_of(k_frag[i][n / EIGHTS], n, 2),
                        pair_of(k_frag[i][n / EIGHTS], n, 3));
                }
            if (has_next) load_keys(k_frag, k_cache, next_page, kv, next, window_start, position, g, t);
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int token = base + 8 * i + 2 * t + e;
#if FP8
                    scores[i][e] *= number_of_half(key_scales[2 * i + e] << 8) * CODE_UNIT;  // a power of two
#endif
                    scores[i][e] *= scale;
                    if (SOFTCAP) scores[i][e] = SCORE_CAP * tanhf(scores[i][e] / SCORE_CAP);
                    if (token < window_start || token > position) scores[i][e] = -INFINITE;
                    new_max = fmaxf(new_max, scores[i][e]);
                }
            // Online softmax: the four lanes of a head agree on its largest score so far, and earlier sums are scaled
            // to it. `sum` is the sum of a lane's tokens until the split ends.
            new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, 1));
            new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, 2));
            new_max = fmaxf(new_max, max_score);
            const float rescale = exp2_approx(max_score - new_max);
            max_score = new_max;
            sum *= rescale;
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    scores[i][e] = exp2_approx(scores[i][e] - max_score);
                    sum += scores[i][e];
                }
            const unsigned weights0 = pack(scores[0][0], scores[0][1]), weights1 = pack(scores[1][0], scores[1][1]);
            // Of heads 2t and 2t + 1.
            const float rescale0 = __shfl_sync(~0u, rescale, 8 * t), rescale1 = __shfl_sync(~0u, rescale, 8 * t + 4);
#pragma unroll
            for (int c = 0; c < VALUE_PIECES; ++c)
#pragma unroll
                for (int j = 0; j < 4; ++j) {  // row g: the even dim of two, row g + 8: the odd one; pairs of tokens
                    unsigned pairs[4];  // of two tokens: the even dim and the odd one, then those of the other two
#pragma unroll
                    for (int i = 0; i < 4; i += 2) {
#if FP8
                        const int w = c % EIGHTS * 2 + j / 2;
                        const unsigned codes = __byte_perm(v_frag[c / EIGHTS][i].w[w], v_frag[c / EIGHTS][i + 1].w[w],
                                                           j % 2 ? 0x7362 : 0x5140);
                        pairs[i] = hmul2(e4m3_to_half2(codes, 0), pair_scales[i / 2]);
                        pairs[i + 1] = hmul2(e4m3_to_half2(codes, 1), pair_scales[i / 2]);
#else
                        pairs[i] = __byte_perm(v_frag[c][i].w[j], v_frag[c][i + 1].w[j], 0x5410);
                        pairs[i + 1] = __byte_perm(v_frag[c][i].w[j], v_frag[c][i + 1].w[j], 0x7632);
#endif
                    }
                    acc[c][j][0] *= rescale0;
                    acc[c][j][1] *= rescale1;
                    acc[c][j][2] *= rescale0;
                    acc[c][j][3] *= rescale1;
                    mma(acc[c][j], pairs[0], pairs[1], pairs[2], pairs[3], weights0, weights1);
                }
            if (has_next) load_values(v_frag, v_cache, next_page, kv, next, window_start, position, g, t);
#if FP8
            if (has_next) load_scales(scales, k_cache, v_cache, next_page, kv, next, t);
#endif
        }

        // Combine the parts of the warps, in the order of the warps.
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (split > first_split) __syncthreads();  // all warps have read the parts of the previous split
        if (t == 0 && g < HEADS) {
            tops[warp * HEADS + g] = max_score;
            weights[warp * HEADS + g] = sum;
        }
#pragma unroll
        for (int c = 0; c < VALUE_PIECES; ++c)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (2 * t + e < HEADS && value_dim(c, g) < VALUE_DIM) {
                    Vec4* to = (Vec4*)(parts + (warp * HEADS + 2 * t + e) * VALUE_DIM + value_dim(c, g));
                    to[0] = Vec4{{acc[c][0][e], acc[c][0][2 + e], acc[c][1][e], acc[c][1][2 + e]}};
                    to[1] = Vec4{{acc[c][2][e], acc[c][2][2 + e], acc[c][3][e], acc[c][3][2 + e]}};
                }
        __syncthreads();
        const long long part = group * MOST + split;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int item = tid + i * THREADS, head = item / (VALUE_DIM / 4), place = item % (VALUE_DIM / 4) * 4;
            if (head >= heads) continue;  // also true after the last item
            SoftmaxPart combined;
#pragma unroll
            for (int w = 0; w < WARPS; ++w)
                combined.add(tops[w * HEADS + head], weights[w * HEADS + head],
                             *(const Vec4*)(parts + (w * HEADS + head) * VALUE_DIM + place));
            if (blocks == 1) {  // this block has all splits: combine them as the last block would, in registers
                total[i].add(combined.max_score, combined.sum, combined.values);
                continue;
            }
            *(Vec4*)(partials + (part * ITEMS + item) * 4) = combined.values;
            if (place == 0) {
                stats[(part * HEADS + head) * 2] = combined.max_score;
                stats[(part * HEADS + head) * 2 + 1] = combined.sum;
            }
        }
    }
    if (blocks == 1) {
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (const int item = tid + i * THREADS, head = item / (VALUE_DIM / 4); head < heads)
                total[i].write(out_heads + item * 4, queries + head * QUERY_DIM + DIM);
        return;
    }

    // The last block of a row combines the splits. This barrier orders the block's writes before it is counted, and the
    // next one its reads after that.
    __syncthreads();
    if (tid == 0) {
        is_last = atomic_increment(counters + group) == blocks - 1;
        if (is_last) counters[group] = 0;  // for the next launch
    }
    __syncthreads();
    if (!is_last) return;
    for (unsigned item = tid; item < ITEMS; item += THREADS) {
        const int head = item / (VALUE_DIM / 4);
        if (head >= heads) continue;
        SoftmaxPart combined;
        for (int from = 0; from < splits; from += 8) {  // eight loads in flight
            Vec4 split_values[8];
            float split_max[8], split_sum[8];
#pragma unroll
            for (int s = 0; s < 8; ++s)
                if (from + s < splits) {
                    const long long part = group * MOST + from + s;
                    split_values[s] = load_cg((const Vec4*)(partials + (part * ITEMS + item) * 4));
                    split_max[s] = load_cg(stats + (part * HEADS + head) * 2);
                    split_sum[s] = load_cg(stats + (part * HEADS + head) * 2 + 1);
                }
#pragma unroll
            for (int s = 0; s < 8; ++s)
                if (from + s < splits) combined.add(split_max[s], split_sum[s], split_values[s]);
        }
        combined.write(out_heads + item * 4, queries + head * QUERY_DIM + DIM);
    }
}
