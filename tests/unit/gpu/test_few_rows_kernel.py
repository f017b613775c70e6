"""Lockstep's tensor-core kernels, compiled for the host from the GPU's source, compared with NumPy."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fake_gpu.compiled import CODE_OF
from lockstep.weights import e4m3
from lockstep.weights.groups import dequantize
from lockstep.weights.mxfp4 import mxfp4_numbers
from lockstep_gpu.kernels.library import KINDS

TESTS = Path(__file__).parents[2]
KERNELS = TESTS.parent / "src" / "lockstep_gpu" / "kernels"
E4M3_TYPE = np.dtype(ml_dtypes.float8_e4m3fn)
HALF = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
COMPILER = shutil.which("c++") or shutil.which("g++")
# ldmatrix by its layout in the PTX manual, lane by lane.
SOURCE = r"""
#define ON_HOST
#include "fake_gpu/host_block.h"
#include <cmath>
inline int min(int a, int b) { return a < b ? a : b; }
#include "fake_gpu/host_numbers.h"
#include "numbers.cuh"
#include "fake_gpu/host_mma.h"
inline void next_may_start() {}
inline void wait_for_previous() {}
inline void cp_async_commit() {}
template <int GROUPS> void cp_async_wait() {}
static unsigned char memory[3 << 16];
inline u32 shared_memory() { return 0; }
inline void cp_async(u32 to, const void* from, bool in) {
    in ? memcpy(memory + to, from, 16) : memset(memory + to, 0, 16);
}
void ldmatrix(u32 from, u32* r) {
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) {
        const u32 row = exchange(from, threadIdx.x - lane + i * 8 + lane / 4);
        memcpy(&r[i], memory + row + lane % 4 * 4, 4);
    }
}
void mma(float* d, const u32* a, const u32* b) { mma_16816(d, {a[0], a[1], a[2], a[3], b[0], b[1]}); }
"""
HALVES = r"""
#include "few_rows.cu"
#define RUN(NAME) extern "C" void run_##NAME( \
    int blocks, const unsigned short* weight, const unsigned short* x, unsigned short* first, unsigned short* second, \
    unsigned short* third, int end, int ends, int outs, int ins, int rows) { \
    gridDim.x = blocks; \
    launch(blocks, [=] { NAME(weight, x, first, second, third, end, ends, outs, ins, rows); }); }
RUN(few_rows_8) RUN(few_rows_16) RUN(few_rows_32) RUN(few_rows_64) RUN(many_rows)
"""
EXPERT_ROWS = r"""
void ldmatrix_trans(u32 from, u32* r) {
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 8; i++) {
        const u32 row = exchange(from, threadIdx.x - lane + i / 2 * 8 + lane % 4 * 2 + i % 2);
        memcpy((unsigned short*)r + i, memory + row + lane / 4 * 2, 2);
    }
}
#include "expert_rows.cuh"
"""
SORT = (
    EXPERT_ROWS
    + r"""
#include "sort_by_expert.cu"
extern "C" void run_sort(const int* ids, int* order, Tile* tiles, int experts, int tile_rows, int rows) {
    launch(1, [=] { sort_by_expert(ids, order, tiles, experts, tile_rows, rows); });
}
"""
)
EXPERTS = (
    EXPERT_ROWS
    + r"""
#include "expert_products.cu"
#define RUN(NAME) extern "C" void run_##NAME( \
    int blocks, const unsigned short* weight, const unsigned short* x, unsigned short* out, const int* order, \
    const Tile* tiles, int rows_per_input, int outs, int ins, int output_blocks) { \
    launch(blocks, [=] { NAME(weight, x, out, order, tiles, rows_per_input, outs, ins, output_blocks); }); }
RUN(experts_8) RUN(experts_16) RUN(experts_64) RUN(experts_128)
RUN(across_8) RUN(across_16) RUN(across_64) RUN(across_128)
"""
)
SMALL_EXPERTS = (
    EXPERT_ROWS
    + r"""
