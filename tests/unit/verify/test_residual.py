"""A residual stream beyond float16: plain fp16 is rejected with one line, `residual: float32` passes."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import yaml
from demo_model import ROOT
from families import FAMILIES
from onnx import TensorProto, helper
from tests import lifelike

import fake_gpu
from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.files import read_json
from lockstep.backends.builder import build
from lockstep.checkpoint import resolve, resolve_architecture
from lockstep.config import load
from lockstep.errors import CheckError, InputError
from lockstep.export.run import export
from lockstep.onnx_tools.overflow import find_overflow, overflows
from lockstep.stages import STAGES, Job
from lockstep.targets import Limits, Results, Target
from lockstep.tolerances import Tolerances
from lockstep.verify import compare, validate
from lockstep.verify.bisect.run import bisect
from lockstep.verify.compare import inputs
from lockstep.verify.golden.reference import make_reference
from lockstep.verify.golden.terms import GoldenTerms
from lockstep.weights import convert
from some import some

NAME = "large"
LIMITS = Limits(max_batch_size=2, max_input_len=32, max_seq_len=64, max_num_tokens=64)
SIZES = {name: value for name, value in asdict(LIMITS).items() if name != "max_input_len"}
TOLERANCES = Tolerances("fp16")
TERMS = GoldenTerms(4, ("The river", "comes down"), 0)


def scaled(model) -> None:
    """Scale all that writes to the stream, so that its other channels are large too, as in real models."""
    model.get_input_embeddings().weight *= 200
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight *= 200


def by_bias(model) -> None:
    """A channel begins with 25,000, and each layer adds as much: after the second it is beyond 65504."""
    scaled(model)
    model.get_input_embeddings().weight[:, 5] = 25_000.0
    for layer in model.model.layers:
        layer.mlp.down_proj.bias[5] = 25_000.0


def by_embedding(model) -> None:
    """The embedding, which Gemma 3 multiplies by the root of 48, is beyond 65504 after that."""
    scaled(model)
    model.get_input_embeddings().weight[:, 5] = 12_000.0


# A head tied to the embedding would take its large channel for a shift of all logits.
OWN = {"head_dim": 16, "tie_word_embeddings": False}
MODELS = {"llama": by_bias, "gemma3_text": by_embedding}


@pytest.fixture(params=some(["llama", "gemma3_text"]))
def results_of(request, shared) -> Callable[[str], Results]:
    """By kind, "plain" or "wide" with `residual: float32`, results of a model whose stream is beyond float16."""

    def of(kind: str) -> Results:
        def make(root: Path) -> None:
            lifelike.write({**FAMILIES[request.param].config, **OWN}, 0, root / "source", MODELS[request.param])
            results = Results(root)
            source = (str(root / "source"), root / "source")
            checkpoint = resolve(*source, results.checkpoint(NAME))
            architecture = resolve_architecture(*source, results.architecture(NAME))
            convert(checkpoint, "fp16", results.weights(NAME, "fp16"))
            make_reference(checkpoint, "all", TERMS, results.reference(NAME, "all"))
            residual = "float32" if kind == "wide" else None
            export(architecture, "fp16", results.assembly(NAME, "fp16"), residual=residual)
            build(results.assembly(NAME, "fp16"), "onnxruntime", results.engines(NAME, "fp16", "onnxruntime"))

        return Results(shared.folder(f"residual/{request.param}-{kind}", make))

    return of


def paths(build_results: Callable[[str], Results], kind: str) -> tuple[Path, Path, Path]:
    results = build_results(kind)
    return results.assembly(NAME, "fp16"), results.weights(NAME, "fp16"), results.engines(NAME, "fp16", "onnxruntime")


def validated(build_results: Callable[[str], Results], kind: str, out: Path) -> Path:
    assembly, weights, _ = paths(build_results, kind)
    checkpoint = build_results(kind).checkpoint(NAME)
    return validate.run(assembly, weights, checkpoint, "all", TOLERANCES, LIMITS.max_seq_len, out)


def run_golden(
    build_results: Callable[[str], Results],
    kind: str,
    folder: Path,
    backend: str = "onnxruntime",
    built: Path | None = None,
    exported: Path | None = None,
) -> Path:
    """built, exported: engines and assembly instead of those of `results_of`."""
    assembly, weights, engines = paths(build_results, kind)
    inputs = {"assembly": exported or assembly, "weights": weights, "engines": built or engines}
    inputs["reference"] = build_results(kind).reference(NAME, "all")
    options = {"tolerance": asdict(TOLERANCES), "limits": asdict(LIMITS), "expected": [None] * len(TERMS.prompts)}
    names = {"model": NAME, "precision": "fp16", "layers": "all", "backend": backend}
    out = folder / STAGES["golden"].output.format(**names)
    STAGES["golden"].run(Job("golden", names, inputs, options, out))
    return out


def line(where: str, name: str) -> str:
    line_expected = rf"float16 overflows: {where}: {name} reaches [\d,]+, expected at most 65504"
    return line_expected + "; set residual: float32 for the model, or take bf16 or fp32 instead of float16"


STREAM = line(r"(layer 1 \(block middle\)|the embedding \(block embedding\))", "the hidden state")


@pytest.mark.long
def test_plain_fp16_is_refused_for_what_it_is(results_of, tmp_path):
    with pytest.raises(CheckError, match=f"^{STREAM}; details in"):
        validated(results_of, "plain", tmp_path / "validate.json")
    with pytest.raises(CheckError, match=f"^{STREAM}; prompt 'The river', .*; details in"):
        run_golden(results_of, "plain", tmp_path)
    fault = bisect(results_of("plain"), Target(NAME, "fp16", "all", "onnxruntime"), TOLERANCES)
    assert fault.wrong == "overflow"
    assert re.fullmatch(STREAM, f"{fault.answer.removeprefix('overflow: ')}; {fault.look_at[0]}")


@pytest.mark.long
def test_compare_names_an_overflow_of_the_graph(results_of, tmp_path, monkeypatch):
    """On its own inputs a graph may overflow where the model does not: it is no engine's fault."""
    assembly, weights, engines = paths(results_of, "plain")
    arrays = inputs.arrays

    def large(graph, case):
        values = arrays(graph, case)
        return {**values, "hidden": values["hidden"] * 10_000} if graph.model.graph.name == "middle" else values

    monkeypatch.setattr(inputs, "arrays", large)
    with pytest.raises(CheckError, match=r"float16 overflows: .* reaches .*, expected at most 65504"):
        compare.run(assembly, weights, engines, TOLERANCES, LIMITS, tmp_path / "compare.json")


