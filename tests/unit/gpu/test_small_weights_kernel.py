"""The kernel that reads small weights, compiled for the host: the source that a GPU runs, against NumPy."""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from test_few_rows_kernel import aligned

from lockstep.weights.groups import dequantize
from some import some

TESTS = Path(__file__).parents[2]
KERNEL = TESTS.parent / "src" / "lockstep_gpu" / "kernels" / "small_weights.cu"
COMPILER = shutil.which("c++") or shutil.which("g++")
# fp16 pairs by the compiler's own type.
SOURCE = r"""
#define ON_HOST
#include "fake_gpu/host_block.h"
typedef unsigned int u32;
struct uint4 { u32 x, y, z, w; };
struct uint2 { u32 x, y; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
#include "fake_gpu/host_numbers.h"
#include "numbers.cuh"
#include "fake_gpu/host_mma.h"
template <typename F> u32 pairs(F f) { return narrow(f(0)) | (u32)narrow(f(1)) << 16; }
inline u32 hsub2(u32 a, u32 b) { return pairs([=](int i) { return part(a, i) - part(b, i); }); }
inline u32 hmul2(u32 a, u32 b) { return pairs([=](int i) { return part(a, i) * part(b, i); }); }
inline u32 hfma2(u32 a, u32 b, u32 c) { return pairs([=](int i) { return part(a, i) * part(b, i) + part(c, i); }); }
inline u32 mask_or(u32 a, u32 mask, u32 bits) { return a & mask | bits; }
inline uint4 load_streaming(const uint4* from) { return *from; }
inline uint4 load_streaming_prefetch(const uint4* from) { return *from; }
inline void next_may_start() {}
inline void wait_for_previous() {}
static Index blockDim{BLOCK_THREADS};
void mma(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { mma_16816(d, {a0, a1, a2, a3, b0, b1}); }
#include "KERNEL"
#define RUN(NAME) extern "C" void run_##NAME( \
    int blocks, const uint4* weight, const unsigned short* scales, const uint4* x, unsigned short* first, \
    unsigned short* second, unsigned short* third, int end, int ends, int outs, int ins, int group, int rows) { \
    launch(blocks, [=] { NAME(weight, scales, x, first, second, third, end, ends, outs, ins, group, rows); }); }
"""

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


# Each form: bits, rows at most, outputs and threads of a block.
FORMS = {
    name: (int(bits), int(max_rows), int(outputs), int(threads))
    for name, bits, outputs, max_rows, threads in re.findall(
        r"^GEMV\((gemv_(\d+)_(\d+)_\d+_(\d+)),.* (\d+)\)$", KERNEL.read_text(), re.MULTILINE
    )
}


@functools.cache
def library(folder: Path, threads: int) -> ctypes.CDLL:
    """The forms with blocks of that many threads, and no other: the compiler meets each form once."""
    names = [name for name, form in FORMS.items() if form[-1] == threads]
    lines = KERNEL.read_text().splitlines(keepends=True)
    kept_lines = (line for line in lines if not line.startswith("GEMV(") or line[5:].partition(",")[0] in names)
    kernel = folder / f"{threads}.cu"
    stem = f"of_{threads}"
    kernel.write_text("".join(kept_lines))
    source = SOURCE.replace("KERNEL", str(kernel)) + "".join(f"RUN({name})\n" for name in names)
    (folder / f"{stem}.cpp").write_text(f"#define BLOCK_THREADS {threads}\n{source}")
    flags = ["-std=c++17", "-O2", "-w", "-shared", "-fPIC", f"-I{TESTS}", f"-I{KERNEL.parent}"]
    flags += [f"{stem}.cpp", "-o", f"{stem}.so"]
    done = subprocess.run([COMPILER, *flags], cwd=folder, capture_output=True, text=True)
    if "_Float16" in done.stderr:
        pytest.skip("the compiler has no _Float16")
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / f"{stem}.so"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernel")


@pytest.fixture(scope="module", params=some([((4, 8),), ((4, 16),), ((8, 8),), ((8, 16),)]), ids=str)
def kernels(request, folder):
    """(bits, rows at most, (outputs of a block, kernel) of each form)"""
    results = [
        (outputs, getattr(library(folder, threads), f"run_{name}"))
        for name, (*form, outputs, threads) in FORMS.items()
        if tuple(form) == request.param
    ]
    assert len(results) in (2, 3)  # products.py has two or three forms of each
    return *request.param, results


@pytest.mark.parametrize("smallest", [True, False])
def test_each_row_is_multiplied_by_each_weight(kernels, smallest):
    """Rows that are no whole number of blocks; a row of a weight that is no whole number of a warp's turns, several or
    less than one; three weights of one input; the smallest groups that the kernel takes, and larger."""
    bits, max_rows, forms = kernels
    group = 128 // bits if smallest else 128
    random = np.random.default_rng(bits + group)
    outs = (24, 13, 8)
    columns = 1152
    total = sum(outs)
    ends = np.cumsum(outs)
    stored = aligned(random.integers(0, 256, (total, columns // group, group * bits // 8), np.uint8))
    exact = (random.standard_normal((total, columns // group)) * 2.0**-bits / 8).astype(np.float16)
    scales = aligned((exact.astype(np.float32) * 256).astype(np.float16))
    weight = dequantize(stored, exact.astype(np.float32), group)

    def pointer(array: np.ndarray) -> ctypes.c_void_p:
        return ctypes.c_void_p(array.ctypes.data)

    for rows, (outputs, kernel) in itertools.product((1, 5, 8) if max_rows == 8 else (9, 16), forms):
        x = aligned(random.standard_normal((rows, columns)).astype(np.float16))
        actual = [np.full((rows + 1, size), 7, np.float16) for size in outs]
        sizes = (int(ends[0]), int(ends[1]), total, columns, group, rows)
        kernel(-(-total // outputs), pointer(stored), pointer(scales), pointer(x), *map(pointer, actual), *sizes)
        expected = x.astype(np.float32) @ weight.T
        product = np.concatenate([array[:rows] for array in actual], axis=1).astype(np.float32)
        # Weights are rounded to fp16 with their scale, results are fp16.
        assert np.abs(product - expected).max() <= 2e-3 * np.abs(expected).max(), (rows, outputs)
        assert all((array[rows] == 7).all() for array in actual)
