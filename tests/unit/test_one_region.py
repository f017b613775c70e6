"""What has TensorRT 8.6 take a graph as one region changes no bit of what the graph computes."""

import functools

import numpy as np
import onnx
import onnx.parser
import pytest
from test_lowering import BASE, inputs_of, run

from lockstep.engine.fusing import fuse
from lockstep.engine.lowering import lower
from lockstep.engine.tensorrt.one_region import as_one_region
from lockstep.sessions import open_session
from lockstep.split.export import assemble
from lockstep.split.tracer import meta_model

FAMILIES = {
    "llama": {"model_type": "llama", **BASE},
    "olmo2 (norms of whole queries and keys in fp32 to the end)": {"model_type": "olmo2", **BASE},
    "phi3 (one tensor for q, k and v)": {"model_type": "phi3", **BASE, "pad_token_id": 0},
    "gemma3 (norms in fp32 to the end, scaled embedding)": {"model_type": "gemma3_text", **BASE, "head_dim": 8, "query_pre_attn_scalar": 8},
}


@functools.cache
def graphs(family: str, precision: str = "fp16") -> dict[str, onnx.ModelProto]:
    """{class: its graph as it is prepared for TensorRT 8.6}, without the kinds of attention."""
    files, manifest = assemble(meta_model(FAMILIES[family], precision), FAMILIES[family], precision)
    prepared = {}
    for name, entry in manifest["classes"].items():
        prepared[name], _ = fuse(lower(onnx.load_from_string(files[entry["graph"]])), {slot["name"] for slot in entry["slots"]})
    return prepared


@pytest.mark.parametrize("family", FAMILIES)
def test_not_a_bit_changes(family):
    changed = []
    for name, model in graphs(family).items():
        before = model.SerializeToString(deterministic=True)
        whole = as_one_region(model)
        assert model.SerializeToString(deterministic=True) == before
        if whole is None:
            continue
        changed.append(name)
        assert [value.name for value in whole.graph.output] == [value.name for value in model.graph.output] and list(whole.graph.input) == list(model.graph.input)
        assert [node.op_type for node in whole.graph.node[-2:]] == ["Reshape", "Gather"]
        assert list(whole.graph.node[-1].output) == ["logits" if name == "exit" else "hidden" if name == "embedding" else "value"]
        feeds = inputs_of(model)
        expected, found = run(model, feeds), run(whole, feeds)
        for output, values in expected.items():
            assert values.dtype == found[output].dtype and values.shape == found[output].shape and np.isfinite(values).all(), output
            np.testing.assert_array_equal(values.view(np.uint8), found[output].view(np.uint8), err_msg=f"{name}: {output}")
    assert {"entry", "middle", "exit"} <= set(changed)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_inputs_and_outputs_have_one_floating_type(family):
    """A region of TensorRT 8.6 has one for all."""
    for name, model in graphs(family).items():
        floating = {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)} - {onnx.TensorProto.INT64, onnx.TensorProto.INT32}
        assert floating == {onnx.TensorProto.FLOAT16}, name


def fp32_broadcasts(model):
    """[(rank of the operand, rank of the result)] where they differ, in fp32 and but for scalars: there the parser puts a layer that a region gives fp16."""
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    types = {value.name: value.type.tensor_type for value in (*graph.input, *graph.value_info, *graph.output)}
    ranks = {name: len(known.shape.dim) for name, known in types.items() if known.elem_type == onnx.TensorProto.FLOAT}
    pairs = [(ranks.get(name, 0), ranks[node.output[0]]) for node in graph.node if node.op_type in ("Add", "Mul") and node.output[0] in ranks for name in node.input]
    return [(rank, result) for rank, result in pairs if 0 < rank < result]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_weight_is_broadcast_in_fp32(family):
    found = {name: fp32_broadcasts(model) for name, model in graphs(family).items() if as_one_region(model)}
    assert any(found.values()) == (family.startswith(("gemma3", "olmo2")))
    for name, model in graphs(family).items():
        if found.get(name):
            assert not fp32_broadcasts(as_one_region(model)), name
        elif name in found:  # and where there is none, there is nothing to change but the end
            assert [node.op_type for node in as_one_region(model).graph.node[:-2]] == [node.op_type for node in model.graph.node]


def test_a_weight_takes_part_at_every_rank_that_it_is_broadcast_to():
    """Computed once for each rank; what is not made of a weight and scalars alone, and what a weight is besides, stays as it is."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float16[n, 4] x, float16[2, 2, 4] c, float16[4] w) => (float16[4] v, float16[n, 4] y)
        <float one = {1}, float[4] four = {1, 2, 3, 4}> {
            f = Cast<to = 1>(x)  d = Cast<to = 1>(c)  s = Cast<to = 1>(w)  t = Add(s, one)  u = Mul(t, four)
            a = Mul(f, t)  b = Mul(t, f)  e = Mul(d, t)  k = Mul(f, u)
            m = ReduceMax<axes = [0, 1], keepdims = 0>(e)  o = Mul(m, f)
            p = Add(a, b)  q = Add(p, o)  r = Add(q, k)
            v = Cast<to = 10>(t)  y = Cast<to = 10>(r) }"""
    )
    region = as_one_region(model)
    assert [node.op_type for node in region.graph.node].count("Reshape") == 2 + 1  # the weight at ranks 2 and 3, and the end
    assert [list(node.input) for node in region.graph.node if node.output[0] in ("k", "o")] == [["f", "u"], ["m", "f"]]
    random = np.random.default_rng(0)
    feeds = {"x": random.standard_normal((3, 4)).astype("f2"), "c": random.standard_normal((2, 2, 4)).astype("f2"), "w": random.standard_normal(4).astype("f2")}
    for before, after in zip(run(model, feeds).values(), run(region, feeds).values(), strict=True):
        np.testing.assert_array_equal(before.view("u2"), after.view("u2"))


@pytest.mark.parametrize(
    ("family", "precision", "name"),
    [("llama", "fp16", "embedding"), ("llama", "fp32", "middle"), ("gemma3 (norms in fp32 to the end, scaled embedding)", "fp32", "exit")],
)
def test_graphs_that_need_none_have_none(family, precision, name):
    """A Gather at the end is there already; fp32 is not built so."""
    assert as_one_region(graphs(family, precision)[name]) is None


@pytest.mark.parametrize("output", ["float16[n, 2, 4] y", "float16[n, m] y", "float[n, 4] y"])
def test_an_output_of_another_form_is_left(output):
    text = f'<ir_version: 8, opset_import: ["": 17]> g ({output.replace("y", "x")}) => ({output}) {{ y = Identity(x) }}'
    assert as_one_region(onnx.parser.parse_model(text)) is None


def test_what_reads_the_output_goes_on_reading_it():
    text = '<ir_version: 8, opset_import: ["": 17]> g (float16[n, 4] x) => (float[n, 4] z, float16[n, 4] y) { y = Neg(x)  w = Cast<to = 1>(y)  z = Neg(w) }'
    model = onnx.parser.parse_model(text)
    values = np.arange(12, dtype=np.float16).reshape(3, 4)
    z, y = open_session(as_one_region(model).SerializeToString()).run(None, {"x": values})
    np.testing.assert_array_equal(y, -values)
    np.testing.assert_array_equal(z, values.astype(np.float32))