@pytest.mark.long
def test_with_a_wide_residual_stream_it_passes(results_of, tmp_path):
    assembly, weights, engines = paths(results_of, "wide")
    report = read_json(validated(results_of, "wide", tmp_path / "validate.json"))
    assert report["result"] == "pass"
    compare.run(assembly, weights, engines, TOLERANCES, LIMITS, tmp_path / "compare.json")
    assert read_json(run_golden(results_of, "wide", tmp_path))["max_logit_error"] > 0  # float16 is not left out


@pytest.mark.long
@pytest.mark.parametrize("backend, version", [("tensorrt", "10.6.0"), ("tensorrt", "10.9.0"), ("cuda", "")])
def test_gpu_backends_take_the_graphs(results_of, tmp_path, backend, version):
    """On the fake GPU: only the buffers and kernels of the stream differ."""
    assembly, weights, _ = paths(results_of, "wide")
    with fake_gpu.installed(version, backend) as gpu:
        engines = build(assembly, backend, tmp_path / "engines.json", SIZES)
        if backend != "cuda":  # whose products round to float16, beyond which they are of random numbers
            compare.run(assembly, weights, engines, TOLERANCES, LIMITS, tmp_path / "compare.json")
        run_golden(results_of, "wide", tmp_path, backend, engines)
        gc.collect()
    assert not gpu.faults


