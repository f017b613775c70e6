"""Engines against their graphs: right ones pass, and each planted fault is named with engine, sizes, output, error
and tolerance."""

from __future__ import annotations

import gc
import importlib.util
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from demo_model import CONFIG, TOLERANCES
from onnx import helper, numpy_helper

from fake_gpu import tensorrt
from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.files import read_json, sha256_file, write_json
from lockstep.backends.builder import build
from lockstep.backends.engine_set import EngineSet
from lockstep.backends.profiles import profiles
from lockstep.config import load
from lockstep.errors import CheckError, InputError
from lockstep.onnx_tools import rope
from lockstep.stages import jobs
from lockstep.targets import Limits
from lockstep.verify.compare import inputs, run
from lockstep.verify.metrics import failed_path
from lockstep_gpu.attention.rope_tables import read_rope_tables

MODEL = "demo-llama"


@pytest.fixture(scope="session")
def fused(demo, tmp_path_factory) -> dict[str, Path]:
    """{precision: engines.json} of ONNX Runtime with fused slots, as TensorRT has them."""
    folder = tmp_path_factory.mktemp("fused")
    return {
        p: build(demo.assembly(MODEL, p), "onnxruntime", folder / p / "engines.json", {"fuse_projections": True})
        for p in ("fp32", "fp16")
    }


@pytest.fixture
def engines(fused, tmp_path) -> Path:
    """A copy of the fp16 engines that a test may spoil."""
    return shutil.copytree(fused["fp16"].parent, tmp_path / "engines") / "engines.json"


def compare(demo, engines: Path, out: Path, precision: str = "fp16") -> dict:
    run(
        demo.assembly(MODEL, precision),
        demo.weights(MODEL, precision),
        engines,
        TOLERANCES[precision],
        CONFIG.limits.plain(),
        out,
        seconds=0,  # all sizes: test_sweep.py
    )
    return read_json(out)


def failing(demo, engines: Path, out: Path) -> tuple[str, dict]:
    """The line of a comparison that must fail, and the report that it leaves."""
    with pytest.raises(CheckError) as error:
        compare(demo, engines, out)
    assert not out.exists() and str(error.value).endswith(f"; details in {failed_path(out)}")
    return str(error.value), read_json(failed_path(out))


def spoil(engines: Path, name: str, output: str, operator: str, factor: float) -> None:
    """Let an engine give `output` <operator> `factor`, with a digest that fits."""
    file = engines.parent / f"{name}.onnx"
    model = onnx.load(file)
    for node in model.graph.node:
        node.output[:] = [f"{output}/right" if value == output else value for value in node.output]
        node.input[:] = [f"{output}/right" if value == output else value for value in node.input]
    model.graph.initializer.append(numpy_helper.from_array(np.array(factor, np.float16), "factor"))
    model.graph.node.append(helper.make_node(operator, [f"{output}/right", "factor"], [output]))
    file.write_bytes(model.SerializeToString())
    manifest = read_json(engines)
    manifest["engines"][name]["sha256"] = sha256_file(file)
    write_json(engines, manifest)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_engines_are_their_graphs(demo, fused, tmp_path, precision) -> None:
    report = compare(demo, fused[precision], tmp_path / "out.json", precision)
    assert report["result"] == "pass" and set(report["engines"]) == set(read_json(fused[precision])["engines"])
    assert all(entry["passed"] and entry["cosine"] > 0.999999 for entry in report["engines"].values())
    # Sums in another order, no more: of the last bits of a number (2^-24 and 2^-11 of its size), in all rows.
    assert 0 <= report["relative_error"] <= {"fp32": 32 * 2**-24, "fp16": 4 * 2**-11}[precision]
    middle = report["engines"]["middle"]
    assert [entry["sizes"] for entry in middle["runs"]] == [
        {"num_tokens": size} for size in (1, 2, 4, 1, 32)
    ] and middle["weights_of_layer"] == 1
    assert all(set(entry["outputs"]) == {"hidden_out", "query", "key", "value"} for entry in middle["runs"])


