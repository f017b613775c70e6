"""Building for real: an engine keeps its contract and its precision, and the tactics of a record are found again."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.files import read_json, write_json
from lockstep.artifacts.signature import IO
from lockstep.backends.base import get_backend
from lockstep.errors import CheckError

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.parametrize("backend", ["tensorrt"], indirect=True)]

BLOCK = """<ir_version: 8, opset_import: ["": 17]> g (float16[num_tokens, 64] hidden, float16[128, 64] weight) => (float16[num_tokens, 128] out)
{ product = Gemm<transB = 1>(hidden, weight)  wide = Cast<to = 1>(product)  mean = ReduceMean<axes = [-1], keepdims = 1>(wide)
  centred = Sub(wide, mean)  out = Cast<to = 10>(centred) }"""  # noqa: E501


@pytest.fixture
def graph(tmp_path):
    onnx.save(onnx.parser.parse_model(BLOCK), tmp_path / "block.onnx")
    return tmp_path / "block.onnx"


def build(graph, tactics="free", **changes):
    """Build it as an engine set of one; gives what the manifest and the entry say."""
    backend = get_backend("tensorrt")
    options = {**backend.default_options(), "tactics": tactics, **changes}
    manifest = EngineSetManifest(
        backend="tensorrt", backend_version=backend.version(), builder_revision=backend.revision, precision="fp16",
        device=backend.describe_device(), options=options,
    )  # fmt: skip
    backend.start(graph.parent, manifest, ["block"])
    built = backend.build(graph, graph.parent / "block.engine", options)
    return {**backend.finish(["block"]), **built.about, "note": built.note}


def test_an_engine_is_built_and_small(graph):
    output = build(graph)
    assert 0 < (graph.parent / "block.engine").stat().st_size < 1_000_000
    assert output["tactics"] == {"mode": "free"} and len(output["tactics_sha256"]) == 64 and output["note"] is None


@pytest.mark.parametrize("rows", [1, 3, 64])  # one for each profile
def test_products_are_summed_in_fp32(tmp_path, rows):
    """Of 8192 products: rounding the result alone leaves 3e-4 of its size, sums in fp16 leave 5e-3."""
    from lockstep_gpu import cuda
    from lockstep_gpu.backends.tensorrt.program import TensorRTExecutable, TensorRTProgram
    from lockstep_gpu.weights import Uploads

    onnx.save(onnx.parser.parse_model(BLOCK.replace("64]", "8192]", 2)), tmp_path / "block.onnx")
    build(tmp_path / "block.onnx")
    random = np.random.default_rng(0)
    hidden, weight = (
        random.standard_normal(shape, np.float32).astype(np.float16) for shape in ((rows, 8192), (128, 8192))
    )
    program = TensorRTProgram(tmp_path / "block.engine", [IO("weight", "float16", (128, 8192))])
    stream = program.device.stream
    out = np.empty((rows, 128), np.float16)
    on_device = {
        name: cuda.empty(array.shape, array.dtype)
        for name, array in {"hidden": hidden, "weight": weight, "out": out}.items()
    }
    stream.upload(on_device["hidden"], hidden)
    stream.upload(on_device["weight"], weight)
    TensorRTExecutable(program, {"weight": on_device["weight"]}, Uploads(), {}).prepare(
        {"hidden": on_device["hidden"]}, {"out": on_device["out"]}
    )()
    stream.download(out, on_device["out"])
    stream.synchronize()
    product = hidden.astype(np.float64) @ weight.astype(np.float64).T
    exact = product - product.mean(axis=-1, keepdims=True)
    assert np.sqrt(((out - exact) ** 2).mean() / (exact**2).mean()) < 1e-3


def test_recorded_tactics_are_found_again(graph):
    recorded = build(graph, "record")
    verified = build(graph, "verified")
    assert verified["tactics_sha256"] == recorded["tactics_sha256"]
    assert verified["tactics"]["files"] == recorded["tactics"]["files"]


def test_a_record_that_says_something_else_fails_with_the_layer(graph):
    build(graph, "record")
    path = graph.parent / "tactics.json"
    record = read_json(path)
    record["engines"]["block"]["layers"][0]["tactic"] = "another"
    write_json(path, record)
    with pytest.raises(CheckError, match="expected tactic another, .*as recorded, found tactic"):
        build(graph, "verified")


def test_a_timing_cache_that_is_none_is_refused(graph):
    build(graph, "record")
    (graph.parent / "timing.cache").write_bytes(b"no cache")
    with pytest.raises(CheckError, match="timing.cache: expected sha256"):
        build(graph, "verified")