inline u32 hsub2(u32 a, u32 b) { return narrow(part(a, 0) - part(b, 0)) | (u32)narrow(part(a, 1) - part(b, 1)) << 16; }
inline u32 hadd2(u32 a, u32 b) { return narrow(part(a, 0) + part(b, 0)) | (u32)narrow(part(a, 1) + part(b, 1)) << 16; }
inline float of_bits(u32 bits) { return as<float>(bits); }
#include "expert_small_weights.cu"
#define RUN(NAME) extern "C" void run_##NAME( \
    int blocks, const unsigned char* weight, const void* scales, const unsigned short* x, unsigned short* out, \
    const int* order, const Tile* tiles, int rows_per_input, int outs, int ins, int group, int output_blocks) { \
    launch(blocks, [=] { \
        NAME(weight, scales, x, out, order, tiles, rows_per_input, outs, ins, group, output_blocks); }); }
RUN(small_8_8) RUN(small_8_16) RUN(small_8_64) RUN(small_4_8) RUN(small_4_16) RUN(small_4_64)
RUN(e2m1_8) RUN(e2m1_16) RUN(e2m1_64)
#if KIND == 2
#define RUN_DENSE(NAME) extern "C" void run_##NAME( \
    int blocks, const unsigned char* weight, const void* scales, const unsigned short* x, unsigned short* out, \
    int outs, int ins, int group, int output_blocks, int rows) { \
    launch(blocks, [=] { NAME(weight, scales, x, out, outs, ins, group, output_blocks, rows); }); }
RUN_DENSE(dense_8_8) RUN_DENSE(dense_8_16) RUN_DENSE(dense_8_64)
RUN_DENSE(dense_4_8) RUN_DENSE(dense_4_16) RUN_DENSE(dense_4_64)
#endif
"""
)
FLOAT32 = (
    EXPERT_ROWS
    + r"""
#include "float32_products.cu"
#define RUN(NAME) extern "C" void run_##NAME( \
    int blocks, const float* weight, const Number* x, float* out, const int* order, const Tile* tiles, \
    int rows_per_input, int outs, int ins, int output_blocks) { \
    launch(blocks, [=] { NAME(weight, x, out, order, tiles, rows_per_input, outs, ins, output_blocks); }); }
RUN(experts_8) RUN(experts_16) RUN(experts_64) RUN(across_8) RUN(across_16) RUN(across_64)
#define RUN_DENSE(NAME) extern "C" void run_##NAME( \
    int blocks, const float* weight, const Number* x, float* out, int outs, int ins, int output_blocks, int rows) { \
    launch(blocks, [=] { NAME(weight, x, out, outs, ins, output_blocks, rows); }); }
RUN_DENSE(float32_8) RUN_DENSE(float32_16) RUN_DENSE(float32_64)
"""
)
E4M3 = (
    CODE_OF
    + r"""
inline float number_of(u32 code) {
    int exponent = (code >> 3 & 15) ? (code >> 3 & 15) : 1;
    float size = std::ldexp((float)((code & 7) + ((code >> 3 & 15) ? 8 : 0)), exponent - 10);
    return code & 0x80 ? -size : size;
}
inline u32 e4m3_to_half2(u32 codes) {
    return narrow(number_of(codes & 255)) | (u32)narrow(number_of(codes >> 8)) << 16;
}
inline int max(int a, int b) { return a < b ? b : a; }
inline u32 max(u32 a, u32 b) { return a < b ? b : a; }
template <int WARPS> u32 block_max(u32 value) {
    static u32 largest[WARPS];
    for (int mask = 16; mask; mask /= 2) value = max(value, __shfl_xor_sync(0, value, mask));
    largest[threadIdx.x / 32] = value;
    __syncthreads();
    for (int warp = 0; warp < WARPS; warp++) value = max(value, largest[warp]);
    return value;
}
#include "fp8_products.cu"
extern "C" void run_quantize_rows(int blocks, const unsigned short* x, unsigned char* codes, float* steps, int ins) {
    launch(blocks, [=] { quantize_rows(x, codes, steps, ins); });
}
#define RUN(NAME) extern "C" void run_##NAME( \
    int blocks, const unsigned char* weight, const float* scales, const unsigned char* x, const float* steps, \
    unsigned short* first, unsigned short* second, unsigned short* third, int end, int ends, int outs, int ins, \
    int rows) { \
    launch(blocks, [=] { NAME(weight, scales, x, steps, first, second, third, end, ends, outs, ins, rows); }); }
