"""Running TensorRT-RTX's engines on the fake GPU: the executor is TensorRT's, the runtime cache is its own."""

from __future__ import annotations

import shutil

import numpy as np
import onnx
import pytest
from demo_model import CONFIG, GOLDEN, LIMITS, TOLERANCES
from quantized_models import demo as quantized_demo

import fake_gpu
from lockstep.artifacts.files import read_json, sha256_file, write_json
from lockstep.backends import EngineSet, build
from lockstep.errors import CheckError
from lockstep.manifests.manifest_files import content
from lockstep.runtime import Advance, Model, ModelOptions, Tokenizer, generate
from lockstep.targets import Target
from lockstep.tolerances import Tolerances
from lockstep.verify import compare
from lockstep.verify.golden.check import check_engines
from lockstep_gpu.backends.tensorrt_rtx import library
from some import some

MODEL = "demo-llama"
BACKEND = "tensorrt_rtx"
VERSION = "1.7.1.116"
QUANTIZED = CONFIG.tolerance("demo-llama", "w8a16", "tensorrt_rtx")
SIZES = {name: getattr(LIMITS, name) for name in ("max_batch_size", "max_num_tokens", "max_seq_len")}


@pytest.fixture
def at_exit(monkeypatch):
    """What the library does when the process ends: call it."""
    registered = []
    monkeypatch.setattr(library.atexit, "register", lambda *call: registered.append(call))

    def end():
        while registered:
            function, *arguments = registered.pop()
            function(*arguments)

    return end


@pytest.fixture
def gpu(at_exit):
    with fake_gpu.installed(VERSION, BACKEND) as gpu:
        yield gpu
    assert not gpu.faults


@pytest.fixture
def engines(demo, gpu, tmp_path):
    """engines.json of a precision."""

    def made(precision):
        path = tmp_path / precision / "engines.json"
        return path if path.exists() else build(demo.assembly(MODEL, precision), BACKEND, path, SIZES)

    return made


@pytest.fixture
def open_model(demo, engines):
    return lambda precision, layers="all": Model.open(
        engines(precision),
        demo.assembly(MODEL, precision),
        demo.weights(MODEL, precision),
        layers,
        ModelOptions(**SIZES),
    )


@pytest.mark.parametrize("precision", some(["fp16", "fp32"]))
def test_generated_tokens_are_those_of_onnx_runtime(demo, open_model, gpu, precision):
    """With requests that come and go, so that slots are taken again, and prompts between decode steps."""
    tokenizer = Tokenizer.open(demo.assembly(MODEL, precision))
    prompts = 2 * [prompt.text for prompt in GOLDEN.prompts]
    paths = (
        demo.engines(MODEL, precision, "onnxruntime"),
        demo.assembly(MODEL, precision),
        demo.weights(MODEL, precision),
    )
    results = []
    for model in (Model.open(*paths, "all", ModelOptions(**SIZES)), open_model(precision)):
        generation = generate(model, tokenizer, prompts, max_new_tokens=24)
        list(generation)
        results.append(generation.tokens)
    assert results[0] == results[1] and len(results[0]) == 8
    # Kernels of captured steps are compiled for their shapes before they run, others in the background.
    assert set(gpu.specializations) == {"eager", "lazy"}


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_the_demo_passes_the_golden_check(references, engines, gpu, tmp_path, precision):
    check_engines(
        references.assembly(MODEL, precision), references.weights(MODEL, precision), engines(precision),
        references.reference(MODEL, "all"), Target(MODEL, precision, "all", BACKEND), TOLERANCES[precision], LIMITS,
        tmp_path / "golden.json", tmp_path / "speed.json", [prompt.expected["all"] for prompt in GOLDEN.prompts],
    )  # fmt: skip
    assert read_json(tmp_path / "golden.json")["result"] == "pass"


@pytest.mark.parametrize("precision", some(["fp16", "fp32"]))
def test_engines_are_compared_with_their_graphs_on_each_of_their_profiles(demo, engines, gpu, tmp_path, precision):
    assembly = demo.assembly(MODEL, precision)
    weights = demo.weights(MODEL, precision)
    out = tmp_path / "compare.json"
    compare.run(assembly, weights, engines(precision), TOLERANCES[precision], LIMITS, out, seconds=0)
    report = read_json(out)
    assert set(report["engines"]) == {"attention.decode", "attention.prefill", "embedding", "entry", "middle", "exit"}
    profiles = [run["profile"] for name in sorted(report["engines"]) for run in report["engines"][name]["runs"]]
    assert [number for number in gpu.profiles if number] == [number for number in profiles if number]
    assert max(profiles) == 2 and report["versions"][BACKEND] == VERSION
    assert report["relative_error"] <= {"fp32": 16 * 2**-24, "fp16": 4 * 2**-11}[precision]


