"""Kernels that are run from their source, compiled for the host: those that have no definition in NumPy.

One thread after another, or where threads of a block meet (`EACH` of rows.cuh) one that does the work of all.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fake_gpu.device import Fault, Gpu
from shared import Shared

_INCLUDE = re.compile(r'^#include "(\w+\.cuh?)"\n', re.MULTILINE)
COMPILER = shutil.which("c++") or shutil.which("g++")
# A number as e4m3, by its definition: four bits of exponent, bias 7, and three bits of the number.
CODE_OF = """
inline unsigned code_of(float value) {
    unsigned sign = std::signbit(value) << 7;
    if (!(value == value)) return sign | 0x7f;
    float size = std::fmin(std::fabs(value), 448.0f);
    int exponent;
    std::frexp(size, &exponent);
    exponent = size == 0 || exponent - 1 < -6 ? -6 : exponent - 1;
    return sign | ((exponent + 6) << 3) + (unsigned)std::nearbyint(std::ldexp(size, 3 - exponent));
}
inline unsigned short codes_of(float first, float second) { return code_of(first) | code_of(second) << 8; }
"""
_HEAD = """
#include <math.h>
#include <string.h>
#include <cmath>
#define ON_HOST
#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __restrict__
#define EACH(v, count) for (int v = chunk ? count : 0; v < count; v++)
#define EACH_GROUP(group, count) for (int group = 0; group < count; group++)
#define EACH_OF_GROUP(v, count) for (int v = 0; v < count; v++)
static struct { int x; } threadIdx, blockIdx;
inline void __syncthreads() {}
inline void next_may_start() {}
inline void wait_for_previous() {}
struct Group { const void *peers, *state, *lost; int rank, slot, seconds; };
template <int UNITS, int THREADS> struct RowSum {  // it was made before: `cuda.driver`
    const unsigned short* numbers;
    RowSum(Group, const unsigned short* row, int) : numbers(row) {}
};
inline float warp_sum(float value) { return value; }
inline float warp_max(float value) { return value; }
template <int WARPS> float block_sum(float value) { return value; }
template <int WARPS> unsigned block_max(unsigned value) { return value; }
inline float __int_as_float(unsigned bits) { float r; memcpy(&r, &bits, 4); return r; }
""" + Path(__file__).with_name("host_numbers.h").read_text()


def flat(text: str, files: Mapping[str, str]) -> str:
    """A source with the files that it includes, each once."""
    included: set[str] = set()

    def include(match: re.Match[str]) -> str:
        name = match[1]
        if name in included:
            return ""
        included.add(name)
        return _INCLUDE.sub(include, files[name].replace("#pragma once\n", ""))

    return _INCLUDE.sub(include, text)


def source(text: str, name: str, kind: int = 1) -> str:
    """Return the source of one kernel of a module, renamed `run`. kind: `KIND` of numbers.cuh."""
    flat = text.replace("\\\n", " ")
    threads, parameters = _declared(flat, name)
    listed = ", ".join(parameters)
    names = ", ".join(part.split()[-1].strip("*") for part in parameters)
    kernel = re.search(rf"\b{name}\(.*?(?=extern|\Z)", flat, re.DOTALL)
    count = 1 if kernel and "EACH" in kernel[0] else threads
    run = (
        f'extern "C" void run(int blocks, {listed}) {{\n'
        f"for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)\n"
        f"for (threadIdx.x = 0; threadIdx.x < {count}; threadIdx.x++) {name}({names});\n}}"
    )
    return f"// {threads} threads\n#define KIND {kind}\n{_HEAD}{CODE_OF}{text}\n{run}\n"


def _declared(text: str, name: str) -> tuple[int, list[str]]:
    """Threads and parameters of a kernel."""
    form = r'extern "C" __global__ void\s+__launch_bounds__\((\w+)\)\s+(\w+)\(([^)]*)\)'
    results = {kernel: (threads, parameters) for threads, kernel, parameters in re.findall(form, text)}
    threads, parameters = results.get(name) or results["NAME"]
    if not threads.isdigit():
        (threads,) = re.findall(rf"#define {threads} (\d+)", text)
    return int(threads), [part.strip() for part in parameters.replace("__restrict__", "").split(",")]


# Of the test run, whose processes compile each kernel once: tests/unit/conftest.py sets it.
folders: Shared | None = None


@functools.cache
def compiled_kernel(text: str) -> Any:
    if COMPILER is None:
        raise Fault("expected a C++ compiler, found none")

    def make(folder: Path) -> None:
        (folder / "kernel.cpp").write_text(text)
        command = [COMPILER, "-O1", "-std=c++17", "-w", "-shared", "-fPIC", "kernel.cpp", "-o", "kernel.so"]
        process = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if process.returncode:
            raise Fault(f"kernel: {process.stderr[:2000]}")

    assert folders is not None
    folder = folders.folder(f"kernels/{hashlib.sha256(text.encode()).hexdigest()}", make)
    return ctypes.CDLL(str(folder / "kernel.so")).run


def run(text: str, gpu: Gpu, blocks: int, threads: int, types: Sequence[Any], values: Sequence[Any]) -> None:
    """Run all blocks. Raises Fault for a pointer that is none of the device, or other threads than it is made for."""
    if not text.startswith(f"// {threads} threads\n"):
        raise Fault(f"kernel: {threads} threads, other than it is compiled for")
    alive: list[np.ndarray] = []
    arguments: list[Any] = []
    for kind, value in zip(types, values, strict=True):
        if kind is ctypes.c_void_p:
            alive.append(gpu.bytes(value, 1))
            arguments.append(ctypes.c_void_p(alive[-1].ctypes.data))
        else:
            arguments.append(kind(value))
    compiled_kernel(text)(ctypes.c_int(blocks), *arguments)
