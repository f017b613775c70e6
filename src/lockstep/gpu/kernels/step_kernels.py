"""Small kernels of our own: the cache write, adapter masks, and the next token out of the logits."""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import CheckError
from lockstep.gpu.cuda import Array, Kernel, Stream, compile_kernels

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

// One block a token: 1 in the columns of its adapter, else 0. kind: as `number`'s.
extern "C" __global__ void adapter_mask(const void* ids, int wide, void* mask, int kind, int columns, int rank) {
    long long id = integer(ids, wide, blockIdx.x), first = (long long)blockIdx.x * columns;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        bool own = i / rank == id;
        if (kind == 0) ((float*)mask)[first + i] = own ? 1.0f : 0.0f;
        else ((unsigned short*)mask)[first + i] = own ? (kind == 1 ? 0x3c00 : 0x3f80) : 0;
    }
}

#define WRITE(NAME, T) \
extern "C" __global__ void NAME(const T* key, const T* value, T* keys, T* values, const int* rows, const void* positions, int wide, \
                                int capacity, int heads, int key_size, int value_size) { \
    write_cache<T>(key, value, keys, values, rows, positions, wide, capacity, heads, key_size, value_size); }
WRITE(write_cache_2, unsigned short)
WRITE(write_cache_16, uint4)
"""  # noqa: E501
SOURCE = _SOURCE + Path(__file__).with_name("next_token.cu").read_text(encoding="utf-8")
_MOST_TOKENS = 1 << 20  # of a vocabulary: next_token.cu, ID_BITS
_THREADS = 1024  # likewise, THREADS
NUMBERS = {"float32": 0, "float16": 1, "bfloat16": 2}


class Kernels:
    """The kernels, compiled for this GPU; wide: token ids and positions are int64."""

    def __init__(self, wide: bool):
        module = compile_kernels(SOURCE)
        self.wide = int(wide)
        self._write: dict[int, Kernel] = {2: module["write_cache_2"], 16: module["write_cache_16"]}
        self._advance, self._largest, self._choose = (module[name] for name in ("advance", "largest", "choose"))
        self._adapter_mask = module["adapter_mask"]

    def adapter_mask(self, stream: Stream, ids: Array, mask: Array, rank: int) -> None:
        """Write a mask [num_tokens, max_adapters * rank]: 1 in the columns of a token's adapter (ids), else 0."""
        tokens, columns = mask.shape
        self._adapter_mask.launch(
            stream, tokens, min(128, columns), ids, self.wide, mask, NUMBERS[mask.dtype.name], columns, rank
        )

    def write_cache(
        self, stream: Stream, key: Array, value: Array, keys: Array, values: Array, rows: Array, positions: Array
    ) -> None:
        """Write keys and values of tokens into the cache.

        key [num_tokens, num_kv_heads, head_dim] and value go into keys, values [rows, num_kv_heads, capacity,
        head_dim], each token into row `rows[token]` (int32; -1: nowhere) at `positions[token]`.
        """
        tokens, heads, key_dim = key.shape
        widths = [dim * key.dtype.itemsize for dim in (key_dim, value.shape[2])]
        unit = 16 if all(width % 16 == 0 for width in widths) else 2
        key_size, value_size = (width // unit for width in widths)
        sizes = keys.shape[2], heads, key_size, value_size
        threads = min(128, max(32, key_size, value_size))
        arrays = key, value, keys, values, rows, positions
        self._write[unit].launch(stream, (tokens, heads, 1), threads, *arrays, self.wide, *sizes)

    def advance(
        self, stream: Stream, logits: Array, slots: Array, held: Array, limit: int, samplings: Array, *out: Array
    ) -> None:
        """Choose the next token of each row of logits.

        logits [num_requests, vocab_size]; a row is of the slot `slots[row]` (int32; -1: none). The token is the most
        likely one, or what `sampling.draw` draws, as `samplings[slot]` (`sampling.PARAMETERS`) says. What the draw
        weighs and its noise are fp32, within the last bits of NumPy's: each ratio of the two within 2^-19 of it. The
        set that top-p keeps may end a token earlier or later for the same reason. out: found, tokens, positions. The
        token goes into found [slots] int32, -1 for one that is NaN or infinite, and into tokens [slots], 0 for that;
        positions [slots] becomes `held[row]` + 1, or 0 where that is `limit`, which no token may have. held
        [num_requests]: the positions of the tokens that the logits follow; it may be `positions`. Raises CheckError for
        more than 2^20 tokens.
        """
        count, size = logits.shape
        if size > _MOST_TOKENS:
            raise CheckError(
                f"vocab_size: expected at most {_MOST_TOKENS} for the kernel that samples, found {size}; use the "
                "backend onnxruntime"
            )
        given = logits, NUMBERS[logits.dtype.name], size, slots, held, limit, samplings
        self._advance.launch(stream, count, _THREADS, *given, *out, self.wide)

    def largest(self, stream: Stream, part: Array, first: int, slots: Array, told: Array) -> None:
        """Find the largest logit of each row of a rank's part of the logits.

        part [num_requests, columns], of tokens `first` on; of equal ones the first counts. told [num_requests, 2]: the
        logit float32 (infinity for NaN) and the bits of the token's id int32. Rows without a slot (`slots[row]` -1) get
        nothing.
        """
        count, columns = part.shape
        number = NUMBERS[part.dtype.name]
        self._largest.launch(stream, count, _THREADS, part, number, columns, first, slots, told)

    def choose(self, stream: Stream, told: Array, slots: Array, held: Array, limit: int, *out: Array) -> None:
        """Choose greedy rows' tokens from told [num_requests, 2 * ranks] (`largest`); write what `advance` writes."""
        count, columns = told.shape
        self._choose.launch(stream, count, 32, told, columns // 2, slots, held, limit, *out, self.wide)
