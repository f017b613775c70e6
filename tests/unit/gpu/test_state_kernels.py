"""The kernels of mixers with a state, compiled for the host, against their definition in NumPy."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx.parser
import pytest

from lockstep.errors import CheckError
from lockstep_gpu.state_kernels import THREADS, StateKernelSpec, check_state_graph

TESTS = Path(__file__).parents[2]
KERNELS = TESTS.parent / "src" / "lockstep_gpu" / "kernels"
COMPILER = shutil.which("c++") or shutil.which("g++")
HEAD = r"""
#define ON_HOST
#include "fake_gpu/host_block.h"
#include "fake_gpu/host_numbers.h"
"""
TAIL = r"""
extern "C" void run(int blocks, Element* query, Element* key, Element* value, Element* decay, Element* beta,
                    Element* out, float* states, int* bounds, int single, int* rows, void* positions) {
#if WIDTH
    launch(blocks, [=] { token_window(value, out, states, bounds, single, rows, positions); });
#else
    launch(blocks, [=] { recurrence(query, key, value, decay, beta, out, states, bounds, single, rows, positions); });
#endif
}
"""
# Columns that are no whole number of blocks; keys that are no whole number of 16 bytes, and some that are; heads that
# share a key, and eight threads a column.
WINDOW = {"value": (1, 150), "past_state": (1, 3, 150)}
RULE = {
    "query": (1, 32),
    "key": (1, 32),
    "value": (1, 80),
    "decay": (1, 4),
    "beta": (1, 4),
    "past_state": (1, 4, 16, 20),
}
MAMBA = {"query": (1, 20), "key": (1, 20), "value": (1, 32), "decay": (1, 4), "past_state": (1, 4, 10, 8)}
PIECES = {"query": (1, 32), "key": (1, 32), "value": (1, 6), "decay": (1, 1), "past_state": (1, 1, 32, 6)}
EIGHT = {"query": (1, 130), "key": (1, 130), "value": (1, 8), "decay": (1, 2), "past_state": (1, 2, 130, 4)}

OTHERS = ("bfloat16", "float32")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def compiled(spec: StateKernelSpec, folder: Path) -> ctypes.CDLL:
    (folder / "kernel.cpp").write_text(HEAD + '#include "state_mixers.cu"\n' + TAIL)
    sizes = {"BLOCK_THREADS": THREADS, "THREADS": THREADS, "WIDE": 1, **spec.sizes}
    flags = [
        "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{TESTS}", f"-I{KERNELS}",
        *(f"-D{key}={size}" for key, size in sizes.items()),
    ]  # fmt: skip
    done = subprocess.run(
        [COMPILER, *flags, "kernel.cpp", "-o", "kernel.so"], cwd=folder, capture_output=True, text=True
    )
    if "_Float16" in done.stderr:
        pytest.skip("the compiler has no _Float16")
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "kernel.so"))


CASES = {"window": WINDOW, "rule": RULE, "mamba": MAMBA, "pieces": PIECES, "eight": EIGHT}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float16") for name in CASES), *itertools.product(("window", "rule"), OTHERS)]
)
def test_states_go_on_from_chunk_to_chunk_with_the_bits_of_one(name, dtype, tmp_path):
    shapes = CASES[name]
    spec = StateKernelSpec.of_sizes(shapes, "here", dtype)
    count = 12
    random = np.random.default_rng(0)
    dtype = np.dtype(dtype)
    library = compiled(spec, tmp_path)
    past = shapes["past_state"][1:]
    inputs = {name: random.standard_normal((count, shapes[name][1])).astype(dtype) / 4 for name in spec.inputs}
    inputs = {name: -np.abs(array) if name == "decay" else array for name, array in inputs.items()}
    state = np.zeros((1, *past), np.float32)
    expected = []
    for token in range(count):
        out, state = spec.advance({name: array[token : token + 1] for name, array in inputs.items()}, state)
        expected.append(out[0])

    def run(steps: list[tuple[bool, list[tuple[int, int]]]]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of row 2, which holds a state of another request; a request next to it, of no row, writes nowhere."""
        results = np.full((count, len(expected[0])), 7, dtype)
        states = np.full((3, *past), 9, np.float32)
        for single, pairs in steps:
            for low, high in pairs:
                part = {name: np.concatenate([array[low:high], array[:1]]) for name, array in inputs.items()}
                rows = np.array([2] * (high - low) + [-1], np.int32)
                positions = np.arange(low, high + 1)
                bounds = np.array([[0, high - low], [high - low, high - low + 1]], np.int32)
                chunk = np.full((high - low + 1, results.shape[1]), 7, dtype)
                dummy = part["value"]
                arrays = [part.get(name, dummy) for name in ("query", "key", "value", "decay", "beta")] + [
                    chunk,
                    states,
                    bounds,
                ]
                places = [ctypes.c_void_p(array.ctypes.data) for array in (*arrays, rows, positions)]
                library.run(2 * spec.blocks, *places[:8], int(single), *places[8:])
                assert (chunk[-1] == 7).all()
                results[low:high] = chunk[:-1]
        assert (states[:2] == 9).all()
        return results, states[2]

    full = run([(False, [(0, count)])])
    cut = run([(False, [(0, 5), (5, 7)]), (True, [(at, at + 1) for at in range(7, count)])])
    for first, other in zip(full, cut):
        assert np.array_equal(first, other)
    # fp32 sums in another order, and one rounding.
    rounding = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(full[0].astype(np.float32), expected, rtol=rounding + 1e-6, atol=1e-5)
    np.testing.assert_allclose(full[1], state[0], rtol=1e-4, atol=1e-6)


WINDOW_GRAPH = """<ir_version: 10, opset_import: ["": 20]>
decode (bfloat16[num_requests, 64] value, float[num_requests, 2, 64] past_state)
    => (bfloat16[num_requests, 192] attention, float[num_requests, 2, 64] state_out)
<int64[1] one = {1}, int64[2] rows = {-1, 192}, int64[1] end = {2147483647}> {
    past = Cast<to = 16>(past_state)
    new = Unsqueeze(value, one)
    window = Concat<axis = 1>(past, new)
    attention = Reshape(window, rows)
    last = Slice(window, START, end, one)
    state_out = Cast<to = 1>(last)
}"""


def test_a_graph_in_bf16_is_compared_with_its_kernel():
    check_state_graph(onnx.parser.parse_model(WINDOW_GRAPH.replace("START", "one")), "here")
    first_two = onnx.parser.parse_model(
        WINDOW_GRAPH.replace("START, end", "zero, two").replace(
            "<int64[1] one", "<int64[1] zero = {0}, int64[1] two = {2}, int64[1] one"
        )
    )
    with pytest.raises(CheckError, match="here: output state_out: .*the kernel of its kind computes something else"):
        check_state_graph(first_two, "here")
