"""bf16 without hardware for it: ONNX Runtime computes no bf16 on a CPU, so graphs are validated, rewritten and cut in
fp32."""

import dataclasses
import itertools
import shutil

import ml_dtypes
import numpy as np
import onnx
import pytest
from demo_model import CONFIG
from onnx import TensorProto, helper, numpy_helper
from pipeline import run_validate

from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.files import read_json, sha256_file, write_json
from lockstep.backends.onnxruntime.backend import OnnxRuntimeBackend
from lockstep.errors import CheckError
from lockstep.onnx_tools.prepare import check_same, prepare
from lockstep.onnx_tools.rope import rotary
from lockstep.onnx_tools.widened import widened
from lockstep.targets import Results, Target
from lockstep_gpu.attention.rope_tables import check_rope_tables, read_rope_tables
from some import some


@pytest.fixture
def bf16(demo_bf16, tmp_path) -> Results:
    """A copy of the demo in bf16: checkpoint, weights, graphs."""
    return Results(shutil.copytree(demo_bf16.root, tmp_path / "results"))


def validated(results: Results, layers: int | str, out):
    target = Target("demo-llama", "bf16", layers, "onnxruntime")
    tolerances = CONFIG.tolerance("demo-llama", "bf16")
    return run_validate(results, target, tolerances, CONFIG.limits.max_seq_len, out.parent, out=out, threads=1)


def replace(results: Results, name: str, change) -> None:
    """Change a graph of the assembly, as if it had been exported so."""
    path = results.assembly("demo-llama", "bf16")
    assembly = read_json(path)
    entry = assembly["classes"][name]
    model = onnx.load(path.parent / entry["graph"])
    change(model)
    onnx.save(model, path.parent / entry["graph"])
    entry["sha256"] = sha256_file(path.parent / entry["graph"])
    write_json(path, assembly)


@pytest.mark.parametrize("layers", some(["all", 2]))
def test_bf16_graphs_compute_what_torch_computes_in_fp32(bf16, tmp_path, layers):
    report = validated(bf16, layers, tmp_path / "v.json")
    assert report["result"] == "pass" and report["target"]["precision"] == "bf16"
    for block in report["blocks"]:
        for name, tensor in block["tensors"].items():
            # fp32 on both sides; but the scale of attention, 1 / sqrt(40), is bf16 in the graph: 6e-4 of the scores
            assert tensor["max_abs_error"] < (2e-3 if name.endswith("attention") else 1e-5), name
    assert set(report["checks"]["lint"]) == set(report["checks"]["checker"])


def test_a_fault_in_a_bf16_graph_is_found_in_its_layer(bf16, tmp_path):
    def change(model):
        next(node for node in model.graph.node if node.op_type == "Sigmoid").op_type = "Tanh"

    replace(bf16, "middle", change)
    with pytest.raises(
        CheckError,
        match=r"layer 0 \(block entry, attention\): hidden: expected an error of "
        r"at most 0\.0[89]",  # 6 times what bf16 costs here
    ):
        validated(bf16, "all", tmp_path / "v.json")


def test_a_bf16_graph_with_fused_products_is_proven_and_stays_bf16(bf16):
    path = bf16.assembly("demo-llama", "bf16")
    entry = Assembly.load(path).classes["middle"]
    model = onnx.load(path.parent / entry.file)
    prepared = prepare(model, entry.signature.slots, {"fuse_projections": True})
    assert {slot.dtype for slot in prepared.slots} == {"bfloat16"} and any(
        len(parts) == 3 for parts in prepared.parts.values()
    )
    assert {value.type.tensor_type.elem_type for value in prepared.model.graph.output} == {TensorProto.BFLOAT16}
    next(node for node in prepared.model.graph.node if node.op_type == "Sigmoid").op_type = "Tanh"
    with pytest.raises(CheckError, match="graph middle: output .*: the rewritten graph is not equivalent"):
        check_same(model, prepared)


def test_the_rotary_encoding_of_a_bf16_graph_is_read_in_fp32(bf16, tmp_path):
    path = bf16.assembly("demo-llama", "bf16")
    (kind,) = Assembly.load(path).variants.values()
    file = tmp_path / "rotary.onnx"
    onnx.save(rotary(onnx.load(path.parent / kind.decode.file), kind), file)
    executable = OnnxRuntimeBackend().load(file, (), None, False).bind(None, {})
    check_rope_tables(executable, 64, "here")
    first_weight = read_rope_tables(executable, 64, "here").query.first_weight
    angles = np.arange(64)[:, None] * 20000.0 ** (-np.arange(20) / 20)
    # fp32 angles up to 64: 4e-6
    np.testing.assert_allclose(first_weight, np.cos(np.concatenate([angles, angles], axis=1)), atol=1e-5)


def test_a_scale_is_the_kinds_to_its_own_rounding(demo):
    """An fp16 graph's scale is known to 2^-11: one that is off by 0.3 %, less than bf16 rounds by, is another one."""
    path = demo.assembly("demo-llama", "fp16")
    (kind,) = Assembly.load(path).variants.values()
    model = onnx.load(path.parent / kind.decode.file)
    rotary(model, kind)
    with pytest.raises(CheckError, match="expected one product of the query with the scale"):
        rotary(model, dataclasses.replace(kind, scale=kind.scale * 1.003))


def test_all_that_is_bf16_in_a_graph_becomes_fp32():
    """Constants as initializers and in nodes, casts, branches, functions; other types stay."""
    narrow = numpy_helper.from_array(np.array([1.5], ml_dtypes.bfloat16), "c")
    text = """<ir_version: 10, opset_import: ["": 20, "f": 1]> g (bfloat16[n] x, float16[n] h, bool b) => (bfloat16[n] y, float16[n] z)
    { y = If(b) <then_branch = t () => (bfloat16[n] u) { u = Cast<to = 16>(x) }, else_branch = e () => (bfloat16[n] v) { v = f.twice(x) }>  z = Neg(h) }
    <domain: "f", opset_import: ["": 20]> twice (a) => (d) { w = Cast<to = 16>(a)  d = Add(w, w) }"""  # noqa: E501
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(narrow)
    model.graph.node.append(helper.make_node("Constant", [], ["k"], value=narrow))
    wide = widened(model)
    assert "bfloat16" not in onnx.printer.to_text(wide) and "float16[n] h" in onnx.printer.to_text(wide)
    assert numpy_helper.to_array(wide.graph.initializer[0]).tolist() == [1.5] and wide.graph.initializer[0].name == "c"
    for node in itertools.chain(*(function.node for function in wide.functions)):
        assert all(attribute.i == TensorProto.FLOAT for attribute in node.attribute if attribute.name == "to")
    assert widened(wide) is wide and model.graph.input[0].type.tensor_type.elem_type == TensorProto.BFLOAT16
