"""OpenVINO on CPUs, the real library: engines without weights, of the same bytes, as accurate as the references
allow; and rejected input."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from checkpoints import error_of
from demo_model import DEMO, LIMITS
from engine_steps import argmax, ids, with_logits
from quantized_models import FAULTS, assert_far_off, check, damaged, product
from quantized_models import demo as quantized_demo

from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.files import write_json
from lockstep.backends.base import get_backend
from lockstep.backends.builder import build
from lockstep.backends.engine_set import EngineSet
from lockstep.backends.openvino import cpu
from lockstep.backends.openvino.ir import to_bytes
from lockstep.backends.openvino.passes import Weight
from lockstep.backends.openvino.quantized import compress
from lockstep.cli.main import main
from lockstep.config import load
from lockstep.errors import CheckError, InputError
from lockstep.onnx_tools import int8_rounding
from lockstep.provenance import lock_update
from lockstep.provenance.lock import Lock
from lockstep.report import summary
from lockstep.runtime import Engine, Model, ModelOptions, Request
from lockstep.stages import jobs
from lockstep.targets import Results
from lockstep.tolerances import Tolerances
from lockstep.verify import compare
from lockstep.verify.rounded import rounded_rows
from lockstep.weights import Weights
from lockstep.weights.groups import dequantize, integers_of, pack, scales_of
from network import Recorder
from shared import Shared
from some import some

openvino = pytest.importorskip("openvino", reason="OpenVINO is not installed")

NAME = "demo-llama"
BACKEND = "openvino"
QUANTIZED = ("w8a16", "w4a16")
HAS_BF16 = cpu.why_not("bf16") is None
bf16 = pytest.mark.skipif(not HAS_BF16, reason="needs bf16 in the CPU")
LONG = pytest.mark.long(reason="each precision, layer count and family runs by default, not each of them with each")
ALL = (*some(("fp32", *QUANTIZED), "w4a16"), pytest.param("bf16", marks=bf16))


def engines_of(shared: Shared, results: Results, name: str, precision: str, key: str) -> Path:
    """An engine set of this backend, built once."""

    def make(root: Path) -> None:
        build(results.assembly(name, precision), BACKEND, root / "engines.json")

    return shared.folder(f"openvino/{key}/{precision}", make) / "engines.json"


@pytest.fixture
def opened(shared: Shared, demo: Results, demo_bf16: Results) -> Any:
    """(results, name of the model, engines) of the demo in a precision."""

    def of(precision: str) -> tuple[Results, str, Path]:
        if precision not in ("fp32", "bf16"):
            results = quantized_demo(shared, precision)
            name = "model"
        else:
            results = {"fp32": demo, "bf16": demo_bf16}[precision]
            name = NAME
        return results, name, engines_of(shared, results, name, precision, "demo")

    return of


def model_of(opened: Any, precision: str, **options: Any) -> Model:
    results, name, engines = opened(precision)
    files = engines, results.assembly(name, precision), results.weights(name, precision)
    return Model.open(*files, options=ModelOptions(**options))


@pytest.mark.long
@pytest.mark.parametrize("precision, layers", itertools.product(QUANTIZED, (2, "all")))
def test_quantised_weights_say_what_dequantised_ones_say(opened, tmp_path, precision, layers):
    results, _, engines = opened(precision)
    report = check(results, precision, layers, LIMITS, tmp_path, engines)
    assert report["result"] == "pass" and report["max_logit_error"] < 5e-3  # int8 activations alone: above 2e-2


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "w4a16"])
def test_engines_are_beside_their_graphs(opened, tmp_path, precision):
    results, name, engines = opened(precision)
    paths = results.assembly(name, precision), results.weights(name, precision), engines
    compare.run(*paths, Tolerances(precision, "openvino"), LIMITS, tmp_path / "report.json")
    error = json.loads((tmp_path / "report.json").read_text())["relative_error"]
    assert 0 < error < {"fp32": 1e-5, "w4a16": 5e-4}[precision]


@pytest.mark.parametrize("precision", ALL)
def test_a_request_gives_the_same_bits_in_any_company(opened, precision):
    model = model_of(opened, precision, max_batch_size=4, max_seq_len=256, chunk_size=64)
    if not model.engines.batch_invariant:
        pytest.skip("not measured on a CPU like this one")
    requests = [Request(ids(length, seed), 6, argmax) for seed, length in enumerate((9, 100, 64, 129, 1, 30))]
    alone = [with_logits(Engine(model, prefix_caching=False), request)[0] for request in requests]
    random = np.random.default_rng(0)
    order = random.permutation(len(requests))
    arrivals = np.sort(random.integers(0, 12, len(requests)))
    engine = Engine(model, prefix_caching=False, max_num_tokens=200)
    actual = with_logits(engine, *(requests[i] for i in order), arrivals=arrivals)
    for number, i in enumerate(order):
        np.testing.assert_array_equal(actual[number][1], alone[i][1])


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=LONG), "w4a16"])
def test_another_process_builds_the_same_bytes(opened, tmp_path, precision):
    results, name, engines = opened(precision)
    # after others, for OpenVINO numbers what a process makes
    code = "from lockstep import build_engines as b; import sys; [b(sys.argv[1], 'openvino', p) for p in sys.argv[2:]]"
    outs = [tmp_path / which / "engines.json" for which in ("first", "second")]
    command = [sys.executable, "-c", code, results.assembly(name, precision), *outs]
    subprocess.run(list(map(str, command)), check=True)
    manifests = [EngineSetManifest.load(path) for path in (engines, *outs)]
    assert manifests[0].engines == manifests[1].engines == manifests[2].engines


@pytest.mark.parametrize("precision", ALL)
def test_engines_hold_no_weights(opened, precision):
    results, name, engines = opened(precision)
    for file in sorted(engines.parent.glob("*.zip")):
        with zipfile.ZipFile(file) as archive:
            # a weight of the demo has 20,000 numbers; angles of RoPE and shapes have fewer
            assert archive.getinfo("model.bin").file_size < 2000
            assert str(results.root).encode() not in archive.read("model.xml")
    weights = Weights.open(results.weights(name, precision))
    set_ = EngineSet.open(engines, results.assembly(name, precision))
    layer = set_.assembly.layers[0].block
    bound = set_.load(layer.graph, 1).bind(weights, layer.slots)
    arrays = [weights[names[0]] for names in layer.slots.values()]
    assert len(bound.bound_arrays) == len(arrays)
    for bound_array in bound.bound_arrays:
        assert any(np.shares_memory(bound_array, array) for array in arrays), "a copy was made"


PRODUCTS = {"fp32": "f32", "bf16": "bf16", "w8a16": "u8", "w4a16": "u4"}


@pytest.mark.parametrize("precision", ALL)
def test_products_read_weights_in_their_own_type(opened, precision):
    """OpenVINO's own account: fully connected nodes, whose weights it keeps compressed, in bf16 where the graph is."""
    results, name, engines = opened(precision)
    set_ = EngineSet.open(engines, results.assembly(name, precision))
    part = set_.assembly.layers[1].block
    bound = set_.load(part.graph, 1).bind(Weights.open(results.weights(name, precision)), part.slots)
    nodes = bound.compiled.get_runtime_model().get_ordered_ops()

    def read(node, key):
        return node.get_rt_info()[key].astype(str)

    connected = [node for node in nodes if read(node, "layerType") == "FullyConnected"]
    assert len(connected) == 7
    for node in connected:
        weight = node.input_value(1).get_node()
        assert read(weight, "layerType") == "Const"
        assert weight.get_output_element_type(0).to_string() == PRODUCTS[precision]
        if precision not in QUANTIZED:  # of those it names the weights' type, or the activations'
            assert read(node, "runtimePrecision") == PRODUCTS[precision]