def test_weights_in_another_order_are_found(demo, engines, tmp_path) -> None:
    manifest = read_json(engines)
    parts = manifest["engines"]["middle"]["parts"]
    (slot,) = (slot for slot in parts if "k_proj" in slot)
    query, key, value = parts[slot]
    parts[slot] = [query, value, key]
    write_json(engines, manifest)
    line, report = failing(demo, engines, tmp_path / "out.json")
    assert "middle.onnx: engine middle, profile 0 (num_tokens 1), key: expected an error of at most 0.0" in line
    assert [name for name, entry in report["engines"].items() if not entry["passed"]] == ["middle"]
    outputs = report["engines"]["middle"]["runs"][2]["outputs"]
    assert (
        min(outputs[name]["relative_error"] for name in ("key", "value"))
        > 1
        > 1e-3
        > max(outputs[name]["relative_error"] for name in ("query", "hidden_out"))
    )


@pytest.mark.parametrize(
    "name, output", [("embedding", "hidden"), ("exit", "logits"), ("attention.decode", "attention")]
)
def test_an_output_that_is_scaled_is_found_however_small_it_is(demo, engines, tmp_path, name, output) -> None:
    spoil(engines, name, output, "Mul", 1.02)
    line, report = failing(demo, engines, tmp_path / "out.json")
    assert (
        f"engine {name}, profile 0 (" in line
        and f"), {output}: expected an " in line
        and "error of at most 0.0" in line
    )
    assert 0.018 < report["engines"][name]["relative_error"] < 0.022
    # which a plain tolerance would let through
    assert name != "embedding" or report["engines"][name]["max_abs_error"] < 0.01


def test_what_is_not_finite_is_found(demo, engines, tmp_path) -> None:
    for name in ("entry", "exit"):
        spoil(engines, name, {"entry": "value", "exit": "logits"}[name], "Div", 0.0)
    line, report = failing(demo, engines, tmp_path / "out.json")
    assert (
        "engine entry, profile 0 (num_tokens 1), value: expected finite numbers, found NaN or infinity (1 "
        "more of 6 engines differ)"
    ) in line
    assert report["relative_error"] is None and report["engines"]["entry"]["cosine"] is None
    assert report["engines"]["middle"]["passed"]


def test_inputs_that_do_not_fit_are_named(demo, fused, engines, tmp_path) -> None:
    with pytest.raises(InputError, match="weights.json: precision: expected fp16 as in the assembly, found fp32"):
        run(
            demo.assembly(MODEL, "fp16"), demo.weights(MODEL, "fp32"), fused["fp16"], TOLERANCES["fp16"],
            CONFIG.limits.plain(),
            tmp_path / "out.json",
        )  # fmt: skip
    (engines.parent / "exit.onnx").write_bytes(b"")
    with pytest.raises(CheckError, match="exit.onnx: sha256: made for .*the file is damaged"):
        compare(demo, engines, tmp_path / "out.json")
    graphs = shutil.copytree(demo.assembly(MODEL, "fp16").parent, tmp_path / "graphs")
    (graphs / "middle.onnx").write_bytes(b"")
    with pytest.raises(CheckError, match="middle.onnx: expected sha256 .*export again"):
        run(
            graphs / "assembly.json", demo.weights(MODEL, "fp16"), fused["fp16"], TOLERANCES["fp16"],
            CONFIG.limits.plain(),
            tmp_path / "out.json",
        )  # fmt: skip
    assert not list(tmp_path.glob("out*"))


def test_every_precision_is_compared(tmp_path, gpu) -> None:
    model = {
        "source": "a",
        "layers": [2],
        "precisions": ["fp16", "bf16"],
        "backends": ["tensorrt"],
        "golden": {"prompts": [{"text": "a"}]},
    }
    tensorrt = load.load({"models": {"m": model}})
    fp16, bf16 = ([job.stage for job in jobs(tensorrt, tmp_path, [target])] for target in tensorrt.targets())
    assert set(fp16) == {
        *("resolve", "architecture", "export", "convert", "validate", "build", "compare", "reference"),
        *("golden", "served"),
    }
    assert bf16 == fp16


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="TensorRT is installed here")
def test_without_tensorrt_what_is_missing_is_said(demo, engines, tmp_path) -> None:
    write_json(engines, {**read_json(engines), "backend": "tensorrt"})
    with pytest.raises(
        InputError,
        match="backend tensorrt: the Python package tensorrt is not installed for "
        "this Python; pip install tensorrt-cu12, or see",
    ):
        compare(demo, engines, tmp_path / "out.json")


# --- sizes and inputs