RUN(few_rows_fp8_8)
RUN(few_rows_fp8_16)
"""
)

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Kernels compiled with this number of threads a block."""
    folder = tmp_path_factory.mktemp("kernel")

    @functools.cache
    def compiled(kernels: str, threads: int, dtype: np.dtype = HALF) -> ctypes.CDLL:
        stem = f"of_{len(kernels)}_{threads}_{dtype}"
        sizes = f"#define BLOCK_THREADS {threads}\n#define KIND {KINDS[dtype.name]}\n"
        (folder / f"{stem}.cpp").write_text(f"{sizes}{SOURCE}{kernels}")
        flags = ["-std=c++17", "-O2", "-w", "-shared", "-fPIC", f"-I{TESTS}", f"-I{KERNELS}"]
        command = [COMPILER, *flags, f"{stem}.cpp", "-o", f"{stem}.so"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if "_Float16" in done.stderr:
            pytest.skip("the compiler has no _Float16")
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(folder / f"{stem}.so"))

    return compiled


def aligned(host: np.ndarray) -> np.ndarray:
    """A copy that starts where 16 bytes do."""
    room = np.empty(host.nbytes + 16, np.uint8)
    start = -room.ctypes.data % 16
    array = room[start : start + host.nbytes].view(host.dtype).reshape(host.shape)
    array[:] = host
    return array


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize(("max_rows", "rows"), [(8, 1), (8, 5), (8, 8), (16, 9), (16, 37), (32, 27), (64, 53)])
@pytest.mark.parametrize(("columns", "dtype"), [(1352, HALF), (40, HALF), (1352, BFLOAT16)], ids=str)
def test_each_output_is_accumulated_in_order(library, max_rows, rows, columns, dtype):
    """Rows and outputs that are no whole number of blocks, columns that are no whole number of stages, three weights of
    one input. To the bit: accumulated in fp32 from the first column to the last, as the kernel's definition says."""
    random = np.random.default_rng(max_rows + rows + columns)
    outs = (24, 13, 8)
    total = sum(outs)
    ends = np.cumsum(outs)
    weight = (random.standard_normal((total, columns)) / 8).astype(dtype)
    x = random.standard_normal((rows, columns)).astype(dtype)
    results = [np.full((rows + 1, size), 7, dtype) for size in outs]
    sizes = (int(ends[0]), int(ends[1]), total, columns, rows)
    kernel = f"few_rows_{max_rows}" if rows <= max_rows else "many_rows"
    run = getattr(library(HALVES, 128, dtype), f"run_{kernel}")
    run(-(-total // 32) * -(-rows // max_rows), pointer(weight), pointer(x), *map(pointer, results), *sizes)
    check(results, in_order(x, weight, range(columns)), (0, *ends))


class ExpertRows:
    """Rows of tokens, sorted by their experts: one without any, one with more than a tile."""

    def __init__(self, library, tile_rows: int, columns: int, dtype: np.dtype = HALF):
        random = np.random.default_rng(tile_rows)
        tokens = 50
        self.experts = 5
        self.per_token = 3
        chosen = random.random((tokens, self.per_token)) < 0.7
        ids = np.where(chosen, 1, random.choice([0, 2, 4], chosen.shape)).astype(np.int32)
        self.numbers = ids.reshape(-1)
        self.tile_rows = tile_rows
        self.x = aligned(random.standard_normal((tokens, columns)).astype(dtype))
        self.most = self.experts + (ids.size - self.experts) // tile_rows
        self.order = np.full(ids.size + 1, -7, np.int32)
        self.tiles = aligned(np.full((self.most + 1, 4), -7, np.int32))
        library(SORT, 1024).run_sort(*map(pointer, (ids, self.order, self.tiles)), self.experts, tile_rows, ids.size)

    def check(self, run, outputs: int, inputs: Sequence[np.ndarray], sizes: Sequence[int], expected) -> None:
        """expected: of an expert and the row [1, columns], its outputs in float32."""
        outs = sizes[0]
        count = self.numbers.size
        assert sorted(self.order[:-1]) == list(range(count)) and self.order[-1] == -7 and (self.tiles[-1] == -7).all()
        assert np.array_equal(self.numbers[self.order[:-1]], np.sort(self.numbers))
        out = aligned(np.full((count + 1, outs), 7, self.x.dtype))
        output_blocks = -(-outs // outputs)
        arrays = map(pointer, (*inputs, self.x, out, self.order, self.tiles))
        run(self.most * output_blocks, *arrays, self.per_token, *sizes, output_blocks)
        rows = [expected(self.numbers[row], self.x[[row // self.per_token]])[0] for row in range(count)]
        assert np.array_equal(out[:-1], np.array(rows).astype(out.dtype)) and (out[-1] == 7).all()


TILES = ((8, 128, 32), (16, 128, 32), (64, 256, 128), (128, 256, 128))  # rows, threads, outputs


@pytest.mark.long
@pytest.mark.parametrize(("kernel", "dtype"), [("experts", HALF), ("across", HALF), ("across", BFLOAT16)], ids=str)
@pytest.mark.parametrize(("tile_rows", "threads", "outputs"), TILES)
def test_rows_of_experts_are_accumulated_in_order(library, kernel, dtype, tile_rows, threads, outputs):
    """Outputs and columns that are no whole number of blocks."""
    rows = ExpertRows(library, tile_rows, 328, dtype)
    outs = 40
    columns = 328
    stack = (np.random.default_rng(0).standard_normal((rows.experts, outs, columns)) / 8).astype(dtype)
    stacks = [aligned(stack if kernel == "experts" else stack.swapaxes(1, 2))]
    run = getattr(library(EXPERTS, threads, dtype), f"run_{kernel}_{tile_rows}")
    rows.check(run, outputs, stacks, (outs, columns), lambda expert, x: in_order(x, stack[expert], range(columns)))


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["small_8", "small_4", "e2m1"])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT16], ids=str)
@pytest.mark.parametrize(("tile_rows", "threads", "outputs"), TILES[:3])
def test_rows_of_experts_are_accumulated_in_groups(library, kernel, dtype, tile_rows, threads, outputs):
    """GEMM over 32 columns as two of 16, of which each lane has contiguous ones; then times the scale."""
    outs = 40
    columns = 320
    group = 32 if kernel == "e2m1" else 64
    rows = ExpertRows(library, tile_rows, columns, dtype)
    random = np.random.default_rng(0)
    bits = 8 if kernel == "small_8" else 4
    shape = rows.experts, outs, columns // group
    data = aligned(random.integers(0, 256, (*shape, group * bits // 8), np.uint8))
    if kernel == "e2m1":
        scales = aligned(random.integers(120, 124, shape, np.uint8))
        numbers = mxfp4_numbers(data, np.full(shape, 127, np.uint8))
        factors = np.ldexp(1.0, scales.astype(int) - 127)
    else:
        scales = aligned((random.standard_normal(shape) / 2**bits).astype(np.float16))
        numbers = dequantize(data, np.ones(shape, np.float32), group)
        factors = scales / np.float64(256)
    pairs = np.array([(0, 4), (1, 5), (2, 6), (3, 7)] if bits == 4 else [(0, 1), (2, 3), (4, 5), (6, 7)])
    places = (np.arange(0, 32, 8)[:, None] + pairs[:, None]).reshape(-1)
    order_of_group = (np.arange(0, group, 32)[:, None] + places).reshape(-1)

    def expected(expert: int, x: np.ndarray) -> np.ndarray:
        sums = np.zeros((len(x), outs), np.float32)
        for at in range(columns // group):
            part = in_order(x, numbers[expert], at * group + order_of_group)
            sums = (part * factors[expert, :, at].astype(np.float64) + sums).astype(np.float32)
        return sums

    kernels = library(SMALL_EXPERTS, threads, dtype)
    run = getattr(kernels, f"run_{kernel}_{tile_rows}")
    rows.check(run, outputs, (data, scales), (outs, columns, group), expected)
    if dtype == BFLOAT16 and bits == int(kernel[-1]):  # all rows with one weight
        run = getattr(kernels, f"run_{kernel.replace('small', 'dense')}_{tile_rows}")
        check_dense(run, tile_rows, outputs, rows.x, (data[2], scales[2]), (outs, columns, group), expected(2, rows.x))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), HALF, BFLOAT16], ids=str)
@pytest.mark.parametrize(("tile_rows", "threads", "outputs"), TILES[:3])
def test_rows_times_float32_weights_are_accumulated_in_order(library, dtype, tile_rows, threads, outputs):
    """With one weight, and with those of experts, whose rows are float32 too."""
    outs = 45
    columns = 83
    rows = ExpertRows(library, tile_rows, columns, dtype)
    stack = aligned(np.random.default_rng(0).standard_normal((rows.experts, outs, columns), np.float32))
    kernels = library(FLOAT32, threads, dtype)

    def expected(expert: int, x: np.ndarray) -> np.ndarray:
        sums = np.zeros((len(x), outs), np.float32)
        for column in range(columns):  # fmaf: one rounding a column
            product = x[:, column, None].astype(np.float64) * stack[expert][:, column]
            sums = (product + sums).astype(np.float32)
        return sums

    run = getattr(kernels, f"run_float32_{tile_rows}")
    check_dense(run, tile_rows, outputs, rows.x, (stack[1],), (outs, columns), expected(1, rows.x), np.float32)
    if dtype == np.float32:
        for kernel, weight in (("experts", stack), ("across", aligned(stack.swapaxes(1, 2)))):
            rows.check(getattr(kernels, f"run_{kernel}_{tile_rows}"), outputs, [weight], (outs, columns), expected)


def check_dense(run, tile_rows: int, outputs: int, x, weights, sizes: Sequence[int], expected, dtype=BFLOAT16) -> None:
    """All rows but the last two, which stay as they are; expected: [rows, out_features] float32."""
    out = aligned(np.full((len(x), sizes[0]), 7, dtype))
    output_blocks = -(-sizes[0] // outputs)
    count = len(x) - 2
    run(output_blocks * -(-count // tile_rows), *map(pointer, (*weights, x, out)), *sizes, output_blocks, count)
    assert np.array_equal(out[:count], expected[:count].astype(dtype)) and (out[count:] == 7).all()


@pytest.mark.parametrize(("max_rows", "rows"), [(8, 5), (16, 16)])
@pytest.mark.parametrize("columns", [2576, 48])
def test_numbers_of_e4m3_are_accumulated_in_order(library, max_rows, rows, columns):
    """As those of fp16; of 16 columns the first two of each four come before the others."""
    random = np.random.default_rng(max_rows + rows + columns)
    outs = (24, 13, 8)
    total = sum(outs)
    ends = np.cumsum(outs)
    weight, x = (aligned(random.standard_normal((count, columns)).astype(E4M3_TYPE)) for count in (total, rows))
    scales = random.random(total, np.float32)
    steps = random.random(rows, np.float32)
    results = [np.full((rows + 1, size), 7, np.float16) for size in outs]
    sizes = (int(ends[0]), int(ends[1]), total, columns, rows)
    run = getattr(library(E4M3, 128), f"run_few_rows_fp8_{max_rows}")
    run(-(-total // 32), *map(pointer, (weight, scales, x, steps, *results)), *sizes)
    order = np.arange(columns).reshape(-1, 4, 2, 2).swapaxes(1, 2).reshape(-1)
    check(results, in_order(x, weight, order) * steps[:, None] * scales, (0, *ends))


def test_rows_become_e4m3_as_the_reference_makes_them(library):
    """Rows of any size, of zeros, of the largest number, with one that is not finite; to the bit."""
    random = np.random.default_rng(0)
    columns = 4112
    x = (random.standard_normal((8, columns)) * 10.0 ** np.array([-6, -3, -1, 0, 1, 2, 3, 4])[:, None]).astype(
        np.float16
    )
    x[0] = 0
    x[7, 5] = 65504
    x[3, :3] = (-0.0, 0.0, 2.0**-24)
    codes = aligned(np.zeros((10, columns), np.uint8))
    steps = np.zeros(10, np.float32)
    x = aligned(np.concatenate([x, np.full((2, columns), 1, np.float16)]))
    x[8, 7] = np.inf
    x[9, 7] = np.nan
    library(E4M3, 512).run_quantize_rows(10, pointer(x), pointer(codes), pointer(steps), columns)
    numbers, expected = e4m3.rounded(x[:8].astype(np.float32))
    assert np.array_equal(steps[:8, None], expected)
    assert np.array_equal(codes[:8], numbers.astype(E4M3_TYPE).view(np.uint8))
    assert (codes[8:, 7] & 127 == 127).all()  # NaN, which products are then


def in_order(x: np.ndarray, weight: np.ndarray, columns: Iterable[int]) -> np.ndarray:
    """Products in fp32, from one column to the next."""
    sums = np.zeros((len(x), len(weight)), np.float32)
    for column in columns:
        sums += x[:, column, None].astype(np.float32) * weight[:, column].astype(np.float32)
    return sums


def check(results: Sequence[np.ndarray], expected: np.ndarray, ends: Sequence[int]) -> None:
    for part, low, high in zip(results, ends, ends[1:]):
        assert np.array_equal(part[:-1], expected[:, low:high].astype(part.dtype))
        assert (part[-1] == 7).all()
