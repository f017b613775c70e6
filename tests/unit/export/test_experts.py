"""Experts: one product for each, in engines and where graphs are run; the same bits with any other rows."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from families import FAMILIES
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from packed_checkpoints import LAYOUTS, write_packed

import lockstep
from lockstep import Advance, Model, ModelOptions, Results
from lockstep.artifacts.engines import expert_slot
from lockstep.artifacts.files import read_json, write_json
from lockstep.backends.base import get_backend
from lockstep.export.torch_model import cut_config, float32_tensor, load_tensors
from lockstep.onnx_tools.group_experts import GroupExperts
from lockstep.onnx_tools.prepare import random_inputs
from lockstep.onnx_tools.sessions import compute
from lockstep.onnx_tools.signature import signature_of
from lockstep.onnx_tools.toolkit import run_passes
from lockstep.verify.rounded import round_activations
from lockstep.weights import Weights, slot_array
from some import some

EXPERTS = 16
TAKEN = 4
WIDTH = 64
INNER = 48
BACKENDS = ["onnxruntime", "openvino"]
Run = Callable[[np.ndarray, np.ndarray], np.ndarray]


def mixture(transposed: bool = True) -> onnx.ModelProto:
    """A graph as transformers' `batched_mm` is traced: `hidden [num_tokens, WIDTH]`, and each token's experts."""
    value = helper.make_tensor_value_info
    node = helper.make_node
    up = [EXPERTS, INNER, WIDTH]
    down = [EXPERTS, WIDTH, INNER]
    shapes = {
        "up": up if transposed else [up[0], up[2], up[1]],
        "down": down if transposed else [down[0], INNER, WIDTH],
    }
    ints = {"last": [-1], "rows": [-1, WIDTH], "repeat": [1, TAKEN, 1], "of_token": [-1, TAKEN, WIDTH], "one": [1]}
    constants = [numpy_helper.from_array(np.array(numbers, np.int64), name) for name, numbers in ints.items()]
    axis = "last" if transposed else "one"

    def product(name: str, rows: str, stack: str, out: str) -> list[onnx.NodeProto]:
        column = f"{name}/column"
        result = f"{name}/result"
        factors = [f"{name}/weights", column] if transposed else [column, f"{name}/weights"]
        return [
            node("GatherND", [stack, "chosen"], [f"{name}/weights"]),
            node("Unsqueeze", [rows, axis], [column]),
            node("MatMul", factors, [result]),
            node("Squeeze", [result, axis], [out]),
        ]

    nodes = [
        node("Reshape", ["experts", "last"], ["flat"]),
        node("Unsqueeze", ["flat", "last"], ["chosen"]),
        node("Unsqueeze", ["hidden", "one"], ["hidden_3d"]),
        node("Expand", ["hidden_3d", "repeat"], ["repeated"]),
        node("Reshape", ["repeated", "rows"], ["flat_rows"]),
        *product("first", "flat_rows", "up", "inner"),
        node("Relu", ["inner"], ["positive"]),
        *product("second", "positive", "down", "outer"),
        node("Reshape", ["outer", "of_token"], ["apart"]),
        node("ReduceSum", ["apart", "one"], ["hidden_out"], keepdims=0),
    ]
    inputs = [value("hidden", TensorProto.FLOAT, ["num_tokens", WIDTH])]
    inputs.append(value("experts", TensorProto.INT64, ["num_tokens", TAKEN]))
    inputs += [value(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    outputs = [value("hidden_out", TensorProto.FLOAT, ["num_tokens", WIDTH])]
    graph = helper.make_graph(nodes, "mixture", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model


class Arrays(dict[str, np.ndarray]):
    """Weights in memory: see `Tensors`."""

    checkpoint = property(lambda self: self)
    identity = staticmethod(lambda name: name)
    location = staticmethod(lambda name: None)


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {slot.name: slot.sizes for slot in signature_of(model.graph, {"up", "down"}).slots}
    return {name: random.standard_normal(shape, np.float32) / shape[-1] ** 0.5 for name, shape in shapes.items()}


def engine(model: onnx.ModelProto, backend: str, folder: Path, arrays: Mapping[str, np.ndarray] | None = None) -> Run:
    """Return what runs the graph as an engine of a backend."""
    if backend == "openvino":
        pytest.importorskip("openvino", reason="OpenVINO is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "mixture.onnx")
    library = get_backend(backend)
    file = folder / library.file("mixture")
    library.build(folder / "mixture.onnx", file, library.default_options())
    slots = signature_of(model.graph, {"up", "down"}).slots
    tensors = Arrays(arrays or weights(model))
    names = {"up": ["up"], "down": ["down"]} if "up" in tensors else _apart(tensors)
    executable = library.load(file, slots, None, False).bind(tensors, names)

    def run(hidden: np.ndarray, experts: np.ndarray) -> np.ndarray:
        out = np.empty((len(hidden), WIDTH), np.float32)
        executable.prepare({"hidden": hidden, "experts": experts}, {"hidden_out": out})()
        return out

    return run


def _apart(tensors: Mapping[str, np.ndarray]) -> dict[str, list[str]]:
    return {slot: [name for name in tensors if name.startswith(f"{slot}.")] for slot in ("up", "down")}


def rows(count: int, experts: int = EXPERTS) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(count)
    chosen = np.stack([random.permutation(experts)[:TAKEN] for _ in range(count)])
    return random.standard_normal((count, WIDTH), np.float32), chosen.astype(np.int64)


def expected(arrays: Mapping[str, np.ndarray], hidden: np.ndarray, experts: np.ndarray) -> np.ndarray:
    """Return the sum over each token's experts, in fp64."""
    up, down = (arrays[name].astype(np.float64) for name in ("up", "down"))
    results = np.zeros(hidden.shape)
    for token, chosen in enumerate(experts):
        for expert in chosen:
            results[token] += down[expert] @ np.maximum(up[expert] @ hidden[token].astype(np.float64), 0)
    return results


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_token_gets_its_experts_whatever_rows_these_have(backend, tmp_path):
    model = mixture()
    run = engine(model, backend, tmp_path)
    arrays = weights(model)
    for count, experts in ((1, EXPERTS), (2, TAKEN), (7, EXPERTS), (130, EXPERTS)):  # some experts have no row, or all
        tokens = rows(count, experts)
        # fp32 sums of at most 64 numbers near 1
        assert np.abs(run(*tokens) - expected(arrays, *tokens)).max() < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_has_the_same_bits_alone_and_beside_others(backend, tmp_path):
    run = engine(mixture(), backend, tmp_path)
    if not get_backend(backend).batch_invariant:
        pytest.skip("this backend's products differ by their number of rows on this CPU")
    hidden, experts = rows(40)
    together = run(hidden, experts)
    for count in (1, 2, 3, 17):
        assert np.array_equal(run(hidden[5 : 5 + count], experts[5 : 5 + count]), together[5 : 5 + count])


