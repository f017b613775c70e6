"""What a model takes of a CPU's memory, as the kernel counts it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from lockstep.backends.onnxruntime.backend import OnnxRuntimeBackend
from lockstep.onnx_tools.signature import io_of
from lockstep.step.kv_cache import KVCache, LayerShape

MIB = 1 << 20


class Arrays(dict[str, np.ndarray]):
    """Weights of no file."""

    checkpoint = None
    identity = location = staticmethod(lambda name: None)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_rows_of_the_cache_that_no_slot_had_take_none() -> None:
    cache = KVCache([LayerShape(4, 64, 64)] * 16, 16, 256, np.dtype(np.float32), 1 << 30)
    began = resident_bytes()
    cache.reserve(0, 256)
    cache.clear(0, 0, 256)  # writes all of the row: 4 * 256 * 64 keys and values of 16 layers, 8 MiB
    assert 8 * MIB <= resident_bytes() - began < 12 * MIB  # 16 such rows are 128; a page more or less at each end


def test_engines_share_their_scratch_memory(tmp_path: Path) -> None:
    """Each needs 16 MiB while it runs."""
    rows = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 1])
    wide = helper.make_node("Expand", ["x", "shape"], ["wide"])
    total = helper.make_node("ReduceMean", ["wide"], ["y"])
    shape = onnx.numpy_helper.from_array(np.array([1, 1 << 22]), "shape")
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, None])
    graph = helper.make_graph([wide, total], "scratch", [rows], [out], [shape])
    opsets = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "engine.onnx")
    program = OnnxRuntimeBackend().load(tmp_path / "engine.onnx", [], None, False)
    x = np.ones((1, 1), np.float32)
    y = np.zeros((1, 1), np.float32)
    calls = [program.bind(None, {}).prepare({"x": x}, {"y": y}) for _ in range(8)]
    calls[0]()
    assert y == 1
    began = resident_bytes()
    for call in calls[1:]:
        call()
    assert resident_bytes() - began < 16 * MIB  # not 7 times as much


def test_weights_are_in_memory_once(tmp_path: Path) -> None:
    """A packed matrix is larger than the hole that the copy of another left."""
    # 70 MB
    names = [f"w{number}" for number in range(70)]
    size = 500
    random = np.random.default_rng(0)
    weights = Arrays()
    for name in names:
        weights |= {f"{name}.{part}": random.random((size // 2, size), np.float32) for part in "ab"}
    nodes = [helper.make_node("Gemm", ["x", name], [f"of_{name}"], transB=1) for name in names]
    nodes.append(helper.make_node("Sum", [f"of_{name}" for name in names], ["y"]))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, size]) for name in "xy")
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [size, size]) for name in names]
    graph = helper.make_graph(nodes, "products", [x, *inputs], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "engine.onnx")
    engine = OnnxRuntimeBackend().load(tmp_path / "engine.onnx", [io_of(value) for value in inputs], None, False)
    np.empty(30 * MIB, np.uint8)  # freed at once: from here on glibc takes smaller arrays from its heap
    began = resident_bytes()
    executable = engine.bind(weights, {name: [f"{name}.a", f"{name}.b"] for name in names})
    nbytes = resident_bytes() - began
    del executable
    assert nbytes < 1.5 * 70 * size**2 * 4  # rows are padded; 2.6 where nothing is given back


def test_packed_weights_lie_on_huge_pages(tmp_path: Path) -> None:
    if tuple(int(number) for number in os.uname().release.split(".")[:2]) < (6, 1):
        pytest.skip("expected Linux 6.1 or newer, which can be asked for huge pages at once")
    # 16 MiB in 4 bits
    columns = 1024
    rows = 1 << 15
    weights = Arrays(w=np.ones((rows, columns // 32, 16), np.uint8), s=np.ones((rows, columns // 32), np.float32))
    sizes = {"K": columns, "N": rows, "bits": 4, "block_size": 32, "accuracy_level": 4}
    node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **sizes)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, columns])]
    inputs += [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in weights.items()
    ]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, rows])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "product", inputs, [out]), opset_imports=opsets, ir_version=10)
    onnx.save(model, tmp_path / "engine.onnx")
    slots = [io_of(value) for value in model.graph.input][1:]
    began = on_huge_pages()
    engine = OnnxRuntimeBackend().load(tmp_path / "engine.onnx", slots, None, False)
    executable = engine.bind(weights, {"w": ["w"], "s": ["s"]})
    assert on_huge_pages() - began >= 12 * MIB
    del executable


def on_huge_pages() -> int:
    """Return bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("AnonHugePages"))) << 10
