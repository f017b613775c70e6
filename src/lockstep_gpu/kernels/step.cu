// Cache writes, and masks of adapters.
#include "numbers.cuh"

// One block a token and head. Sizes are counted in units of T. A token of row -1 is not written.
template <typename T>
__device__ void write_cache(const T* key, const T* value, T* keys, T* values, const int* rows, const void* positions,
                            int wide, int capacity, int heads, int key_size, int value_size) {
    int token = blockIdx.x, head = blockIdx.y, row = rows[token];
    if (row < 0) return;
    long long place = ((long long)row * heads + head) * capacity + integer(positions, wide, token);
    long long from = (long long)token * heads + head;
    for (int i = threadIdx.x; i < key_size; i += blockDim.x) keys[place * key_size + i] = key[from * key_size + i];
    for (int i = threadIdx.x; i < value_size; i += blockDim.x)
        values[place * value_size + i] = value[from * value_size + i];
}

// One block a token: 1 in the columns of its adapter, else 0. kind: as `number`'s.
extern "C" __global__ void adapter_mask(const void* ids, int wide, void* mask, int kind, int columns, int rank) {
    long long id = integer(ids, wide, blockIdx.x), first = (long long)blockIdx.x * columns;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        bool is_own = i / rank == id;
        if (kind == 0) ((float*)mask)[first + i] = is_own ? 1.0f : 0.0f;
        else ((unsigned short*)mask)[first + i] = is_own ? (kind == 1 ? 0x3c00 : 0x3f80) : 0;
    }
}

#define WRITE(NAME, T) \
    extern "C" __global__ void NAME(const T* key, const T* value, T* keys, T* values, const int* rows, \
                                    const void* positions, int wide, int capacity, int heads, int key_size, \
                                    int value_size) { \
        write_cache<T>(key, value, keys, values, rows, positions, wide, capacity, heads, key_size, value_size); \
    }
WRITE(write_cache_2, unsigned short)
WRITE(write_cache_16, uint4)
