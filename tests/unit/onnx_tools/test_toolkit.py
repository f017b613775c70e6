"""Passes over graphs: the toolkit, and that no pass changes what a graph computes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from lockstep.artifacts.adapters import A_SUFFIX, B_SUFFIX
from lockstep.backends.onnxruntime.adapter_products import KeepOrder
from lockstep.backends.onnxruntime.fixed_sums import FixSums
from lockstep.backends.onnxruntime.norms import FuseNorms
from lockstep.backends.onnxruntime.whole_vectors import PadAngles
from lockstep.onnx_tools.cut_products import AddBiasesAfter
from lockstep.onnx_tools.prepare import random_inputs
from lockstep.onnx_tools.sessions import compute
from lockstep.onnx_tools.toolkit import GraphWriter, Pass, add_input, infer_types, replace, run_passes
from lockstep.onnx_tools.values import is_linear, maker, shape_of, upstream
from lockstep.provenance.code_identity import SOURCES
from lockstep_gpu.backends.tensorrt.fp32_sums import Fp32Sums

TESTS = Path(__file__).parents[1]
CONTRIBUTING = TESTS.parents[1] / "CONTRIBUTING.md"
HEADER = '<ir_version: 10, opset_import: ["": 20]> g '
TEXT = f"""{HEADER}(float[num_tokens, 4] x, float[3, 4] w, float[3] b) => (float[num_tokens, 3] y)
<float half = {{0.5}}>
{{ a = Relu(x)  p = Gemm<transB = 1>(a, w, b)  y = Mul(p, half) }}"""
NORM = f"""{HEADER}(float[num_tokens, 8] hidden, float[8] weight) => (float[num_tokens, 8] y)
<float two = {{2}}, float eps = {{1e-5}}, int64[1] axis = {{-1}}>
{{ p = Pow(hidden, two)  m = ReduceMean(p, axis)  s = Add(m, eps)  r = Sqrt(s)  i = Reciprocal(r)  n = Mul(hidden, i)
y = Mul(n, weight) }}"""
SAME = {
    Fp32Sums: f"{HEADER}(float16[num_tokens, 4] x, float16[3, 4] w, float16[3] b) => (float16[num_tokens, 3] y) "
    "{ y = Gemm<transB = 1>(x, w, b) }",
    PadAngles: f"{HEADER}(float[num_tokens, 3] x) => (float[num_tokens, 3] y, float[num_tokens, 3] z) "
    "{ y = Cos(x)  z = Sin(x) }",
    FixSums: f"{HEADER}(float[num_tokens, 6] x) => (float[num_tokens, 1] y) <int64[1] axis = {{-1}}> "
    "{ y = ReduceMean(x, axis) }",
    KeepOrder: f'{HEADER}(float[num_tokens, 256] x, float[256, 8] "w{A_SUFFIX}", float[8, 4] "w{B_SUFFIX}") => '
    f'(float[num_tokens, 4] y) {{ thin = Gemm(x, "w{A_SUFFIX}")  y = Gemm(thin, "w{B_SUFFIX}") }}',
    FuseNorms: NORM,
    AddBiasesAfter: TEXT,
}
# Those whose graphs have other inputs, or are no graphs that a library computes, are proven where those are made.
ELSEWHERE = {
    "AddLora": "test_adapters.py", "ChosenExperts": "test_row_kernels.py", "CutRope": "test_rope.py",
    "DropCasts": "test_cuda.py", "ExpandWeights": "test_openvino.py", "ExpertProducts": "test_cuda.py",
    "ExposeChoices": "test_routing.py", "FewExperts": "test_cuda.py", "FuseProjections": "test_fuse_projections.py",
    "GroupExperts": "test_experts.py", "GroupedAttention": "test_fused_nodes.py", "IdsAsMask": "test_adapter_rows.py",
    "InParts": "test_row_kernels.py", "Int8Products": "test_quantization.py", "JoinSums": "test_tensor_parallel.py",
    "PlainProducts": "test_openvino.py", "QuantizeWeights": "test_quantization.py",
    "RoundValues": "test_noisy_graph.py", "ShrinkInRows": "test_adapter_rows.py",
    "WithoutAdapters": "test_adapter_rows.py",
}  # fmt: skip


def assert_same(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """Both compute the same on random numbers, but for the order of sums and one rounding of the result."""
    assert before is not after and before != after, "the pass changes the graph"
    feeds = random_inputs(before)
    expected = compute(before, feeds)
    results = compute(after, feeds)
    assert expected.keys() == results.keys()
    for name, values in expected.items():
        error = np.abs(values.astype(np.float64) - results[name]).max()
        assert error <= 8 * np.finfo(values.dtype).eps * max(1, np.abs(values).max()), name


@pytest.fixture
def model() -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(TEXT))


@pytest.mark.parametrize("graph_pass", SAME)
def test_a_pass_computes_what_was_there_before(graph_pass: type[Pass]) -> None:
    before = onnx.parser.parse_model(SAME[graph_pass])
    assert_same(before, run_passes(before, graph_pass(), check=graph_pass is not FuseNorms))
    assert before == onnx.parser.parse_model(SAME[graph_pass]), "the model itself stays as it is"


def test_each_pass_is_proven() -> None:
    passes = set()
    for path in SOURCES.rglob("*.py"):
        passes.update(re.findall(r"^class (\w+)\(Pass\):", path.read_text(), re.MULTILINE))
    assert passes == {graph_pass.__name__ for graph_pass in SAME} | set(ELSEWHERE)
    assert set(ELSEWHERE.values()) <= {file.name for file in TESTS.rglob("test_*.py")}


def test_a_pass_is_added_as_the_guide_says(tmp_path: Path) -> None:
    section = CONTRIBUTING.read_text().partition("## Add a pass\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, type[Pass]] = {}
    exec(block, names)
    before = onnx.parser.parse_model(f"{HEADER}(float[num_tokens, 4] x) => (float[num_tokens, 4] y) {{ y = Neg(x) }}")
    after = run_passes(before, names["SubtractForNeg"]())
    assert [node.op_type for node in after.graph.node] == ["Sub"]
    assert_same(before, after)
    assert run_passes(after, names["SubtractForNeg"]()) is after


def test_what_only_a_replaced_node_read_is_removed(model: ir.Model) -> None:
    (product,) = filter(is_linear, model.graph)

    class Double(Pass):
        def call(self, model: ir.Model) -> ir.passes.PassResult:
            node = model.graph[1]
            writer = GraphWriter(model.graph, "double", before=node)
            doubled = writer.op("Mul", node.inputs[0], np.float32(2))
            writer.op("Gemm", doubled, node.inputs[1], transB=1, replaces=node.outputs[0])
            return ir.passes.PassResult(model, True)

    changed = run_passes(onnx.parser.parse_model(TEXT), Double())
    assert [node.op_type for node in changed.graph.node] == ["Relu", "Mul", "Gemm", "Mul"]
    assert [value.name for value in changed.graph.input] == ["x", "w"]
    assert changed.graph.node[2].output[0] == product.outputs[0].name == "p"


def test_an_input_stands_where_it_is_put_and_a_reader_may_keep_the_old_value(model: ir.Model) -> None:
    graph = model.graph
    x, weight, _ = graph.inputs
    scales = add_input(graph, "s", ir.DataType.FLOAT, [3, 1], before=graph.inputs[2])
    assert [value.name for value in graph.inputs] == ["x", "w", "s", "b"] and shape_of(scales) == ir.Shape([3, 1])
    relu = maker(graph[1].inputs[0], "Relu")
    assert relu is not None and relu.inputs[0] is x and maker(x, "Relu") is None
    scaled = GraphWriter(graph, before=graph[1]).op("Mul", weight, scales)
    replace(weight, scaled, keep=scaled.producer())
    assert scaled.name == "w" and graph[2].inputs[1] is scaled and scaled.producer().inputs[0] is weight
    assert {value.name for value in upstream([graph[2].outputs[0]], [scaled])} == {"p", "a", "x", "w", "b"}


def test_an_invalid_graph_is_rejected() -> None:
    class Break(Pass):
        def call(self, model: ir.Model) -> ir.passes.PassResult:
            model.graph[0].replace_input_with(0, ir.Value(name="nothing"))
            return ir.passes.PassResult(model, True)

    with pytest.raises(onnx.checker.ValidationError, match="nothing"):
        run_passes(onnx.parser.parse_model(TEXT), Break())


def test_types_and_shapes_of_all_values_are_inferred(model: ir.Model) -> None:
    infer_types(model)
    shapes = {node.outputs[0].name: str(node.outputs[0].shape) for node in model.graph}
    assert shapes == {"a": "[num_tokens,4]", "p": "[num_tokens,3]", "y": "[num_tokens,3]"}