def test_quantised_weights_come_with_their_sign(shared, gpu, tmp_path):
    """w8a16: MatMulNBits counts integers from 128, this library from 0. By the golden check, and by the comparison,
    which brings weights in its own way."""
    results = quantized_demo(shared, "w8a16")
    assembly = results.assembly("model", "w8a16")
    weights = results.weights("model", "w8a16")
    path = build(assembly, BACKEND, tmp_path / "engines" / "engines.json", SIZES)
    check_engines(
        assembly, weights, path, results.quantized_reference("model", "w8a16", 2), Target("model", "w8a16", 2, BACKEND),
        QUANTIZED, LIMITS, tmp_path / "golden.json", tmp_path / "speed.json",
    )  # fmt: skip
    compare.run(assembly, weights, path, QUANTIZED, LIMITS, tmp_path / "compare.json", seconds=0)
    assert read_json(tmp_path / "compare.json")["relative_error"] <= 16 * 2**-24


def test_an_engine_that_computes_something_else_is_found_by_the_comparison(demo, engines, gpu, tmp_path):
    """An exit that says the opposite, by the name of the right one."""
    path = engines("fp32")
    model = onnx.load(path.parent / "exit.engine")
    last = next(node for node in model.graph.node if "logits" in node.output)
    last.output[:] = ["before"]
    model.graph.node.append(onnx.helper.make_node("Neg", ["before"], ["logits"]))
    onnx.save(model, path.parent / "exit.engine")
    manifest = read_json(path)
    manifest["engines"]["exit"]["sha256"] = sha256_file(path.parent / "exit.engine")
    write_json(path, manifest)
    with pytest.raises(CheckError, match="exit.engine: engine exit, profile 0 .* logits: expected an error"):
        paths = demo.assembly(MODEL, "fp32"), demo.weights(MODEL, "fp32"), path
        compare.run(*paths, Tolerances("fp32", block=1e-4), LIMITS, tmp_path / "out.json", seconds=0)


def caches(engines):
    return sorted(engines.parent.glob("runtime.*.cache"))


def begin_again():
    """As the next process finds it."""
    library.TENSORRT_RTX.caches.clear()


def decode(model):
    (token,) = model.step_tokens([Advance(0, np.arange(1, 6), 0)])
    return [token, *model.step_tokens([Advance(0, np.array([token]), 5)])]


def test_the_runtime_cache_is_kept_beside_the_engines_and_read_again(open_model, engines, at_exit, gpu):
    path = engines("fp16")
    first = decode(open_model("fp16", 2))
    assert not caches(path), "written when the process ends"
    at_exit()
    (cache,) = caches(path)
    before = cache.read_bytes()
    stamp = cache.stat().st_mtime_ns
    assert len(before) > 64 * 4  # a digest of each engine that ran
    begin_again()
    assert decode(open_model("fp16", 2)) == first
    at_exit()
    assert (cache.read_bytes(), cache.stat().st_mtime_ns) == (before, stamp), "nothing new: not written again"


@pytest.mark.parametrize("damaged", some([b"damaged", b"", None]), ids=["damaged", "empty", "gone"])
def test_a_damaged_runtime_cache_is_begun_anew(open_model, engines, at_exit, gpu, damaged):
    path = engines("fp16")
    first = decode(open_model("fp16", 2))
    at_exit()
    (cache,) = caches(path)
    before = cache.read_bytes()
    cache.unlink() if damaged is None else cache.write_bytes(damaged)
    begin_again()
    assert decode(open_model("fp16", 2)) == first
    at_exit()
    assert caches(path) == [cache] and cache.read_bytes() == before


def test_a_runtime_cache_whose_folder_is_gone_is_left(open_model, engines, at_exit, gpu):
    path = engines("fp16")
    decode(open_model("fp16", 2))
    shutil.rmtree(path.parent)
    at_exit()
    assert not path.parent.exists()


def test_the_runtime_cache_is_in_no_manifest_and_no_digest(demo, open_model, engines, at_exit, gpu):
    """Nor does a build that keeps the engines delete it, or a lock hold it."""
    path = engines("fp16")
    assembly = demo.assembly(MODEL, "fp16")
    before = path.read_bytes()
    digest = EngineSet.open(path, assembly).digest()
    locked = content(path)
    decode(open_model("fp16", 2))
    at_exit()
    (cache,) = caches(path)
    build(assembly, BACKEND, path, SIZES)
    assert path.read_bytes() == before and cache.name not in before.decode() and caches(path) == [cache]
    assert EngineSet.open(path, assembly).digest() == digest and content(path) == locked
