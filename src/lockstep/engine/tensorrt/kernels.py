"""The few small kernels of our own: keys and values into the cache, and the next token out of the logits. (That of rows that decode: decode_kernel.py.)

Token ids and positions are int32 or int64, as the engine wants them: `wide` says which.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.engine.tensorrt.cuda import Array, Kernel, Stream, compile_kernels

ROTATED = r"""
// Of a rotary encoding: in words that leave the compiler no choice of roundings, so that all kernels cache the same numbers.
__device__ __forceinline__ float rotated(float x, float own, float y, float other) { return __fmaf_rn(y, other, __fmul_rn(x, own)); }
"""
_SOURCE = r"""
__device__ long long integer(const void* values, int wide, long long i) {
    return wide ? ((const long long*)values)[i] : ((const int*)values)[i];
}

__device__ float number(const void* values, int kind, long long i) {
    if (kind == 0) return ((const float*)values)[i];
    unsigned short bits = ((const unsigned short*)values)[i];
    float result;
    if (kind == 1) asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(bits));
    else result = __uint_as_float((unsigned)bits << 16);
    return result;
}

// One block a token and head. Sizes are counted in units of T. A token of row -1 is not written.
template <typename T>
__device__ void write_cache(const T* key, const T* value, T* keys, T* values, const int* rows, const void* positions, int wide,
                            int capacity, int heads, int key_size, int value_size) {
    int token = blockIdx.x, head = blockIdx.y, row = rows[token];
    if (row < 0) return;
    long long place = ((long long)row * heads + head) * capacity + integer(positions, wide, token);
    long long from = (long long)token * heads + head;
    for (int i = threadIdx.x; i < key_size; i += blockDim.x) keys[place * key_size + i] = key[from * key_size + i];
    for (int i = threadIdx.x; i < value_size; i += blockDim.x) values[place * value_size + i] = value[from * value_size + i];
}

#define WRITE(NAME, T) \
extern "C" __global__ void NAME(const T* key, const T* value, T* keys, T* values, const int* rows, const void* positions, int wide, \
                                int capacity, int heads, int key_size, int value_size) { \
    write_cache<T>(key, value, keys, values, rows, positions, wide, capacity, heads, key_size, value_size); }
WRITE(write_cache_2, unsigned short)
WRITE(write_cache_16, uint4)

__device__ void store(void* values, int kind, long long i, float number) {
    if (kind == 0) { ((float*)values)[i] = number; return; }
    unsigned short bits;
    if (kind == 1) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(number));
    else {  // bfloat16: the nearest, ties to even
        unsigned word = __float_as_uint(number);
        bits = (unsigned short)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
    }
    ((unsigned short*)values)[i] = bits;
}

// Blocks (token, slice). Rotated queries packed; rotated keys, and values as they are, into the pages of the cache. Queries and keys come in the numbers of
// `given`, all else has those of `kind`.
extern "C" __global__ void rotate(const void* query, const void* key, const void* value, void* query_out, void* keys, void* values, int given, int kind,
                                  const float* own, const float* other, const int* partner, const int* rows, const void* positions, int wide,
                                  const int* pages, int pages_per_row, int page_size, int heads, int kv_heads, int dim, int value_dim) {
    int token = blockIdx.x, row = rows[token];
    long long position = integer(positions, wide, token);
    long long page = row < 0 ? 0 : pages[row * pages_per_row + position / page_size];
    own += position * dim;
    other += position * dim;
    int queries = heads * dim, all = queries + kv_heads * dim, last = all + kv_heads * value_dim;
    for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < last; i += gridDim.y * blockDim.x) {
        if (i < all) {
            int at = i < queries ? i : i - queries, head = at / dim, j = at % dim;
            const void* from = i < queries ? query : key;
            long long base = (long long)token * (i < queries ? queries : kv_heads * dim) + head * dim;
            float turned = rotated(number(from, given, base + j), own[j], number(from, given, base + partner[j]), other[j]);
            if (i < queries) store(query_out, kind, base + j, turned);
            else if (row >= 0) store(keys, kind, ((page * kv_heads + head) * page_size + position % page_size) * dim + j, turned);
        } else if (row >= 0) {
            int at = i - all, head = at / value_dim, j = at % value_dim;
            float copied = number(value, kind, (long long)token * kv_heads * value_dim + at);
            store(values, kind, ((page * kv_heads + head) * page_size + position % page_size) * value_dim + j, copied);
        }
    }
}