def test_experts_are_tensors_of_their_own_or_parts_of_a_stack(tmp_path):
    arrays = weights(mixture())
    tokens = rows(9)
    # gate and up of each expert, say, and a stack cut in its middle
    parts = {f"up.{n}": part for n, part in enumerate(arrays["up"].reshape(EXPERTS * 2, INNER // 2, WIDTH))}
    parts |= {f"down.{n}": part for n, part in enumerate(np.split(arrays["down"], [5]))}
    actual = engine(mixture(), "onnxruntime", tmp_path / "parts", parts)(*tokens)
    assert np.array_equal(actual, engine(mixture(), "onnxruntime", tmp_path / "whole")(*tokens))


def test_weights_with_rows_for_inputs_are_grouped_too(tmp_path):
    model = mixture(transposed=False)
    tokens = rows(9)
    arrays = weights(model)
    swapped = {name: array.transpose(0, 2, 1) for name, array in arrays.items()}
    assert np.abs(engine(model, "onnxruntime", tmp_path)(*tokens) - expected(swapped, *tokens)).max() < 1e-4


def test_no_value_grows_with_tokens_times_weights():
    """Sizes by ONNX's shape inference: what a step of many tokens holds besides weights are rows of numbers."""
    grouped = run_passes(mixture(), GroupExperts())
    assert expert_slot("up", EXPERTS - 1) in {value.name for value in grouped.graph.input}
    inferred = onnx.shape_inference.infer_shapes(grouped, strict_mode=True, data_prop=True).graph
    assert inferred.value_info
    for value in inferred.value_info:
        known_sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim if dim.dim_value]
        assert math.prod(known_sizes) <= TAKEN * WIDTH, value.name


CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 288, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 32, "intermediate_size": 96,
    "num_experts": 8, "num_experts_per_tok": 4, "max_position_embeddings": 64, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("config", some([FAMILIES["mixtral"].config, FAMILIES["deepseek_v3"].config, CONFIG]))
def test_the_blocks_of_a_family_are_grouped_and_compute_the_same(shared, config):
    files, assembly = shared.assembled(config, "fp32")
    grouped = 0
    for graph in assembly.classes.values():
        model = onnx.ModelProto.FromString(files[graph.file])
        other = run_passes(model, GroupExperts(stacked=True))
        if other is model:
            continue
        grouped += 1
        assert not any(node.op_type == "GatherND" for node in other.graph.node)
        feeds = random_inputs(model)
        names = [value.name for value in model.graph.output]
        full = ReferenceEvaluator(model).run(names, feeds)
        apart = compute(other, feeds)
        for name, values in zip(names, full, strict=True):  # fp32 rounding in another order
            assert np.abs(values - apart[name]).max() < 1e-5
    assert grouped


@pytest.fixture(scope="module")
def checkpoint(shared) -> Path:
    """A random checkpoint of a mixture whose rows are groups of 32."""
    return shared.folder("experts/checkpoint", lambda folder: make_random(CONFIG, folder)) / "model"


def make_random(config: Mapping[str, object], folder: Path) -> None:
    write_json(folder / "shape.json", config)
    lockstep.make_random_checkpoint(folder / "shape.json", 0, folder / "model")


def logits_of(folder: Path, precision: str, backend: str, work: Path) -> tuple[np.ndarray, np.ndarray, Weights]:
    """Return what engines say after some tokens, what transformers says with the same weights, and these."""
    results = Results(work)
    tokens = np.array([3, 200, 17, 9, 101, 54])
    paths = results.checkpoint("m"), results.assembly("m", precision), results.weights("m", precision)
    lockstep.resolve_checkpoint(str(folder), folder, paths[0])
    lockstep.export_graphs(paths[0], precision, paths[1])
    lockstep.convert_weights(paths[0], precision, paths[2], paths[1])
    engines = lockstep.build_engines(paths[1], backend, results.engines("m", precision, backend))
    model = Model.open(engines, paths[1], paths[2], options=ModelOptions(max_batch_size=1, max_seq_len=32))
    weights = Weights.open(paths[2])
    tensors = {name: float32_tensor(array) for name, array in weights.dequantized()}
    reference = load_tensors(tensors, cut_config(read_json(folder / "config.json"), "all"), "eager", "here")
    round_activations(reference, weights, "all")
    with torch.no_grad():
        expected = reference(torch.as_tensor(tokens)[None], use_cache=False).logits[0, -1].numpy()
    return model.step([Advance(0, tokens, 0)])[0], expected, weights


@pytest.mark.long
@pytest.mark.parametrize(
    ("precision", "backend"),
    some([("w4a16", "onnxruntime"), ("w8a8", "onnxruntime"), ("w8a16", "openvino"), ("w8a16", "onnxruntime")]),
)
def test_experts_are_quantised_and_routers_are_not(checkpoint, tmp_path, precision, backend):
    if backend == "openvino":
        pytest.importorskip("openvino", reason="OpenVINO is not installed")
    actual, expected, weights = logits_of(checkpoint, precision, backend, tmp_path)
    quantized = weights.quantization
    assert quantized is not None
    parts = itertools.product((0, 1), range(8), ("gate", "up", "down"))
    experts = {f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight" for layer, expert, part in parts}
    assert experts <= quantized.bits.keys() and not any("mlp.gate." in name for name in quantized.bits)
    assert np.abs(actual - expected).max() < 2e-3  # activations of 16 bits, logits near 1


@pytest.mark.long
@pytest.mark.parametrize("name", some(["gptq", "awq", "pack-quantized"]))
def test_experts_of_a_quantised_checkpoint_keep_their_integers(checkpoint, tmp_path, name):
    layout = next(item for item in LAYOUTS if item.name == name and item.bits == 4 and item.zero_points)
    numbers = write_packed(checkpoint, tmp_path / "packed", layout)
    actual, expected, weights = logits_of(tmp_path / "packed", "w4a16", "onnxruntime", tmp_path / "results")
    assert weights.quantization is not None
    assert weights.quantization.bits == {name: 4 for name in numbers if name.endswith("_proj.weight")}
    stored = dict(weights.dequantized())
    assert all(np.array_equal(stored[name], array) for name, array in numbers.items())
    assert np.abs(actual - expected).max() < 2e-3  # as above


def test_an_engine_holds_weights_that_were_put_together_once(monkeypatch, tmp_path):
    """Its session has them; the arrays that they were copied from are gone."""
    results: list[weakref.ref] = []

    def recorded(*arguments: Any) -> np.ndarray:
        array = slot_array(*arguments)
        results.append(weakref.ref(array))
        return array

    monkeypatch.setattr("lockstep.backends.onnxruntime.backend.slot_array", recorded)
    arrays = weights(mixture())
    tokens = rows(9)
    parts = {f"up.{n}": part.copy() for n, part in enumerate(arrays["up"].reshape(EXPERTS * 2, INNER // 2, WIDTH))}
    parts |= {f"down.{n}": part.copy() for n, part in enumerate(arrays["down"].reshape(EXPERTS * 2, WIDTH // 2, INNER))}
    run = engine(mixture(), "onnxruntime", tmp_path, parts)
    gc.collect()
    assert len(results) == 2 * EXPERTS and not any(reference() is not None for reference in results)
    assert np.abs(run(*tokens) - expected(arrays, *tokens)).max() < 1e-4