GRAPH = """<ir_version: 8, opset_import: ["": 17]> g (float[num_tokens, 8] hidden, int64[num_requests] logit_rows) => (float[num_requests, 8] out)
{ out = Gather<axis = 0>(hidden, logit_rows) }"""  # noqa: E501
BLOCK = (
    '<ir_version: 8, opset_import: ["": 17]> g (float[num_tokens, 8] hidden) => (float[num_tokens, 8] '
    "out) { out = Neg(hidden) }"
)
CACHE = """<ir_version: 8, opset_import: ["": 17]> g (int64[num_tokens] position_ids, float[1, past_capacity] past_key, int64[1] past_lengths) => (int64[num_tokens] out)
{ out = Add(position_ids, past_lengths) }"""  # noqa: E501
LIMITS = Limits(max_batch_size=16, max_num_tokens=512, max_seq_len=256)


@pytest.mark.parametrize("graph, limits, expected", [
    (GRAPH, {}, [(0, 1, 1), (1, 1, 1), (1, 32, 4), (2, 5, 5), (2, 32, 8), (3, 9, 9), (3, 32, 16)]),
    (GRAPH, {"max_batch_size": 1, "max_num_tokens": 8}, [(0, 1, 1), (1, 1, 1), (1, 9, 1)]),
    (GRAPH,
        {"max_batch_size": 100},
        [(0, 1, 1), (1, 1, 1), (1, 32, 4), (2, 5, 5), (2, 32, 8), (3, 9, 9), (3, 32, 16), (4, 17, 17), (4, 32, 32)] + [
            (5, 33, 33), (6, 65, 65)]),
    (BLOCK, {}, [(0, 1), (1, 2), (1, 4), (2, 5), (2, 8), (3, 9), (3, 16), (4, 1), (4, 32)]),
    (BLOCK, {"max_batch_size": 1, "max_num_tokens": 8}, [(0, 1), (1, 1), (1, 9)]),
    (BLOCK,
        {"max_batch_size": 100},
        [(0, 1), (1, 2), (1, 4), (2, 5), (2, 8), (3, 9), (3, 16), (4, 17), (4, 32), (5, 33), (6, 65), (7, 1), (7, 32)]),
])  # fmt: skip
def test_each_profile_is_run_at_its_smallest_and_at_a_size_that_takes_seconds(graph, limits, expected) -> None:
    assembly = SimpleNamespace(max_position_embeddings=None)
    actual = inputs.cases(inputs.ComparedGraph(onnx.parser.parse_model(graph), assembly, replace(LIMITS, **limits)))
    for case, (profile, *sizes) in zip(actual, expected, strict=True):
        assert case.profile == profile
        assert case.sizes == dict(zip(("num_tokens", "num_requests"), sizes))


@pytest.mark.parametrize("positions, expected", [(2048, 32), (16, 8), (None, 32)])
def test_positions_are_those_that_the_model_has(positions, expected) -> None:
    assembly = SimpleNamespace(max_position_embeddings=positions)
    graph = inputs.ComparedGraph(onnx.parser.parse_model(CACHE), assembly, LIMITS)
    smallest, chosen = inputs.cases(graph)
    assert smallest.sizes == {"num_tokens": 1, "past_capacity": 1}
    assert chosen.sizes == {"num_tokens": expected, "past_capacity": expected}
    feed = inputs.arrays(graph, chosen)
    assert feed["past_lengths"] == expected // 2 and feed["position_ids"].tolist() == list(
        range(expected // 2, expected // 2 + expected)
    )
    assert feed["position_ids"].max() < (positions or 64)


def test_integers_of_unknown_meaning_are_refused() -> None:
    model = onnx.parser.parse_model(GRAPH.replace("logit_rows", "levels"))
    assembly = SimpleNamespace(max_position_embeddings=8)
    with pytest.raises(CheckError, match="graph g: expected integers that a decoder step has, found the input levels"):
        inputs.arrays(
            inputs.ComparedGraph(model, assembly, LIMITS), inputs.Case(0, {"num_tokens": 1, "num_requests": 1})
        )


# --- TensorRT's runner, over the fake TensorRT


def build_and_compare(demo, folder: Path, precision: str, assembly: Path | None = None, **options) -> Path:
    """Build TensorRT's engines and hold them to their graphs; gives engines.json, next to it compare.json."""
    assembly = assembly or demo.assembly(MODEL, precision)
    engines = build(assembly, "tensorrt", folder / "engines.json", options)
    weights = demo.weights(MODEL, precision)
    tolerance = TOLERANCES[precision]
    run(assembly, weights, engines, tolerance, LIMITS, folder / "compare.json", seconds=0)
    return engines


@pytest.fixture
def built(capsys):
    """How many engines were built since it was asked last."""
    return lambda: capsys.readouterr().err.count("build: engine ")


