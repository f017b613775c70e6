// The next token of each row of the logits: step/logits_pipeline.py on the device.
//
// One block per row. A token's key is the bits of its weight exp((logit - largest) / temperature), which is positive,
// followed by its id, counted from the largest: keys are distinct, in the order of the weights, and of equal weights
// the lower id is first. min-p, top-k and top-p keep the tokens from one key on (`floor`), which is found digit by
// digit (radix select) from the counts, or fixed-point masses, of each digit. Both are integers, so the order in which
// they are accumulated does not change the result.
#include "numbers.cuh"

__device__ float number(const void* values, int kind, long long i) {
    if (kind == 0) return ((const float*)values)[i];
    const unsigned short bits = ((const unsigned short*)values)[i];
    return kind == 1 ? number_of_half(bits) : number_of_bfloat16(bits);
}

constexpr int DIGIT = 10, BINS = 1 << DIGIT, THREADS = BINS;  // a thread has a bin where bins are summed
constexpr int ID_BITS = 2 * DIGIT, KEY_BITS = 5 * DIGIT;      // weights are at most 1: 30 bits
constexpr float MASS = 8796093022208.f;                       // 2^43: 2^20 tokens of weight 1 fit into 64 bits

constexpr int MASKED = 1, BIASED = 2, PENALIZED = 4;
constexpr float LARGEST = 3.402823466e38f;
constexpr int MAX_LOGPROBS = 20;

struct Sampling {       // of a slot: logits_tables.PARAMETERS
    float temperature;  // 0: the most likely token
    int top_k;          // 0: all
    float min_p, repetition_penalty;
    double top_p, presence_penalty, frequency_penalty;
    u64 seed, choice;
    long long num_prompt_tokens;
    int changes, num_logprobs;  // MASKED, BIASED, PENALIZED; one more than the likeliest tokens to write, 0: no
                                // log-probabilities
};

struct Counted {  // of a slot: the last token of its answer that `counts` has, and the token's position
    int position, token;
};

struct Logprobs {  // of a slot: logits_tables.LOGPROBS. A token's log-probability is its logit minus `total`
    double total;
    float chosen;
    int unused, tokens[MAX_LOGPROBS];
    float logits[MAX_LOGPROBS];
};

struct Row {
    const void* logits;
    int kind, size;
    long long first;
    float largest, temperature;

    __device__ float logit(int id) const { return number(logits, kind, first + id); }
    __device__ float weight(float logit) const { return expf((logit - largest) / temperature); }
};

__device__ u64 key_of(float weight, int id) {
    return (u64)__float_as_uint(weight) << ID_BITS | (unsigned)((1 << ID_BITS) - 1 - id);
}
__device__ u64 mass_of(float weight) { return (u64)(weight * MASS); }

