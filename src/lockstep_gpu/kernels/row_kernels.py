"""CUDA kernels of the operators between GEMMs: residual additions, activation functions, norms.

In: a piece of a graph that was cut at its GEMMs (`onnx_tools.cut_products`), whose values are rows, one for each token
or request. Out: CUDA C++ of one kernel that computes the piece, with one block per row if something is accumulated over
the row, else several. Values are float32 in registers and rounded when they are stored. A value that two loops read is
loaded twice, from the cache: rows are a few kilobytes.

The source depends on the graph only: the same graph gives the same bytes anywhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lockstep_gpu.kernels.numbers import NUMBERS

# The start of kernels for `cuda.Launch.overlaps`: a kernel may be scheduled while the previous one runs, so it must not
# touch what that one writes or reads before `wait_for_previous`.
COMMON = (
    NUMBERS
    + r"""
#ifndef ON_HOST  // where the test has its own
__device__ __forceinline__ void next_may_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}
#endif
"""
)
PRELUDE = (
    COMMON
    + r"""
#ifndef ON_HOST  // where the test has its own
// The pieces of a row, or of a part of it, that a thread has.
#define EACH(v, count) for (int v = chunk * THREADS + threadIdx.x; v < count; v += BLOCKS * THREADS)
#define EACH_GROUP(group, count) for (int group = threadIdx.x / 32; group < count; group += THREADS / 32)
#define EACH_OF_GROUP(v, count) for (int v = threadIdx.x % 32; v < count; v += 32)
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
    return value;
}
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, mask));
    return value;
}
template <int WARPS> __device__ __forceinline__ float block_sum(float value) {
    __shared__ float sums[WARPS];
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) total += sums[warp];
    __syncthreads();
    return total;
}
#endif
struct alignas(16) Eight { unsigned short v[8]; };
struct alignas(16) WideFour { float v[4]; };

__device__ __forceinline__ void load8(const unsigned short* __restrict__ from, float* to) {
    Eight held = *(const Eight*)from;
#pragma unroll
    for (int j = 0; j < 8; j++) to[j] = number(held.v[j]);
}
__device__ __forceinline__ void store8(unsigned short* to, const float* from) {
    Eight held;
#pragma unroll
    for (int j = 0; j < 8; j++) held.v[j] = narrow(from[j]);
    *(Eight*)to = held;
}
// Of rows that are float32 already: the residual stream.
__device__ __forceinline__ float number(float value) { return value; }
__device__ __forceinline__ void load8(const float* __restrict__ from, float* to) {
    WideFour held[2] = {((const WideFour*)from)[0], ((const WideFour*)from)[1]};
#pragma unroll
    for (int j = 0; j < 8; j++) to[j] = held[j / 4].v[j % 4];
}
__device__ __forceinline__ void store8(float* to, const float* from) {
    WideFour held[2];
#pragma unroll
    for (int j = 0; j < 8; j++) held[j / 4].v[j % 4] = from[j];
    ((WideFour*)to)[0] = held[0];
    ((WideFour*)to)[1] = held[1];
}
__device__ __forceinline__ long long integer(const void* values, int wide, long long i) {
    return wide ? ((const long long*)values)[i] : ((const int*)values)[i];
}
"""
)
E4M3 = Path(__file__).with_name("e4m3.cu").read_text(encoding="utf-8")  # for kernels with quantized outputs
# Kinds of arguments: see `RowKernel`.
ROWS = "rows"
INDEX = "index"
CHOICES = "choices"
WEIGHT = "weight"
INTEGERS = "integers"
SCALES = "scales"
OF_WEIGHTS = (WEIGHT, INTEGERS, SCALES)
SCALES_TIMES = 256.0  # kernels expect scales of quantized weights times this, to keep them out of fp16's subnormals
_WIDE = 8  # elements in 16 bytes
WAIT = "wait_for_previous();"


@dataclass(frozen=True)
class RowKernel:
    """A kernel of a piece, as CUDA C++, and its arguments.

    Attributes:
        arguments: (name, kind) of each input, in order. By kind the kernel takes
            ROWS: an array [rows, ...] of 16 bits, or float32 if `wide`, and the elements from one row to the next;
            INDEX: integers [rows], and whether they are 64 bits wide;
            CHOICES: int32 [rows, ...], and the elements from one row to the next;
            WEIGHT: an array of 16 bits, or float32 if `wide`;
            INTEGERS, SCALES: those of a quantized weight, as GEMMs read them.
        outputs: Names of the outputs, which follow as ROWS, or as CHOICES if they are integers.
        rows: The name of the dimension that is the number of rows.
        blocks: Thread blocks for each row.
        quantized: Outputs that the kernel also quantizes to e4m3. Codes uint8 [rows, ...] and steps float32 [rows] of
            each are the last arguments (e4m3.cu).
        wide: Arguments and outputs that are float32.
    """

    name: str
    source: str
    arguments: tuple[tuple[str, str], ...]
    outputs: tuple[str, ...]
    rows: str
    blocks: int
    threads: int
    quantized: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()

    def summing(self, name: str, width: int) -> str | None:
        """Return the source of a kernel that first all-reduces an argument of rows (sums.cu); width: of its rows.

        Returns None if a block reads other rows than its own, or several blocks read one row.
        """
        number = [argument for argument, _ in self.arguments].index(name)
        uses = re.findall(rf"\bin{number}\b", self.source)
        row = f"in{number} + row * step{number}"
        # All uses must be the declaration and reads of the block's own row.
        if self.blocks > 1 or width % _WIDE or len(uses) != 1 + self.source.count(f"{row} + "):
            return None
        parameters = ", const void* peers, void* state, void* lost, int rank, int slot, int seconds"
        source = self.source.replace(") {", f"{parameters}) {{", 1)
        row_sum = f"RowSum<{width // _WIDE}, THREADS> sum({{peers, state, lost, rank, slot, seconds}}, {row}, row);"
        return source.replace(WAIT, f"{WAIT}\n    {row_sum}\n    in{number} = sum.numbers, step{number} = 0;", 1)
