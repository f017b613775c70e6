"""The kernels of adapters that are measured beside the form in the graph: their source, compiled for the host, beside
NumPy; and how they are measured, on the fake GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from benchmarks import sgmv

import fake_gpu

TESTS = Path(__file__).parents[1]
COMPILER = shutil.which("c++") or shutil.which("g++")
SOURCE = """
#define BLOCK_THREADS 128
#include "fake_gpu/host_block.h"
struct uint4 { unsigned x, y, z, w; };
float wide(unsigned short bits) { return (float)as<_Float16>(bits); }
unsigned short narrow(float value) { return as<unsigned short>((_Float16)value); }
#include "KERNEL"
extern "C" void shrink(int blocks, const uint4* x, const uint4* a, const int* rows, const int* starts,
                       const int* adapters, float* shrunk, int columns, int units) {
    launch(blocks, [=] { sgmv_shrink(x, a, rows, starts, adapters, shrunk, columns, units); });
}
extern "C" void expand(int blocks, const float* shrunk, const uint4* b, const int* rows, const int* starts,
                       const int* adapters, unsigned short* y, int columns, int out_features, int second, int third) {
    launch(blocks, [=] { sgmv_expand(shrunk, b, rows, starts, adapters, y, columns, out_features, second, third); });
}
"""


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_each_row_gets_what_its_adapter_adds(tmp_path):
    """Segments of one, several and no rows; layers of several sizes; a number of columns that no block ends at."""
    (tmp_path / "kernel.cpp").write_text(SOURCE.replace("KERNEL", str(Path(sgmv.__file__).with_name("sgmv.cu"))))
    command = [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{TESTS}", "kernel.cpp", "-o", "kernel.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    kernel = ctypes.CDLL(str(tmp_path / "kernel.so"))
    random, deep, outs, adapters = np.random.default_rng(0), 1048, (96, 160, 40), 4
    ids = [2, -1, 0, 2, 2, 3, 2, -1, 2, 0]
    numbers = lambda *shape: random.standard_normal(shape, np.float32).astype(np.float16)
    x, y = numbers(len(ids), deep), numbers(len(ids), sum(outs))
    a, b = numbers(adapters, 16 * len(outs), deep) / np.float16(32), numbers(adapters, sum(outs), 16)
    right = sgmv.expected(x, a, b, y, ids, outs)
    order = sgmv.segments(ids)
    assert [array.tolist() for array in order] == [[2, 9, 0, 3, 4, 6, 8, 5], [0, 2, 7, 8], [0, 2, 3]]
    columns, shrunk = 16 * len(outs), np.full((len(ids), 16 * len(outs)), np.nan, np.float32)
    address = lambda *arrays: [ctypes.c_void_p(array.ctypes.data) for array in arrays]
    kernel.shrink(3 * columns, *address(x, a, *order, shrunk), columns, deep // 8)
    tiles = -(-sum(outs) // 128)
    before = y.copy()
    kernel.expand(3 * tiles, *address(shrunk, b, *order, y), columns, sum(outs), *sgmv.bounds(outs))
    assert np.abs(y - right).max() < sgmv.TOLERANCE * np.abs(right).max() < np.abs(right - before).max()
    assert np.array_equal(y[[1, 7]], before[[1, 7]])


def test_the_measurement_runs_and_finds_a_wrong_result(monkeypatch):
    groups = {"qkv": (64, (64, 32, 32)), "o": (64, (64,)), "gate_up": (64, (160, 160)), "down": (160, (64,))}
    with fake_gpu.installed("8.6.0") as gpu:
        found = sgmv.measure(groups, 3)
        assert set(found["groups"]) == set(groups) and found["layer_us"] > 0 and found["error"] < sgmv.TOLERANCE
        monkeypatch.setattr(sgmv, "segments", lambda ids: _SEGMENTS([max(0, each - 1) for each in ids]))
        with pytest.raises(sgmv.CheckError, match="sgmv: qkv: expected outputs within"):
            sgmv.measure(groups, 3)
    assert not gpu.faults


_SEGMENTS = sgmv.segments