// Calls f(id, logit) for all tokens of a row, ids ascending in a thread; four loads are in flight at a time.
template <typename F>
__device__ void each(const Row& row, F f) {
    for (int base = threadIdx.x; base < row.size; base += 4 * THREADS) {
        float loaded[4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
            if (base + n * THREADS < row.size) loaded[n] = row.logit(base + n * THREADS);
#pragma unroll
        for (int n = 0; n < 4; ++n)
            if (base + n * THREADS < row.size) f(base + n * THREADS, loaded[n]);
    }
}

// Returns the argmax of a block to all its threads; of equal values the first.
__device__ void first_largest(float& best, int& at) {
    __shared__ float bests[32];
    __shared__ int places[32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int round = 0; round < 2; ++round) {  // in a warp, then of the warps
        for (int offset = 16; offset; offset >>= 1) {
            const float other = __shfl_xor_sync(~0u, best, offset);
            const int place = __shfl_xor_sync(~0u, at, offset);
            if (other > best || (other == best && place < at)) {
                best = other;
                at = place;
            }
        }
        if (round) break;
        if (lane == 0) {
            bests[warp] = best;
            places[warp] = at;
        }
        __syncthreads();
        best = bests[lane];
        at = places[lane];
    }
    __syncthreads();  // before they are written again
}

// Returns the inclusive prefix sum of the threads' values; total: the sum of all.
__device__ u64 sum_to_here(u64 value, u64& total) {
    __shared__ u64 sums[32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int offset = 1; offset < 32; offset *= 2) {
        const u64 other = __shfl_up_sync(~0u, value, offset);
        if (lane >= offset) value += other;
    }
    if (lane == 31) sums[warp] = value;
    __syncthreads();
    u64 before = lane < warp ? sums[lane] : 0;
    total = sums[lane];
    for (int offset = 16; offset; offset >>= 1) {
        before += __shfl_xor_sync(~0u, before, offset);
        total += __shfl_xor_sync(~0u, total, offset);
    }
    return before + value;
}

// Returns the key of the last token to keep of those from `floor` on: of the `count` largest, or if count is 0, of the
// fewest largest that hold `share` of the mass. Returns `floor` if there are fewer.
__device__ u64 cut(const Row& row, u64 floor, u64 count, double share) {
    __shared__ unsigned low[BINS], high[BINS];  // halves of sums: shared memory adds 32 bits at a time
    __shared__ u64 above, inside;
    __shared__ int chosen;
    // Each round reads the whole row, which is in the cache, and fixes one more digit of the key. `prefix`: the digits
    // so far. `need`: the count, or mass, that tokens whose keys begin with them must contribute.
    bool by_mass = count == 0;
    u64 need = count, prefix = 0;
    for (int shift = KEY_BITS - DIGIT; shift >= 0; shift -= DIGIT) {
        low[threadIdx.x] = high[threadIdx.x] = 0;
        if (threadIdx.x == 0) chosen = -1;
        __syncthreads();
        each(row, [&](int id, float logit) {
            const float weight = row.weight(logit);
            const u64 key = key_of(weight, id);
            if (key < floor || key >> (shift + DIGIT) != prefix) return;
            const int bin = (int)(key >> shift) & (BINS - 1);
            if (by_mass) {
                const u64 mass = mass_of(weight);
                const unsigned part = (unsigned)mass, before = atomicAdd(low + bin, part);
                const unsigned carried = (unsigned)(mass >> 32) + (before + part < before);
                if (carried) atomicAdd(high + bin, carried);
            } else atomicAdd(low + bin, 1u);
        });
        __syncthreads();
        const int bin = BINS - 1 - threadIdx.x;  // the largest first
        const u64 count_here = (u64)high[bin] << 32 | low[bin];
        u64 total, upto = sum_to_here(count_here, total);
        if (need == 0) need = (u64)ceil(share * (double)total);
        if (upto - count_here < need && need <= upto) {
            chosen = bin;
            above = upto - count_here;
            inside = count_here;
        }
        __syncthreads();
        if (chosen < 0) return floor;
        prefix = prefix << DIGIT | chosen;
        need -= above;
        u64 tokens = inside;
        if (by_mass && shift == ID_BITS) {  // all digits of a weight: its tokens have equal masses, so count them
            const u64 mass = mass_of(__uint_as_float((unsigned)prefix));
            need = (need + mass - 1) / mass;
            tokens /= mass;
            by_mass = false;
        }
        __syncthreads();  // all have read what the next digit writes
        // All tokens with this prefix are kept: the remaining digits would be zeros.
        if (!by_mass && need >= tokens && prefix << shift > floor) return prefix << shift;
        if (!by_mass && need >= tokens) return floor;
    }
    return prefix;
}

// step/noise.py: Philox4x64-10 (Salmon et al. 2011), here of a block of 8 tokens.
__device__ void philox(u64 (&words)[4], u64 block, u64 position, u64 seed, u64 choice) {
    words[0] = block;
    words[1] = position;
    words[2] = words[3] = 0;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 a = words[0], b = words[2];
        words[0] = __umul64hi(0xCA5A826395121157ULL, b) ^ words[1] ^ seed;
        words[1] = 0xCA5A826395121157ULL * b;
        words[2] = __umul64hi(0xD2E7470EE14C6C93ULL, a) ^ words[3] ^ choice;
        words[3] = 0xD2E7470EE14C6C93ULL * a;
        seed += 0x9E3779B97F4A7C15ULL;
        choice += 0xBB67AE8584CAA73BULL;
    }
}

__device__ float noise_of(unsigned bits) {
    return -log1pf(-(((float)bits + 0.5f) * 2.3283064365386963e-10f));
}  // 2^-32

// A draw of logits_pipeline.choose. The noise of a token is computed where one of its 8 is kept.
__device__ int draw(const Row& row, const Sampling& sampling, u64 position) {
    u64 floor = (u64)1 << ID_BITS;  // weights above 0
    const u64 least = (u64)__float_as_uint(sampling.min_p) << ID_BITS;
    if (least > floor) floor = least;
    if (sampling.top_k > 0 && sampling.top_k < row.size) floor = cut(row, floor, sampling.top_k, 0);
    if (sampling.top_p < 1) floor = cut(row, floor, 0, sampling.top_p);
    float best = -1;
    int at = row.size;
    for (int group = threadIdx.x; group * 8 < row.size; group += THREADS) {
        float weights[8];
        bool any = false;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const int id = group * 8 + n;
            weights[n] = id < row.size ? row.weight(row.logit(id)) : 0;
            if (key_of(weights[n], id) < floor) weights[n] = 0;
            any |= weights[n] > 0;
        }
        if (!any) continue;
        u64 words[4];
        philox(words, group + 1, position, sampling.seed, sampling.choice);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const float score = weights[n] / noise_of((unsigned)(words[n / 2] >> n % 2 * 32));
            if (weights[n] > 0 && score > best) {
                best = score;
                at = group * 8 + n;
            }
        }
    }
    first_largest(best, at);
    return at;
}

