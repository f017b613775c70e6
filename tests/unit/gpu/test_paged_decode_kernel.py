"""The decode attention kernel, compiled for the host: the source that a GPU runs, with caches of fp16 and of fp8. Its
tensor-core products are those of `fake_gpu/host_attention.h`."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fp8_pages import PAGE, decode, encode, heads_of

TESTS = Path(__file__).parents[2]
sys.path.append(str(TESTS / "gpu"))
from test_gpu_kernels import Rows, decoding  # noqa: E402

KERNELS = TESTS.parent / "src" / "lockstep_gpu" / "kernels"
COMPILER = shutil.which("c++") or shutil.which("g++")
SOURCE = """
#define BLOCK_THREADS THREADS
#include "fake_gpu/host_block.h"
#include "fake_gpu/host_numbers.h"
#include "fake_gpu/host_attention.h"
#include "FILE"
extern "C" void run(int shares, int requests, const QK* query, const QK* key, const Bits* value, Bits* out,
                    void* keys, void* values, const float* own, const float* other, const int* partner,
                    const int* rows, const int* positions, const int* pages, int pages_per_row, float scale,
                    float* partials, float* stats, int* counters) {
    gridDim = {shares, KV_HEADS * CHUNKS, requests};
    for (blockIdx.z = 0; blockIdx.z < requests; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
            launch(shares, [=] { decode_attention(query, key, value, out, (CACHED*)keys, (CACHED*)values, own, other,
                                                  partner, rows, positions, pages, pages_per_row, scale, partials,
                                                  stats, counters); });
}
"""

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
long = pytest.mark.long


def address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


# KV heads, query heads of each, sizes of keys and values, and what else is not as usual.
@pytest.mark.parametrize(
    "kv_heads, group, sizes, lengths, shares, options",
    [
        (1, 4, (64, 64), (1, 63, 0, 65), 1, {}),
        (2, 4, (128, 128), (1, 63, 0, 64, 200), 1, {"fp8": True, "softcap": 2.0, "separate_rope": True}),
        pytest.param(1, 4, (128, 128), (200, 300, 17), 2, {"fp8": True, "query_dtype": "float32"}, marks=long),
        pytest.param(1, 3, (40, 24), (1, 65, 130), 1, {"fp8": True}, marks=long),  # loads of 8 bytes
        pytest.param(1, 8, (64, 64), (1, 130, 300), 2, {"fp8": True, "window": 100, "sinks": True}, marks=long),
        pytest.param(1, 5, (256, 256), (130, 64), 1, {"fp8": True}, marks=long),
        pytest.param(1, 5, (512, 512), (130, 64), 1, {}, marks=long),
        (2, 5, (96, 40), (1, 63, 0, 64, 200), 2, {"dtype": "float32", "query_dtype": "float32", "softcap": 2.0}),
        pytest.param(
            *(1, 3, (40, 24), (1, 65, 130), 1),
            {"dtype": "float32", "query_dtype": "float32", "window": 50, "sinks": True, "separate_rope": True},
            marks=long,
        ),
        pytest.param(1, 12, (80, 96), (1, 65, 200), 2, {"fp8": True}, marks=long),
    ],
)
def test_rows_attend_to_what_their_pages_hold(tmp_path, kv_heads, group, sizes, lengths, shares, options):
    """As on a GPU (tests/gpu/test_gpu_kernels.py): the cache after a row's tokens is NaN."""
    spec = SimpleNamespace(**decoding(group=group, kv_heads=kv_heads, dim=sizes[0], value_dim=sizes[1]))
    vars(spec).update({"sinks": False, "fp8": False} | options)
    head_group = min(group, 4 if spec.head_dim > 128 else 8)
    values = {
        "KIND": int(spec.dtype == "float16"), "QK_KIND": int(spec.query_dtype == "float16"), "WIDE": 0,
        "KV_HEADS": kv_heads, "GROUP": group,
        "HEADS": head_group, "DIM": spec.head_dim, "VALUE_DIM": spec.value_dim, "WINDOW": spec.window,
        "SINKS": int(spec.sinks), "FP8": int(spec.fp8), "SEPARATE": int(spec.separate_rope), "PAGE": PAGE,
        "THREADS": 128, "BY_ROW": 0, "SOFTCAP": int(np.float32(spec.softcap).view(np.uint32)),
    }  # fmt: skip
    file = "paged_decode.cu" if spec.dtype == "float16" else "float32_decode.cu"
    cached = "Cached" if spec.dtype == "float16" else "Bits"
    (tmp_path / "kernel.cpp").write_text(SOURCE.replace("FILE", file).replace("CACHED", cached))
    flags = ["-std=c++17", "-O1", "-w", "-fpermissive", "-shared", "-fPIC", "-Wl,-Bsymbolic"]
    flags += [f"-I{TESTS}", f"-I{KERNELS}", *(f"-D{name}={value}" for name, value in values.items())]
    subprocess.run([COMPILER, *flags, "kernel.cpp", "-o", "kernel.so"], cwd=tmp_path, check=True)
    count = len(lengths)
    paged = Rows(spec, count, -(-max(lengths) // PAGE))
    caches = paged.caches(lengths)
    rows = np.where(np.array(lengths) > 0, np.arange(count), -1).astype(np.int32)
    positions = np.maximum(0, np.array(lengths) - 1).astype(np.int32)
    out = np.full((count, spec.heads, spec.value_dim), np.nan, spec.dtype)
    groups = count * kv_heads * -(-group // head_group)
    scratch = [np.zeros(groups * 16 * head_group * size, np.float32) for size in (spec.value_dim, 2)]
    arrays = (paged.query, paged.key, paged.value, out, *caches, paged.own, paged.other, paged.partner, rows, positions)
    scale = ctypes.c_float(paged.SCALE * np.log2(np.e))
    counters = np.zeros(groups, np.int32)
    kernel = ctypes.CDLL(str(tmp_path / "kernel.so")).run
    kernel(
        shares, count, *map(address, (*arrays, paged.table)), paged.pages_per_row, scale,
        *map(address, (*scratch, counters)),
    )  # fmt: skip
    with_rope = paged.with_rope(paged.query, positions, is_key=False)
    keys = paged.with_rope(paged.key, positions, is_key=True).astype(spec.dtype)
    numbers = [heads_of(cache) for cache in caches] if spec.fp8 else caches
    expected, allowed = paged.expected(lengths, with_rope.astype(spec.dtype), numbers)
    assert (np.abs(out.astype(np.float64) - expected) <= allowed).all()
    for row in np.flatnonzero(rows >= 0):  # the new token is in its page too
        page = paged.table[row, positions[row] // PAGE]
        at = positions[row] % PAGE
        for cache, new, eps in ((numbers[0], keys[row], 2**-10), (numbers[1], paged.value[row], 0)):
            cached_values = decode(*encode(new)) if spec.fp8 else new
            # fp16 may round the key's sum the other way, and e4m3 what came of that.
            np.testing.assert_allclose(
                cache[page, :, at].astype(np.float32), cached_values, rtol=eps * 128 if spec.fp8 else eps, atol=eps
            )
