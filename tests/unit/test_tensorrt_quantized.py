"""Quantised weights on the fake GPU: blocks cut at their products, which kernels and cuBLAS make in NumPy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from benchmarks import small_weights_gpu
from demo_model import CONFIG, LIMITS
from test_quantization import LIMIT, demo, random_family

from lockstep.artifacts.files import read_json
from lockstep.backends import build
from lockstep.backends.tensorrt import cut_engine
from lockstep.backends.tensorrt.v8_6 import needs
from lockstep.errors import CheckError, InputError
from lockstep.onnx_tools.cut_products import CutGraph, cut_products
from lockstep.runtime import Engine, Model, Request
from lockstep.targets import Limits, Results, Target
from lockstep.verify import compare, golden

SIZES = ("max_batch_size", "max_num_tokens", "max_seq_len")
TOLERANCE = CONFIG.tolerance("demo-llama", "w8a16", "tensorrt")


def built(results: Results, precision: str, folder: Path, limits: Limits = LIMITS, attention: str = "fused"):
    options = {**{name: getattr(limits, name) for name in SIZES}, "attention": attention}
    return build(results.assembly("model", precision), "tensorrt", folder / "engines" / "engines.json", options)


def checked(results: Results, precision: str, layers: int | str, engines: Path, limits: Limits, out: Path):
    golden.check_engines(
        results.assembly("model", precision),
        results.weights("model", precision),
        engines,
        results.quantized_reference("model", precision, layers),
        Target("model", precision, layers, "tensorrt"),
        TOLERANCE,
        limits,
        out / "golden.json",
        out / "speed.json",
    )
    return read_json(out / "golden.json")


def test_tolerances_are_those_of_fp16_activations():
    fp16, graphs = CONFIG.tolerance("demo-llama", "fp16"), CONFIG.tolerance("demo-llama", "w8a16")
    assert TOLERANCE == fp16 and graphs.rounding < fp16.rounding
    assert CONFIG.tolerance("demo-llama", "w8a16", "onnxruntime") == graphs


@pytest.mark.parametrize("tensorrt_version", ["8.6.0"])
@pytest.mark.parametrize(
    # 8 bits run with gemma2 below
    "precision, layers",
    [pytest.param("w8a16", 2, marks=pytest.mark.long), ("w4a16", "all")],
)
def test_the_demo_says_what_its_dequantised_weights_say(shared, gpu, tmp_path, precision, layers):
    results = demo(shared, precision)
    engines = built(results, precision, tmp_path)
    assert checked(results, precision, layers, engines, LIMITS, tmp_path)["result"] == "pass"
    pair = results.assembly("model", precision), results.weights("model", precision)
    out = compare.run(*pair, engines, TOLERANCE.beside_graph, LIMITS, tmp_path / "compare.json", seconds=8)
    report = read_json(out)
    assert set(report["engines"]) == {"embedding", "entry", "middle", "exit"}
    # Also at the end of float16, which its activations are, not of float32 as in the graph.
    assert all(engine["sizes"]["tried"] for engine in report["engines"].values())
    assert 0 < report["relative_error"] <= TOLERANCE.beside_graph


@pytest.mark.parametrize("tensorrt_version", ["8.6.0"])
def test_the_warm_up_loads_products_of_every_size(shared, gpu, tmp_path):
    """cuBLAS loads a kernel with its first call, and chooses it by the number of rows."""
    results = demo(shared, "w8a16")
    engines = built(results, "w8a16", tmp_path)
    model = Model.open(engines, results.assembly("model", "w8a16"), results.weights("model", "w8a16"), 2)
    model.warm_up()
    largest = model.max_num_tokens + model.max_batch_size
    assert all(any(rows in gpu.product_rows for rows in range(n, n + 32)) for n in range(33, largest - 31))


@pytest.mark.parametrize("tensorrt_version", ["10.9.0"])
def test_requests_are_served_as_ever(shared, gpu, tmp_path):
    """The scheduler over a cut engine: requests that come and go, prompts in pieces, answers as of each alone."""
    results = demo(shared, "w4a16")
    paths = results.assembly("model", "w4a16"), results.weights("model", "w4a16")
    engines, random = built(results, "w4a16", tmp_path), np.random.default_rng(0)
    model = Model.open(engines, *paths, 2, **{name: getattr(LIMITS, name) for name in SIZES})
    prompts = [random.integers(0, 768, size).tolist() for size in (3, 70, 1)]

    def answers(requests: list[Request]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for token in Engine(model).run(requests):
            found.setdefault(token.request, []).append(token.token)
        return found

    together = answers([Request(prompt, 4) for prompt in prompts])
    assert list(map(len, together.values())) == [4] * 3
    assert [together[number] for number in range(3)] == [answers([Request(prompt, 4)])[0] for prompt in prompts]


@pytest.mark.parametrize("tensorrt_version", ["8.6.0"])
@pytest.mark.parametrize(
    "family, precision", [("gemma2", "w8a16"), pytest.param("gpt_neox", "w4a16", marks=pytest.mark.long)]
)
def test_families_with_tied_heads_biases_and_other_attention(shared, gpu, tmp_path, family, precision):
    results = random_family(shared, family, precision)
    engines = built(results, precision, tmp_path, LIMIT)
    assert checked(results, precision, 2, engines, LIMIT, tmp_path)["result"] == "pass"


def middle(shared) -> onnx.ModelProto:
    return onnx.load(demo(shared, "w8a16").assembly("model", "w8a16").with_name("middle.onnx"))


def test_a_llama_block_is_three_pieces_and_four_steps_of_products(shared):
    cut = cut_products(middle(shared))
    kinds = [step if isinstance(step, int) else len(step) for step in cut.steps]
    assert (len(cut.pieces), kinds) == (3, [1, 0, 2, 1, 1, 2, 3])


def test_a_cut_that_computes_something_else_is_refused(shared, monkeypatch):
    """Gate and up exchanged."""

    def wrong(model: onnx.ModelProto) -> CutGraph:
        cut = cut_products(model)
        (at,) = (number for number, step in enumerate(cut.steps) if not isinstance(step, int) and len(step) == 2)
        gate, up = cut.steps[at]
        swapped = replace(gate, slots=up.slots), replace(up, slots=gate.slots)
        return CutGraph(cut.pieces, (*cut.steps[:at], swapped, *cut.steps[at + 1 :]), cut.inner)

    monkeypatch.setattr(cut_engine, "cut_products", wrong)
    with pytest.raises(CheckError, match="graph middle: output hidden_out: expected the pieces and products to give"):
        cut_engine.prepare_pieces(middle(shared), 17)


@pytest.mark.parametrize("tensorrt_version", ["8.6.0"])
def test_a_file_that_is_cut_short_is_named(shared, gpu, tmp_path):
    engines = built(demo(shared, "w8a16"), "w8a16", tmp_path)
    data = (engines.parent / "middle.engine").read_bytes()
    with pytest.raises(CheckError, match="m: expected the pieces of an engine, found Unterminated"):
        cut_engine.unpack(data[:-9], "m")  # kernels are the end of the header
    data = _with_plan(data)
    with pytest.raises(CheckError, match=f"m: expected {len(data)} bytes, found {len(data) - 9} bytes; build it again"):
        cut_engine.unpack(data[:-9], "m")


def _with_plan(data: bytes) -> bytes:
    """The same engine with a plan for its first piece."""
    start = len(cut_engine.MAGIC) + 8
    header = json.loads(data[start:])
    header["pieces"][0] = 100
    text = json.dumps(header).encode()
    return cut_engine.MAGIC + len(text).to_bytes(8, "little") + text + bytes(100)


def test_a_machine_without_cublas_is_told_so(monkeypatch):
    def refuse(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(needs, "open_library", refuse)
    with pytest.raises(InputError, match="expected the library cuBLAS 12 or 13, which multiplies with the weights"):
        needs.require_cublas()


@pytest.mark.parametrize("tensorrt_version", ["8.6.0"])
def test_a_cublas_that_does_not_start_is_told_by_its_name_and_status(gpu, monkeypatch):
    from lockstep.backends.tensorrt import cuda
    from lockstep.backends.tensorrt.cublas import Gemm

    library = SimpleNamespace(_name="/opt/libcublas.so.12", cublasCreate_v2=lambda handle: 1)
    monkeypatch.setattr(needs, "open_library", lambda name: library)
    with pytest.raises(CheckError) as error:
        Gemm(cuda.Stream())
    assert str(error.value) == (
        "expected the library cuBLAS (/opt/libcublas.so.12) to start, found CUBLAS_STATUS_NOT_INITIALIZED; free memory "
        "of the GPU, or name the folder of a cuBLAS for this driver in LD_LIBRARY_PATH"
    )


@pytest.mark.long
@pytest.mark.parametrize("tensorrt_version", ["8.6.0"])
@pytest.mark.parametrize("precision", ["w8a16", "w4a16"])
def test_the_benchmark_writes_what_each_precision_came_to(shared, gpu, tmp_path, monkeypatch, precision):
    """On random weights whose numbers stay in fp16's range: else a token is -1, and the step behind it refused."""
    for name, value in {
        "LIMITS": {"max_batch_size": 8, "max_num_tokens": 64, "max_seq_len": 128}, "CONTEXT": 8, "WARM": 1, "STEPS": 2,
        "ROUNDS": 1, "BATCHES": (1, 8), "PROMPTS": (12,), "PARTS_OF": (1,),
    }.items():  # fmt: skip
        monkeypatch.setattr(small_weights_gpu, name, value)
    graphs = demo(shared, precision).assembly("model", precision).parent
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs" / precision).symlink_to(graphs)
    small_weights_gpu.measure(tmp_path / "graphs", tmp_path, precision)
    record = read_json(tmp_path / f"{precision}.json")
    assert set(record["decode"]) == {"1", "8"} and record["prompt"]["12"]["median"] > 0
    assert record["microseconds"]["1"]["block"] > 0