// The first of the largest of a row's logits; infinity for NaN.
__device__ void largest_of(const Row& row, float& best, int& at) {
    best = __int_as_float(0xff800000);  // minus infinity
    at = row.size;
    each(row, [&](int id, float logit) {
        if (isnan(logit)) logit = __int_as_float(0x7f800000);  // infinity
        if (logit > best || at == row.size) {
            best = logit;
            at = id;
        }
    });
    first_largest(best, at);
}

// Sets a slot's next token, at position `next`: see `advance`.
__device__ void set_next(int slot, int at, long long next, int limit, int* next_tokens, void* tokens, void* positions,
                         int wide) {
    next_tokens[slot] = at;
    if (at < 0) at = 0;
    if (next >= limit) next = 0;
    if (wide) {
        ((long long*)tokens)[slot] = at;
        ((long long*)positions)[slot] = next;
    } else {
        ((int*)tokens)[slot] = at;
        ((int*)positions)[slot] = (int)next;
    }
}

// Counts a slot's input token if it belongs to the answer. A step that is run twice, because it was launched early and
// dropped, counts once.
__device__ void count_input(const Sampling& sampling, int* counts, Counted& counted, long long position, int token) {
    if (threadIdx.x == 0 && position >= sampling.num_prompt_tokens && position >= counted.position) {
        if (position == counted.position) --counts[counted.token];
        ++counts[token];
        counted = {(int)position, token};
    }
    __syncthreads();
}

// Sampler._adjust of a logit. count: of a token in the answer; its sign bit: the token is in the prompt. The products
// and sums that follow each other stay apart.
__device__ float adjusted(const Sampling& sampling, float logit, float bias, int count) {
    if (sampling.changes & BIASED) logit += bias;
    if (sampling.changes & PENALIZED && count) {
        if (sampling.repetition_penalty != 1)
            logit = logit > 0 ? logit / sampling.repetition_penalty : __fmul_rn(logit, sampling.repetition_penalty);
        count &= 0x7fffffff;
        if (count)
            logit = __fsub_rn(
                logit, (float)__dadd_rn(sampling.presence_penalty, __dmul_rn(sampling.frequency_penalty, count)));
    }
    return fminf(logit, LARGEST);
}

// Sampler.process: writes a row's processed logits. masks: bits of the tokens that the grammar allows, then of those
// that nothing forbids.
__device__ void process(const Row& row, const Sampling& sampling, const unsigned* masks, const float* biases,
                        const int* counts, float* processed) {
    const unsigned* allowed = masks + (row.size + 31) / 32;
    each(row, [&](int id, float logit) {
        if (sampling.changes & MASKED && !(allowed[id / 32] >> id % 32 & 1)) logit = __int_as_float(0xff800000);
        processed[id] = adjusted(sampling, logit, sampling.changes & BIASED ? biases[id] : 0,
                                 sampling.changes & PENALIZED ? counts[id] : 0);
    });
}

// If no token remains: the logits of the tokens that the grammar allows, with minus infinity made finite.
__device__ void process_grammar(const Row& row, const Sampling& sampling, const unsigned* masks, float* processed) {
    each(row, [&](int id, float logit) {
        const bool allowed = !(sampling.changes & MASKED) || masks[id / 32] >> id % 32 & 1;
        processed[id] = allowed ? fmaxf(logit, -LARGEST) : __int_as_float(0xff800000);
    });
}