@pytest.mark.parametrize(
    "bits, group, out, is_rounded",
    [*itertools.product((4, 8), (16, 32, 64, 128), (40,), (False,)), (8, 16, 40, True), (8, 16, 1, True)],
)
def test_activations_of_a_product_have_16_bits_or_are_rounded(tmp_path, bits, group, out, is_rounded):
    """One output: as of the gate of Qwen2 MoE's shared expert."""
    random = np.random.default_rng(bits)
    columns = 384
    rows = 5
    numbers = random.standard_normal((out * columns // group, group), np.float32)
    scales = scales_of(numbers, bits)
    data = pack(integers_of(numbers, scales, bits), bits).reshape(out, columns // group, -1)
    scales = scales.reshape(out, columns // group)
    graph = product(data, scales, columns, bits)
    attributes = {entry.name: entry for entry in graph.graph.node[0].attribute}
    attributes["block_size"].i = group
    inputs = {"w": data, "s": scales}
    for tensor in graph.graph.initializer:
        graph.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    del graph.graph.initializer[:]
    for value, name in ((graph.graph.node[0].input, "w.data"), (graph.graph.node[0].input, "w.scales")):
        value[1 if name == "w.data" else 2] = name
    for value in graph.graph.input:
        value.name = {"w": "w.data", "s": "w.scales"}.get(value.name, value.name)
    if is_rounded:
        model = ir.from_proto(graph)
        (node,) = model.graph
        node.replace_input_with(0, int8_rounding.rounded(model.graph, node, node.inputs[0], columns, group))
        graph = ir.to_proto(model)
    onnx.save(graph, tmp_path / "product.onnx")
    backend = get_backend(BACKEND)
    backend.build(tmp_path / "product.onnx", tmp_path / "product.ir.zip", backend.default_options())
    slots = [IO_of(name, array) for name, array in (("w.data", data), ("w.scales", scales))]
    program = backend.load(tmp_path / "product.ir.zip", slots, 2, False)
    weights = {"w.data": inputs["w"], "w.scales": inputs["s"]}
    run = program.bind(weights, {name: [name] for name in weights})
    hidden = random.standard_normal((rows, columns), np.float32) * 10.0 ** random.integers(-6, 6, (rows, 1))
    hidden = hidden.astype(np.float32)
    hidden[0, :group] = 0

    def multiplied(x: np.ndarray) -> np.ndarray:
        products = np.empty((len(x), out), np.float32)
        run.prepare({"x": x}, {"y": products})()
        return products

    actual = multiplied(hidden)
    multiplicand = rounded_rows(torch.from_numpy(hidden), group).numpy() if is_rounded else hidden
    exact = multiplicand.astype(np.float64) @ dequantize(data, scales, group).astype(np.float64).T
    scale = np.abs(hidden).max(axis=1, keepdims=True) * np.sqrt(columns)
    # 16 bits of the largest of a group: 2**-16. Activations of int8 alone are off by 1e-2.
    assert (np.abs(actual - exact) / scale).max() < 1e-4
    if backend.batch_invariant:
        for row in range(rows):
            assert np.array_equal(multiplied(hidden[row : row + 1])[0], actual[row])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("combine, factors", [("divide", 3.0), ("multiply", np.linspace(1, 2, 40, dtype=np.float32))])
def test_a_product_that_is_scaled_keeps_its_weight_compressed(tmp_path, combine, factors, has_bias):
    """As of Gemma 2's soft cap, Granite's residuals, Cohere's logits; after a bias: OPT's queries."""
    random = np.random.default_rng(0)
    data = random.integers(0, 256, (40, 2, 16), np.uint8)
    scales = random.random((40, 2), np.float32)
    opset = openvino.opset13
    x = opset.parameter([-1, 32], np.float32)
    full = opset.parameter([40, 32], np.float32)
    biases = opset.parameter([40], np.float32)
    product = opset.matmul(x, full, False, True)
    if has_bias:
        product = opset.add(product, biases)
    operands = [product, opset.constant(np.float32(factors))]
    if combine == "multiply":
        operands.reverse()
    scaled = getattr(opset, combine)(*operands)
    for value, name in ((x, "x"), (full, "full"), (biases, "b"), (scaled, "y")):
        value.output(0).set_names({name})
    weights = {"w.data": data, "w.scales": scales}
    if has_bias:
        weights["b"] = random.standard_normal(40, np.float32)
    model = openvino.Model([scaled], [x, full, *([biases] if has_bias else [])])
    slots = [IO_of(*item) for item in weights.items()]
    compress(model, [Weight(*(ir.Value(name=slot.name) for slot in slots[:2]), 40, 32, 16, 8, "full")])
    path = tmp_path / "product.ir.zip"
    path.write_bytes(to_bytes(model, tmp_path))
    run = get_backend(BACKEND).load(path, slots, 1, False).bind(weights, {name: [name] for name in weights})
    nodes = run.compiled.get_runtime_model().get_ordered_ops()
    connected = [node for node in nodes if node.get_rt_info()["layerType"].astype(str) == "FullyConnected"]
    assert [node.input_value(1).get_element_type().to_string() for node in connected] == ["u8"]
    hidden = random.standard_normal((3, 32), np.float32)
    actual = np.empty((3, 40), np.float32)
    run.prepare({"x": hidden}, {"y": actual})()
    exact = hidden @ dequantize(data, scales, 16).T + weights.get("b", 0)
    expected = exact / factors if combine == "divide" else exact * factors
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert 1e-4 < error < 2e-2  # activations have 8 bits


def IO_of(name: str, array: np.ndarray) -> Any:
    from lockstep.artifacts.signature import IO

    return IO(name, array.dtype.name, tuple(array.shape))


def config_with(**settings: Any) -> dict[str, Any]:
    prompts = {"prompts": [{"text": "a"}]}
    return {"models": {"m": {"source": str(DEMO), "backends": [BACKEND], "golden": prompts, **settings}}}


def test_bf16_is_refused_where_the_cpu_has_none(opened, tmp_path, monkeypatch):
    results, name, engines = opened("bf16")
    monkeypatch.setattr(cpu, "describe_cpu", lambda: {"isa": ["avx2"]})
    reason = "needs bf16 in the CPU (avx512_bf16 or amx_bf16), found none"
    assert error_of(load.load, config_with(precisions=["fp32", "bf16"])) == (
        "config: models.m.precisions[1]: expected a precision of this machine for backend openvino "
        f"({reason}), or skip_missing_precisions: true; found 'bf16'"
    )
    load.load(config_with(precisions=["fp32", "w4a16"], group_size=16))
    with pytest.raises(InputError, match="backend openvino: bf16: needs bf16 in the CPU"):
        build(results.assembly(name, "bf16"), BACKEND, tmp_path / "engines.json")
    assert not list(tmp_path.glob("*.zip"))
    with pytest.raises(InputError, match=r"\.ir\.zip: backend openvino: bf16: needs bf16 in the CPU"):
        model_of(opened, "bf16")


def test_where_the_cpu_has_no_bf16_its_targets_are_shown_as_not_run(monkeypatch, tmp_path):
    shown = {**config_with(precisions=["bf16", "fp32"], backends=["openvino", "onnxruntime"], layers=[2]),
             "skip_missing_precisions": True}  # fmt: skip
    shown["models"]["m"]["backend_precisions"] = {"onnxruntime": ["fp32"]}
    monkeypatch.setattr(cpu, "describe_cpu", lambda: {"isa": ["avx512_bf16"]})
    config_here = load.load(shown)
    assert config_here.not_run() == {} and all(map(config_here.is_run, config_here.targets()))
    monkeypatch.setattr(cpu, "describe_cpu", lambda: {"isa": ["avx2"]})
    reason = "needs bf16 in the CPU (avx512_bf16 or amx_bf16), found none"
    config = load.load(shown)
    bf16, fp32, _ = config.targets()
    assert str(bf16) == "m/bf16/2/openvino" and str(fp32) == "m/fp32/2/openvino"
    assert config.not_run() == config.not_built() == {"bf16/openvino": reason}
    planned = jobs(config, tmp_path, config.targets())
    assert not any(step.names.get("backend") and step.names["precision"] == "bf16" for step in planned)
    assert any(step.stage == "validate" and step.names["precision"] == "bf16" for step in planned), (
        "the graphs are checked"
    )
    assert {step.names["backend"] for step in planned if step.stage == "golden"} == {"openvino", "onnxruntime"}
    rows = {row.target: row for row in summary.collect(Results(tmp_path), config.targets(), config.not_run()).targets}
    assert f"golden not run: {reason}" in (rows[bf16].reason or "") and reason not in (rows[fp32].reason or "")
    with pytest.raises(InputError, match=r"models.m.backends\[0\]: expected to run its engines \(require_run: true\)"):
        load.load({**shown, "require_run": True}).check_backends()


@pytest.mark.parametrize(
    "command", [("generate", "--prompt", "a"), ("serve",), ("bundle",), ("reproduce",)], ids=lambda command: command[0]
)
def test_what_needs_engines_that_the_config_skips_here_says_why(command, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cpu, "describe_cpu", lambda: {"isa": ["avx2"]})
    write_json(
        "results/config.json", load.load({**config_with(precisions=["bf16"]), "skip_missing_precisions": True}).dump()
    )
    with pytest.raises(SystemExit) as ended:
        main([*command, "m/bf16/all/openvino"], prog_name="lockstep")
    output = capsys.readouterr()
    assert ended.value.code == 2 and not output.out
    assert output.err == (
        "lockstep: error: results/m/bf16/engines/openvino/engines.json: expected the engines of m/bf16/all/openvino, "
        "found none: they are not built here, because it needs bf16 in the CPU "
        "(avx512_bf16 or amx_bf16), found none; choose another target, or a machine that has them\n"
    )


def test_other_precisions_and_group_sizes_are_refused():
    assert error_of(load.load, config_with(precisions=["fp16"])) == (
        "config: models.m.precisions[0]: expected one of fp32, bf16, w8a16, w4a16, w8a8, w4a8 for backend openvino "
        "(OpenVINO computes fp16 in fp32 on most CPUs); found 'fp16'"
    )
    line = error_of(load.load(config_with(precisions=["w4a16"])).check_sources)
    assert "models.m.group_size: expected a size that divides hidden_size (144" in line


def test_engines_of_another_version_are_refused(opened, tmp_path):
    results, name, engines = opened("fp32")
    path = tmp_path / "engines.json"
    replace(EngineSetManifest.load(engines), backend_version="2025.0.0").save(path)
    with pytest.raises(CheckError, match=r"openvino version: made for 2025.0.0, found \d+\.\d+\.\d+; install the v"):
        EngineSet.open(path, results.assembly(name, "fp32"))


def refusal(call: Callable[..., Any], *arguments: Any) -> str:
    """The one line of the CheckError that `call` raises."""
    with pytest.raises(CheckError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("damage", ["no archive", "no model", "another member", "other inputs"])
def test_a_file_that_is_no_engine_is_one_line(opened, tmp_path, damage):
    results, name, engines = opened("fp32")
    path = tmp_path / "middle.ir.zip"
    slots = EngineSet.open(engines, results.assembly(name, "fp32")).slots("middle")
    if damage == "no archive":
        path.write_bytes(b"PK")
    elif damage == "other inputs":
        path.write_bytes((engines.parent / "exit.ir.zip").read_bytes())
    else:
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("model.xml" if damage == "no model" else "a", "<net/>")
            file.writestr("model.bin", b"")
    expected = "expected weight inputs" if damage == "other inputs" else "expected an engine of OpenVINO"
    line = refusal(get_backend(BACKEND).load, path, slots, 1, False)
    assert line.startswith(f"{path}: {expected}") and line.endswith("build the engines again")


def test_a_graph_that_openvino_refuses_is_one_line(tmp_path):
    node = onnx.helper.make_node("NoSuchOperator", ["x"], ["y"])
    ios = [onnx.helper.make_tensor_value_info(name, 1, [1]) for name in "xy"]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", ios[:1], ios[1:])), tmp_path / "g.onnx")
    line = refusal(get_backend(BACKEND).build, tmp_path / "g.onnx", tmp_path / "g.ir.zip", {})
    assert line.startswith(f"{tmp_path}/g.onnx: OpenVINO ") and "NoSuchOperator" in line
    assert not (tmp_path / "g.ir.zip").exists()


def test_weights_with_zero_points_are_refused(tmp_path):
    graph = product(np.zeros((4, 2, 16), np.uint8), np.ones((4, 2), np.float32), 32, 8)
    graph.graph.node[0].input.append("zero_points")
    graph.graph.input.append(onnx.helper.make_tensor_value_info("zero_points", onnx.TensorProto.UINT8, [4, 2]))
    onnx.save(graph, tmp_path / "g.onnx")
    line = refusal(get_backend(BACKEND).build, tmp_path / "g.onnx", tmp_path / "g.ir.zip", {})
    assert line.startswith(f"{tmp_path}/g.onnx: MatMulNBits: expected integers and scales that are inputs, and no zero")


@pytest.mark.parametrize("fault", some(FAULTS), ids=lambda fault: fault.__name__)
def test_engines_on_other_weights_than_the_reference_fail(opened, tmp_path, fault):
    results, _, engines = opened("w4a16")
    results = damaged(results, tmp_path / "results", fault)
    with pytest.raises(CheckError) as caught:
        check(results, "w4a16", 2, LIMITS, tmp_path, engines)
    assert_far_off(str(caught.value))


def test_outputs_of_one_value_keep_their_names(tmp_path):
    """OpenVINO drops Identity, so that a, b and the input's copy are one value of several names."""
    nodes = [
        onnx.helper.make_node("Sqrt", ["x"], ["z"]),
        *(onnx.helper.make_node("Identity", [source], [name]) for source, name in (("z", "b"), ("z", "a"), ("x", "c"))),
    ]
    ios = [onnx.helper.make_tensor_value_info(name, 1, ["rows", 2]) for name in "xbac"]
    opsets = [onnx.helper.make_opsetid("", 20)]
    graph = onnx.helper.make_graph(nodes, "g", ios[:1], ios[1:])
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "g.onnx")
    backend = get_backend(BACKEND)
    backend.build(tmp_path / "g.onnx", tmp_path / "g.ir.zip", {})
    run = backend.load(tmp_path / "g.ir.zip", (), 1, False).bind(None, {})
    x = np.array([[1, 4], [9, 16]], np.float32)
    results = {name: np.zeros_like(x) for name in "abc"}
    run.prepare({"x": x}, results)()
    assert np.array_equal(results["a"], np.sqrt(x)) and np.array_equal(results["b"], np.sqrt(x))
    assert np.array_equal(results["c"], x)


def test_arrays_and_weights_that_do_not_fit_are_refused(opened):
    results, name, engines = opened("fp32")
    set_ = EngineSet.open(engines, results.assembly(name, "fp32"))
    weights = Weights.open(results.weights(name, "fp32"))
    layer = set_.assembly.layers[0].block
    program = set_.load(layer.graph, 1)
    first, other = sorted(layer.slots)[:2]
    with pytest.raises(CheckError, match="expected weights for the slots"):
        program.bind(weights, {first: layer.slots[first]})
    with pytest.raises(CheckError, match=rf"slot {first}: expected weights float32 \[.*\], found float32 \["):
        program.bind(weights, {**layer.slots, first: layer.slots[other]})
    run = program.bind(weights, layer.slots)
    inputs = zeros(run.inputs)
    outputs = zeros(run.outputs)
    with pytest.raises(CheckError, match=r"expected arrays for \['hidden'\], found \[\]"):
        run.prepare({}, outputs)
    with pytest.raises(CheckError, match="'hidden': expected float32, found float64"):
        run.prepare({"hidden": inputs["hidden"].astype(np.float64)}, outputs)
    with pytest.raises(CheckError, match="expected a contiguous array for 'hidden'"):
        run.prepare({"hidden": np.asfortranarray(inputs["hidden"])}, outputs)
    run.prepare(inputs, outputs)()


def test_openvino_sends_nothing_where_its_telemetry_is_installed(tmp_path):
    """A stand-in for `openvino-telemetry`, which pip brings along, that calls out when it is imported."""
    recorder = Recorder.make(tmp_path / "recorder")
    package = tmp_path / "packages" / "openvino_telemetry"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import socket\nsocket.create_connection(('telemetry.invalid', 80))\n")
    paths = os.pathsep.join([str(package.parent), *filter(None, sys.path)])
    environment = {**os.environ, **recorder.environment, "PYTHONPATH": paths}
    ours = "from lockstep.backends.openvino.library import CORE; print(CORE.available_devices)"
    process = subprocess.run([sys.executable, "-c", ours], env=environment, check=True, capture_output=True, text=True)
    assert "CPU" in process.stdout and not recorder.calls()
    theirs = subprocess.run(
        [sys.executable, "-c", "import openvino"], env=environment, check=False, capture_output=True
    )
    assert theirs.returncode and recorder.calls(), "the stand-in shows what an import would do"


def zeros(values):
    shapes = {key: [3 if dim == "any" else dim for dim in value.shape] for key, value in values.items()}
    return {key: np.zeros(shape, values[key].dtype) for key, shape in shapes.items()}


def test_a_lock_written_without_bf16_keeps_what_stood_in_it():
    """Entries of targets that do not run here stay, as long as they are of the same graphs."""
    engines = f"engines/bf16/{BACKEND}/x86_64"
    terms = f"checks/golden/bf16/2/{BACKEND}"
    locked = {engines: {}, f"golden/bf16/{BACKEND}/2": {}, terms: {"expected": {}}, "golden/bf16/cuda/2": {}}
    other_entries = {"checkpoint": {"source": "m"}, f"checks/golden/fp32/2/{BACKEND}": {"expected": {}}}
    before = Lock("m", {"golden/openvino": {"code": "old"}}, {**other_entries, **locked, "graphs/bf16": {"entry": "g"}})

    def written(graph: str, *not_run: str) -> Lock:
        lock = Lock("m", {}, {"checkpoint": {"source": "m"}, "graphs/bf16": {"entry": graph}})
        return lock_update.keep_not_run(before, lock, not_run)

    absent = (f"bf16/{BACKEND}", "cuda")
    assert written("g", *absent).entries.keys() == {"checkpoint", "graphs/bf16", *locked}
    assert written("g", *absent).made_with == before.made_with
    assert not locked.keys() & written("another", *absent).entries.keys()
    assert not locked.keys() & written("g").entries.keys(), "run here, or none of the config"