@pytest.mark.parametrize("precision, attention", [("fp16", "fused"), ("fp32", "traced")])
def test_engines_of_tensorrt_run_on_each_of_their_profiles(gpu, demo, tmp_path, precision, attention) -> None:
    """Prepared graphs (opset 17, fused slots), int32 for int64, weights side by side, memory freed but the scratch."""
    build_and_compare(demo, tmp_path, precision, attention=attention)
    gc.collect()  # after tests of other modules some memory is in reference cycles
    report = read_json(tmp_path / "compare.json")
    kinds = set() if attention == "fused" else {"attention.decode", "attention.prefill"}
    assert set(report["engines"]) == {"embedding", "entry", "middle", "exit", *kinds}
    assert report["versions"]["tensorrt"] == "10.6.0"
    profiles = []
    for name in sorted(report["engines"]):
        profiles += [run["profile"] for run in report["engines"][name]["runs"]]
    chosen = [number for number in profiles if number]  # a context begins in the first
    assert gpu.profiles == chosen and max(profiles) == 2
    assert report["relative_error"] <= {"fp32": 16 * 2**-24, "fp16": 4 * 2**-11}[precision] and gpu.blocks == 1


def test_a_rotary_encoding_is_its_graph_and_no_plan(gpu, demo, tmp_path) -> None:
    """It lies next to the plans, in the canonical opset; it is loaded and read."""
    manifest = read_json(build_and_compare(demo, tmp_path, "fp16", attention="fused"))
    entry = manifest["engines"]["attention.rotary"]
    file = tmp_path / "attention.rotary.onnx"
    graph = read_json(demo.assembly(MODEL, "fp16"))["kinds"]["attention"]["decode"]
    assert entry == {"file": file.name, "sha256": sha256_file(file), "graph_sha256": graph["sha256"]}
    assert {
        Path(other["file"]).suffix for name, other in manifest["engines"].items() if name != "attention.rotary"
    } == {".engine"}
    assert [opset.version for opset in onnx.load(file).opset_import] == [20] and file.stat().st_size < 4096
    opened = EngineSet.open(tmp_path / "engines.json", demo.assembly(MODEL, "fp16"))
    read = read_rope_tables(opened.load("attention.rotary").bind(None, {}), 8, "attention.rotary").query
    dim = onnx.load(file).graph.output[0].type.tensor_type.shape.dim[2].dim_value
    assert read.second.tolist() == [*range(dim // 2, dim), *range(dim // 2)]
    # The first frequency is 1; cosines are fp16.
    assert np.abs(read.first_weight[:, 0] - np.cos(np.arange(8))).max() < 2**-11
    assert [node.op_type for node in onnx.load(file).graph.node].count("Cos") == 1


def test_a_rotary_encoding_is_kept_with_recorded_plans_and_goes_with_fused_attention(
    gpu, demo, tmp_path, built
) -> None:
    build_and_compare(demo, tmp_path, "fp16", tactics="record")
    assert built() == 5
    before = built_files(tmp_path)
    assert set(read_json(tmp_path / "tactics.json")["engines"]) == {"embedding", "entry", "middle", "exit"}
    build_and_compare(demo, tmp_path, "fp16", tactics="record")
    assert built() == 0 and built_files(tmp_path) == before
    build_and_compare(demo, tmp_path, "fp16", tactics="verified")  # the engines that the record speaks of
    assert built() == 0 and read_json(tmp_path / "engines.json")["options"]["tactics"] == "verified"
    (tmp_path / "middle.engine").unlink()
    build_and_compare(demo, tmp_path, "fp16", tactics="verified")
    assert built() == 1
    build_and_compare(demo, tmp_path, "fp16", attention="traced")
    assert not (tmp_path / "attention.rotary.onnx").exists() and (tmp_path / "attention.decode.engine").exists()


def built_files(folder: Path) -> dict[str, bytes]:
    """Return the files but the comparison's report: sums of several threads differ in their last bits."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "compare.json"}


def test_a_build_for_fused_attention_asks_for_cudnn_first_and_no_other_build_does(
    gpu, demo, tmp_path, built, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(InputError) as refused:
        build_and_compare(demo, tmp_path / "fused", "fp16", attention="fused")
    assert built() == 0 and not (tmp_path / "fused").exists()
    assert str(refused.value) == (
        "expected the Python package nvidia-cudnn-frontend and the library cuDNN 9, which compute attention, "
        "found: import of cudnn halted; None in sys.modules; install what is missing, or build with attention: traced"
    )
    for precision, attention in (("fp32", "fused"), ("fp16", "traced")):
        build_and_compare(demo, tmp_path / precision, precision, attention=attention)
        assert built() == 6


def test_engines_with_other_flags_of_the_compiler_are_other_engines(gpu, demo, tmp_path, built, monkeypatch) -> None:
    """`__LUNOWUD` decides what a fused region computes: nothing built with one value is kept, or replayed, for
    another."""
    build_and_compare(demo, tmp_path, "fp16", tactics="record")
    assert built() == 5 and "compiler_flags" not in read_json(tmp_path / "engines.json")["options"]
    monkeypatch.setenv("__LUNOWUD", "-cask:fp16_acc=on")
    with pytest.raises(
        CheckError,
        match="tactics.json: options: expected compiler_flags -cask:fp16_acc=on, found no compiler_flags; build "
        "with tactics: record$",
    ):
        build_and_compare(demo, tmp_path, "fp16", tactics="verified")
    assert built() == 0
    build_and_compare(demo, tmp_path, "fp16", tactics="record")
    assert built() == 5 and read_json(tmp_path / "engines.json")["options"]["compiler_flags"] == "-cask:fp16_acc=on"
    build_and_compare(demo, tmp_path, "fp16", tactics="record")
    assert built() == 0


def test_a_set_in_which_the_file_of_an_engine_has_another_name_is_refused(demo, engines, tmp_path) -> None:
    """As of sets whose rotary encoding was built by TensorRT."""
    manifest = read_json(engines)
    (engines.parent / "entry.onnx").rename(engines.parent / "entry.engine")
    manifest["engines"]["entry"]["file"] = "entry.engine"
    write_json(engines, manifest)
    with pytest.raises(
        CheckError,
        match="the file entry.onnx, found entry.engine; build the engines again: lockstep run -- --forcerun build",
    ):
        compare(demo, engines, tmp_path / "out.json")


def test_a_rotary_encoding_of_another_form_fails_the_build(gpu, demo, tmp_path) -> None:
    """Whose elements are made of three: only who reads the encoding can see it."""
    graphs = shutil.copytree(demo.assembly(MODEL, "fp16").parent, tmp_path / "graphs")
    assembly = read_json(graphs / "assembly.json")
    decode = assembly["kinds"]["attention"]["decode"]
    model = onnx.load(graphs / decode["graph"])
    dim = assembly["kinds"]["attention"]["head_dim"]
    model.graph.initializer.append(numpy_helper.from_array(np.roll(np.arange(dim), 1), "order"))
    variant = Assembly.load(graphs / "assembly.json").variants["attention"]
    rotated = [rope.rotated_query(ir.from_proto(model).graph, variant, None)[0].name, "key_out"]
    for value in rotated:
        at, maker = next((at, node) for at, node in enumerate(model.graph.node) if value in node.output)
        maker.output[:] = [f"{value}/first"]
        moved = helper.make_node("Gather", [f"{value}/first", "order"], [f"{value}/moved"], axis=2)
        model.graph.node.insert(at + 1, moved)
        model.graph.node.insert(at + 2, helper.make_node("Add", [f"{value}/first", f"{value}/moved"], [value]))
    onnx.save(model, graphs / decode["graph"])
    decode["sha256"] = sha256_file(graphs / decode["graph"])
    write_json(graphs / "assembly.json", assembly)
    with pytest.raises(CheckError) as refused:
        build_and_compare(demo, tmp_path / "engines", "fp16", graphs / "assembly.json")
    assert not list((tmp_path / "engines").glob("*.onnx")) and not (tmp_path / "engines" / "engines.json").exists()
    message = str(refused.value)
    assert "engines/attention.rotary.onnx: expected RoPE that mixes pairs of elements" in message
    assert message.endswith("made of 4 others; build with attention: traced")


def test_a_shape_that_the_engine_refuses_is_one_line(gpu, demo, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tensorrt, "profiles", lambda model, limits: profiles(model, limits)[::-1])
    with pytest.raises(CheckError) as refused:
        build_and_compare(demo, tmp_path, "fp16", max_batch_size=64)
    assert not list(tmp_path.glob("compare*"))
    message = str(refused.value)
    assert re.search(r"entry\.engine: input \w+: TensorRT [\d.]+ refuses the shape \[.*\]: no message", message)
    assert "\n" not in message