// logits_pipeline.log_probabilities of the model's own logits, of which `best` is the largest. Each thread
// keeps the largest of its tokens that is not written yet.
__device__ void write_logprobs(const Row& row, float best, int token, int count, Logprobs& record) {
    __shared__ double sums[32];
    const int lane = threadIdx.x % 32;
    double sum = 0;
    float top_left = __int_as_float(0xff800000);
    int place = row.size;
    each(row, [&](int id, float logit) {
        sum += expf(logit - best);
        if (logit > top_left || place == row.size) {
            top_left = logit;
            place = id;
        }
    });
    for (int offset = 16; offset; offset >>= 1) sum += __shfl_xor_sync(~0u, sum, offset);
    if (lane == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = sums[lane];
    for (int offset = 16; offset; offset >>= 1) sum += __shfl_xor_sync(~0u, sum, offset);
    if (threadIdx.x == 0) {
        record.total = best + log(sum);
        record.chosen = row.logit(token);
    }
    for (int n = 0; n < count; ++n) {
        float top = top_left;
        int at = place;
        first_largest(top, at);
        if (threadIdx.x == 0) {
            record.tokens[n] = at;
            record.logits[n] = top;
        }
        // The thread whose token was written looks for its next one.
        if (at != place || at == row.size) continue;
        top_left = __int_as_float(0xff800000);
        place = row.size;
        for (int id = threadIdx.x; id < row.size; id += THREADS) {
            const float logit = row.logit(id);
            const bool later = logit < top || (logit == top && id > at);
            if (later && (logit > top_left || place == row.size)) {
                top_left = logit;
                place = id;
            }
        }
    }
}

// Chooses the first of the largest logits where the row's slot has temperature 0, else a draw, of logits processed as
// its parameters say; -1 where the model's largest is NaN, which counts as the largest, or infinite. It becomes the
// next token of the slot, or 0, so that a step may always follow, one position after the row's own; at `limit`
// positions 0, which is valid. Rows without a slot (-1) change nothing. input_tokens: of the step, that of a row at
// logit_rows. By slot and token: counts, biases, masks; processed: by row and token.
extern "C" __global__ void __launch_bounds__(THREADS)
    advance(const void* logits, int kind, int size, const int* slots, const void* input_positions, int limit,
            const void* input_tokens, const void* logit_rows, const Sampling* samplings, int* counts, Counted* counted,
            const float* biases, const unsigned* masks, float* processed, Logprobs* logprobs, int* next_tokens,
            void* tokens, void* positions, int wide) {
    const int slot = slots[blockIdx.x];
    if (slot < 0) return;
    const Sampling sampling = samplings[slot];
    const Row row = {logits, kind, size, (long long)blockIdx.x * size, 0, 0};
    float best;
    int at;
    largest_of(row, best, at);
    const long long position = integer(input_positions, wide, blockIdx.x), next = position + 1,
                    first = (long long)slot * size;
    const unsigned* slot_masks = masks + 2LL * slot * ((size + 31) / 32);
    if (sampling.changes & PENALIZED)
        count_input(sampling, counts + first, counted[slot], position,
                    (int)integer(input_tokens, wide, integer(logit_rows, wide, blockIdx.x)));
    if (isinf(best)) at = -1;
    else {
        Row processed_row = row;
        processed_row.largest = best;
        processed_row.temperature = sampling.temperature;
        if (sampling.changes) {
            processed_row.logits = processed;
            processed_row.kind = 0;
            process(row, sampling, slot_masks, biases + first, counts + first, processed + row.first);
            __syncthreads();
            largest_of(processed_row, processed_row.largest, at);
            if (isinf(processed_row.largest)) {
                process_grammar(row, sampling, slot_masks, processed + row.first);
                __syncthreads();
                largest_of(processed_row, processed_row.largest, at);
            }
        }
        if (sampling.temperature > 0) at = draw(processed_row, sampling, next);
        if (sampling.num_logprobs) write_logprobs(row, best, at, sampling.num_logprobs - 1, logprobs[slot]);
    }
    if (threadIdx.x == 0) set_next(slot, at, next, limit, next_tokens, tokens, positions, wide);
}

// The argmax of a row in a rank's shard of the logits, of `size` tokens from `first` on: the first of the largest
// logits; infinity for NaN.
struct RankArgmax {
    float logit;
    int token;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    largest(const void* part, int kind, int size, int first, const int* slots, RankArgmax* argmax) {
    if (slots[blockIdx.x] < 0) return;
    float best;
    int at;
    largest_of({part, kind, size, (long long)blockIdx.x * size, 0, 0}, best, at);
    if (threadIdx.x == 0) argmax[blockIdx.x] = {best, first + at};
}

// As `advance` at temperature 0, from all ranks' argmax [rows, ranks]. Ranks are in the order of their tokens, so the
// first of equal logits has the lowest id.
extern "C" __global__ void choose(const RankArgmax* argmax, int ranks, const int* slots, const void* input_positions,
                                  int limit, int* next_tokens, void* tokens, void* positions, int wide) {
    const int slot = slots[blockIdx.x];
    if (slot < 0 || threadIdx.x) return;
    RankArgmax best = argmax[(long long)blockIdx.x * ranks];
    for (int rank = 1; rank < ranks; ++rank) {
        const RankArgmax other = argmax[(long long)blockIdx.x * ranks + rank];
        if (other.logit > best.logit) best = other;
    }
    const long long next = integer(input_positions, wide, blockIdx.x) + 1;
    set_next(slot, isinf(best.logit) ? -1 : best.token, next, limit, next_tokens, tokens, positions, wide);
}
