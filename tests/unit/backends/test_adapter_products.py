"""ONNX Runtime's products with matrices that change: each row has the same bits whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from lockstep.backends.onnxruntime import backend
from lockstep.backends.onnxruntime.adapter_products import PIECE, KeepOrder
from lockstep.onnx_tools.toolkit import run_passes


def products(size: int, columns: int, out: int, element: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """y = (x A) B, as a block has them."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w.lora_A"], ["thin"]), helper.make_node("Gemm", ["thin", "w.lora_B"], ["y"])],
        "products",
        [
            value("x", element, ["num_tokens", size]),
            value("w.lora_A", element, [size, columns]),
            value("w.lora_B", element, [columns, out]),
        ],
        [value("y", element, ["num_tokens", out])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    settings = backend.session_options(ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    return ort.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(("size", "columns", "out"), [(144, 64, 80), (400, 64, 144), (1024, 128, 2048), (4096, 16, 96)])
def test_a_row_has_the_same_bits_among_any_number_of_rows(size: int, columns: int, out: int) -> None:
    run = session(run_passes(products(size, columns, out), KeepOrder()))
    random = np.random.default_rng(0)
    x, a, b = (
        random.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
        for shape in ((96, size), (size, columns), (columns, out))
    )

    def compute(rows: np.ndarray) -> np.ndarray:
        return run.run(None, {"x": rows, "w.lora_A": a, "w.lora_B": b})[0]

    full = compute(x)
    for count in (1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 64):
        assert np.array_equal(compute(x[:count]), full[:count]), count
        assert np.array_equal(compute(x[-count:]), full[-count:]), count
    exact = x.astype(np.float64) @ a @ b
    assert np.abs(full - exact).max() < 1e-5 * np.abs(exact).max() * size**0.5


def test_the_place_of_an_adapter_changes_no_bit() -> None:
    rank = 32
    places = 8
    out = 240
    run = session(run_passes(products(8, rank * places, out), KeepOrder()))
    random = np.random.default_rng(0)
    x, own_a, own_b = (random.standard_normal(shape, np.float32) for shape in ((5, 8), (8, rank), (rank, out)))
    results = []
    for place in range(places):
        a = np.zeros((8, rank * places), np.float32)
        b = random.standard_normal((rank * places, out), np.float32)
        columns = slice(place * rank, (place + 1) * rank)
        a[:, columns] = own_a
        b[columns] = own_b
        results.append(run.run(None, {"x": x, "w.lora_A": a, "w.lora_B": b})[0])
    assert all(np.array_equal(item, results[0]) for item in results)


def test_half_precision_is_summed_in_float32() -> None:
    run = session(run_passes(products(512, 16, 8, TensorProto.FLOAT16), KeepOrder()))
    x = np.full((1, 512), 32, np.float16)
    a = np.full((512, 16), 32, np.float16)
    b = np.ones((16, 8), np.float16)
    a[256:] *= -1  # pieces of 131072 and of as much less: fp16 ends at 65504
    assert not run.run(None, {"x": x, "w.lora_A": a, "w.lora_B": b})[0].any()


def test_graphs_without_adapters_stay_as_they_are() -> None:
    value = helper.make_tensor_value_info
    node = helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)
    inputs = [value("x", TensorProto.FLOAT, ["num_tokens", 3 * PIECE]), value("w", TensorProto.FLOAT, [4, 3 * PIECE])]
    graph = helper.make_graph([node], "g", inputs, [value("y", TensorProto.FLOAT, ["num_tokens", 4])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    before = model.SerializeToString()
    assert run_passes(model, KeepOrder()) is model and model.SerializeToString() == before