@pytest.mark.long
def test_ranks_and_adapters_keep_the_stream_wide(results_of, tmp_path):
    """Partial sums and adapters' products are float16, the stream that they are added to float32."""
    results = results_of("wide")
    for settings in ({"tensor_parallel": 2}, {"adapters": {"max_adapters": 2, "max_lora_rank": 8}}):
        assembly = tmp_path / next(iter(settings)) / "assembly.json"
        export(results.architecture(NAME), "fp16", assembly, residual="float32", **settings)
        validate.run(
            assembly, results.weights(NAME, "fp16"), results.checkpoint(NAME), "all", TOLERANCES, 64,
            tmp_path / "v.json",
        )  # fmt: skip
    ranks = tmp_path / "tensor_parallel" / "assembly.json"
    with fake_gpu.installed("10.9.0") as gpu:
        gpu.devices = 2
        engines = build(ranks, "tensorrt", tmp_path / "engines.json", SIZES)
        run_golden(results_of, "wide", tmp_path, "tensorrt", engines, ranks)
        gc.collect()
    assert not gpu.faults
    with pytest.raises(InputError, match="backend cuda: residual: expected none .* over ranks, found float32; use one"):
        build(ranks, "cuda", tmp_path / "cuda" / "engines.json", SIZES)


@pytest.mark.long
def test_only_the_stream_is_wide(results_of):
    """Weights, attention, keys and values stay float16; attention graphs are those of plain fp16."""
    plain, wide = (Assembly.load(paths(results_of, kind)[0]) for kind in ("plain", "wide"))
    assert (wide.dtype, wide.hidden_dtype, plain.hidden_dtype) == ("float16", "float32", "float16")
    assert wide.variants == plain.variants
    for name, graph in wide.classes.items():
        for io in (*graph.signature.inputs, *graph.signature.outputs):
            if io.dtype != "int64":
                assert io.dtype == ("float32" if io.key == "hidden" else "float16"), (name, io.name)
        assert {slot.dtype for slot in graph.signature.slots} == {"float16"}


def test_the_config_keeps_the_stream_wide_in_fp16():
    """In other precisions nothing is exported in another way."""
    value = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
    model = value["models"]["demo-llama"] | {
        "residual": "float32",
        "backends": ["cuda"],
        "precisions": ["w8a16", "fp16"],
    }
    model.pop("backend_precisions", None)
    config = load.load({**value, "models": {"demo-llama": model}})
    options = [
        STAGES["export"].options(config, {"model": "demo-llama", "precision": item}) for item in ("fp32", "fp16")
    ]
    assert options == [{}, {"residual": "float32"}]


def test_an_overflow_is_told_from_other_infinities():
    """Where PyTorch has a number that float16 holds, the graph is wrong, not float16 too small."""
    infinite = np.array([np.inf, 1.0])
    small = np.array([2.0, 1.0])
    large = np.array([70_000.0, 1.0])
    assert overflows({"hidden": infinite}, {}) and overflows({"hidden": infinite}, {"hidden": large})
    assert not overflows({"hidden": infinite}, {"hidden": small}) and not overflows({"hidden": small}, {})
    halves = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [2]) for name in "abcd"]
    nodes = [helper.make_node("Add", ["a", "b"], ["c"]), helper.make_node("Mul", ["c", "c"], ["d"])]
    model = helper.make_model(helper.make_graph(nodes, "g", halves[:2], halves[3:]), ir_version=10)
    model.opset_import[0].version = 20

    def overflow(a: float):
        return find_overflow(model, {"a": np.array([a, 1], np.float16), "b": np.array([100, 1], np.float16)})

    beyond = overflow(200)
    assert (beyond.name, beyond.largest, beyond.is_product) == ("d", 90_000.0, False)
    assert overflow(100) is None and overflow(np.inf) is None
