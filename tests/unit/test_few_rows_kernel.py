"""The kernel of a few rows with fp16 weights, compiled for the host: the source that a GPU runs, beside NumPy."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).parents[1]
KERNEL = TESTS.parent / "src" / "lockstep" / "gpu" / "kernels" / "few_rows.cu"
COMPILER = shutil.which("c++") or shutil.which("g++")
# ldmatrix and mma.m16n8k16 by their layouts in the PTX manual, lane by lane.
SOURCE = r"""
#define ON_HOST
#define BLOCK_THREADS 128
#include "fake_gpu/host_block.h"
typedef unsigned int u32;
inline int min(int a, int b) { return a < b ? a : b; }
inline float number(unsigned short bits) { return (float)as<_Float16>(bits); }
inline unsigned short half(float value) { return as<unsigned short>((_Float16)value); }
inline float part(u32 pair, int high) { return number(high ? pair >> 16 : pair & 0xffff); }
inline void next_may_start() {}
inline void wait_for_previous() {}
inline void commit() {}
inline void wait_for_stage() {}
static unsigned char memory[1 << 17];
inline u32 shared_memory() { return 0; }
inline void copy_async(u32 to, const void* from, bool in) {
    in ? memcpy(memory + to, from, 16) : memset(memory + to, 0, 16);
}
void load_matrices(u32 from, u32* r) {
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) {
        const u32 row = exchange(from, threadIdx.x - lane + i * 8 + lane / 4);
        memcpy(&r[i], memory + row + lane % 4 * 4, 4);
    }
}
static u32 held[BLOCK_THREADS / 32][32][6];
void mma(float* d, const u32* a, const u32* b) {
    const int self = threadIdx.x, lane = self % 32, row = lane / 4, four = lane % 4;
    auto& all = held[self / 32];
    const u32 own[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    memcpy(all[lane], own, sizeof(own));
    host_block::wait(host_block::warps[self / 32]);
    for (int i = 0; i < 4; i++) {
        const int column = four * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            const u32 left = all[row * 4 + k % 8 / 2][k / 8 * 2 + i / 2];
            const u32 right = all[column * 4 + k % 8 / 2][4 + k / 8];
            d[i] += part(left, k % 2) * part(right, k % 2);
        }
    }
    host_block::wait(host_block::warps[self / 32]);
    threadIdx.x = self;
}
#include "KERNEL"
#define RUN(NAME) extern "C" void run_##NAME( \
    int blocks, const unsigned short* weight, const unsigned short* x, unsigned short* first, unsigned short* second, \
    unsigned short* third, int end, int ends, int outs, int ins, int rows) { \
    launch(blocks, [=] { NAME(weight, x, first, second, third, end, ends, outs, ins, rows); }); }
RUN(few_rows_8)
RUN(few_rows_16)
"""

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "few.cpp").write_text(SOURCE.replace("KERNEL", str(KERNEL)))
    flags = ["-std=c++17", "-O2", "-w", "-shared", "-fPIC", f"-I{TESTS}", "few.cpp", "-o", "few.so"]
    done = subprocess.run([COMPILER, *flags], cwd=folder, capture_output=True, text=True)
    if "_Float16" in done.stderr:
        pytest.skip("the compiler has no _Float16")
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "few.so"))


@pytest.mark.parametrize(("most", "rows"), [(8, 1), (8, 5), (8, 8), (16, 9), (16, 16)])
@pytest.mark.parametrize("columns", [1352, 40])
def test_each_output_is_accumulated_in_order(library, most, rows, columns):
    """Rows and outputs that are no whole number of blocks, columns that are no whole number of stages, three weights of
    one input. To the bit: accumulated in fp32 from the first column to the last, as the kernel's definition says."""
    random, outs = np.random.default_rng(most + rows + columns), (24, 13, 8)
    total, ends = sum(outs), np.cumsum(outs)
    weight = (random.standard_normal((total, columns)) / 8).astype(np.float16)
    x = random.standard_normal((rows, columns)).astype(np.float16)
    found = [np.full((rows + 1, size), 7, np.float16) for size in outs]
    pointer = lambda array: ctypes.c_void_p(array.ctypes.data)
    sizes = (int(ends[0]), int(ends[1]), total, columns, rows)
    run = getattr(library, f"run_few_rows_{most}")
    run(-(-total // 32), pointer(weight), pointer(x), *map(pointer, found), *sizes)
    expected = np.zeros((rows, total), np.float32)
    for column in range(columns):
        expected += x[:, column, None].astype(np.float32) * weight[:, column].astype(np.float32)
    for part, low, high in zip(found, (0, *ends), ends):
        assert np.array_equal(part[:-1], expected[:, low:high].astype(np.float16))
        assert (part[-1] == 7).all()