// One block a row: the first of the largest logits becomes the row's next token, one position further; -1 where that is NaN, which counts as the largest, or
// infinite. Rows of -1 stay as they are.
extern "C" __global__ void advance(const void* logits, int kind, int size, const int* rows, void* tokens, void* positions, int wide) {
    int row = blockIdx.x;
    if (rows[row] < 0) return;
    float best = __int_as_float(0xff800000);  // minus infinity
    int at = size;
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        float found = number(logits, kind, (long long)row * size + i);
        if (isnan(found)) found = __int_as_float(0x7f800000);  // infinity
        if (found > best || at == size) { best = found; at = i; }
    }
    for (int offset = 16; offset; offset >>= 1) {
        float other = __shfl_down_sync(~0u, best, offset);
        int place = __shfl_down_sync(~0u, at, offset);
        if (other > best || (other == best && place < at)) { best = other; at = place; }
    }
    __shared__ float bests[32];
    __shared__ int places[32];
    int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) { bests[warp] = best; places[warp] = at; }
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 1; i < blockDim.x / 32; ++i)
        if (bests[i] > best || (bests[i] == best && places[i] < at)) { best = bests[i]; at = places[i]; }
    if (isinf(best)) at = -1;
    if (wide) { ((long long*)tokens)[row] = at; ++((long long*)positions)[row]; }
    else { ((int*)tokens)[row] = at; ++((int*)positions)[row]; }
}
"""
NUMBERS = {"float32": 0, "float16": 1, "bfloat16": 2}


_SLICES = 12  # blocks a token: enough to fill the device at one token, few enough not to drown it at 2048


@dataclass(frozen=True)
class Rotation:
    """A rotary encoding as numbers: `x[j] * own[position, j] + x[partner[j]] * other[position, j]`, the same for all heads.

    own, other [positions, head_dim] float32; partner [head_dim] int32.
    """

    own: Array
    other: Array
    partner: Array


class Kernels:
    """The kernels, compiled for this GPU. `wide`: token ids and positions are int64."""

    def __init__(self, wide: bool):
        module = compile_kernels(ROTATED + _SOURCE)
        self.wide = int(wide)
        self._write: dict[int, Kernel] = {2: module["write_cache_2"], 16: module["write_cache_16"]}
        self._advance = module["advance"]
        self._rotate = module["rotate"]

    def write_cache(self, stream: Stream, key: Array, value: Array, keys: Array, values: Array, rows: Array, positions: Array) -> None:
        """key [num_tokens, num_kv_heads, head_dim] and value into keys, values [rows, num_kv_heads, capacity, head_dim], each token into row `rows[token]`
        (int32; -1: nowhere) at `positions[token]`."""
        tokens, heads, key_dim = key.shape
        sizes = [dim * key.dtype.itemsize for dim in (key_dim, value.shape[2])]
        unit = 16 if all(size % 16 == 0 for size in sizes) else 2
        key_size, value_size = (size // unit for size in sizes)
        self._write[unit].launch(
            stream, (tokens, heads, 1), min(128, max(32, key_size, value_size)), key, value, keys, values, rows, positions, self.wide,
            keys.shape[2], heads, key_size, value_size,
        )  # fmt: skip

    def rotate(
        self, stream: Stream, query: Array, key: Array, value: Array, query_out: Array, keys: Array, values: Array, rotation: Rotation,
        rows: Array, positions: Array, pages: Array,
    ) -> None:  # fmt: skip
        """query [num_tokens, num_heads, head_dim] -> query_out, rotated; key, rotated, and value [num_tokens, num_kv_heads, dim] into keys, values [pages,
        num_kv_heads, page_size, dim], each token into row `rows[token]` (int32; -1: nowhere) at `positions[token]`. pages [rows, pages_per_row] int32: the
        page of each piece of a row. Queries and keys may be float32 where all else is not: some models normalise them in it."""
        tokens, heads, dim = query.shape
        kv_heads, value_dim = value.shape[1:]
        self._rotate.launch(
            stream, (tokens, _SLICES, 1), 256, query, key, value, query_out, keys, values, NUMBERS[query.dtype.name], NUMBERS[query_out.dtype.name],
            rotation.own, rotation.other, rotation.partner, rows, positions, self.wide, pages, pages.shape[1], keys.shape[2], heads, kv_heads, dim, value_dim,
        )  # fmt: skip

    def advance(self, stream: Stream, logits: Array, rows: Array, tokens: Array, positions: Array) -> None:
        """logits [num_requests, vocab_size] -> tokens [num_requests], the most likely, -1 for one that is NaN or infinite; positions go one further.
        Where rows is -1: nothing."""
        count, size = logits.shape
        self._advance.launch(stream, count, 1024, logits, NUMBERS[logits.dtype.name], size, rows, tokens, positions, self.wide)
