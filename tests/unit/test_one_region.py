"""What has TensorRT 8.6 take a graph as one region changes no bit of what the graph computes."""

import functools

import families
import handmade
import numpy as np
import onnx
import onnx.parser
import pytest
from test_lowering import inputs_of

from lockstep.backends.tensorrt.v8_6 import one_region
from lockstep.backends.tensorrt.v8_6.one_region import as_one_region
from lockstep.errors import CheckError
from lockstep.onnx_tools.fuse_projections import fuse
from lockstep.onnx_tools.lower_opset import lower
from lockstep.onnx_tools.sessions import compute, open_session
from some import some

pytestmark = pytest.mark.exports

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
BASE = {"vocab_size": 64, "intermediate_size": 48, **SIZES}
FAMILIES = {
    "llama": handmade.CONFIG,
    "olmo2 (norms of whole queries and keys in fp32 to the end)": {"model_type": "olmo2", **BASE},
    "phi3 (one tensor for q, k and v)": {"model_type": "phi3", **BASE, "pad_token_id": 0},
    "gemma3 (norms in fp32 to the end, scaled embedding)": {
        "model_type": "gemma3_text",
        **BASE,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
    },
}

# Their copies are held to the graphs within rounding, before they are built: some of ONNX Runtime's own fp16 kernels
# depend on what is around them.
BROADCASTING = {
    "cohere (weights of several heads)": {"model_type": "cohere", **BASE, "use_qk_norm": True},
    "hunyuan (frequencies of the rotary encoding)": {"model_type": "hunyuan_v1_dense", **BASE, "head_dim": 8},
}


PLAIN = {"llama (biases)": families.FAMILIES["llama"].config}  # that other tests trace in fp32 too


# The others show the same; each costs a trace.
ALWAYS = ("llama",)


def sample(families):
    return some(families, *(name for name in families if name.startswith(ALWAYS)))


@pytest.fixture(scope="module")
def graphs(shared):
    """{class: its graph as it is prepared for TensorRT 8.6} of a family, without the kinds of attention."""

    @functools.cache
    def made(family: str, precision: str = "fp16") -> dict[str, onnx.ModelProto]:
        files, manifest = shared.assembled((FAMILIES | BROADCASTING | PLAIN)[family], precision)
        prepared = {}
        for name, entry in manifest.classes.items():
            prepared[name], _ = fuse(
                lower(onnx.load_from_string(files[entry.file])), {slot.name for slot in entry.signature.slots}
            )
        return prepared

    return made


@pytest.mark.parametrize("family", sample(FAMILIES))
def test_not_a_bit_changes(graphs, family):
    changed = []
    for name, model in graphs(family).items():
        before = model.SerializeToString(deterministic=True)
        whole = as_one_region(model)
        assert model.SerializeToString(deterministic=True) == before
        if whole is None:
            continue
        changed.append(name)
        assert [value.name for value in whole.graph.output] == [value.name for value in model.graph.output] and list(
            whole.graph.input
        ) == list(model.graph.input)
        assert [node.op_type for node in whole.graph.node[-2:]] == ["Reshape", "Gather"]
        assert list(whole.graph.node[-1].output) == [
            "logits" if name == "exit" else "hidden" if name == "embedding" else "value"
        ]
        feeds = inputs_of(model)
        expected, found = compute(model, feeds), compute(whole, feeds)
        for output, values in expected.items():
            assert (
                values.dtype == found[output].dtype
                and values.shape == found[output].shape
                and np.isfinite(values).all()
            ), output
            np.testing.assert_array_equal(
                values.view(np.uint8), found[output].view(np.uint8), err_msg=f"{name}: {output}"
            )
    assert {"entry", "middle", "exit"} <= set(changed)


@pytest.mark.parametrize("family", sample(FAMILIES))
def test_all_inputs_and_outputs_have_one_floating_type(graphs, family):
    """A region of TensorRT 8.6 has one for all."""
    for name, model in graphs(family).items():
        floating = {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)} - {
            onnx.TensorProto.INT64,
            onnx.TensorProto.INT32,
        }
        assert floating == {onnx.TensorProto.FLOAT16}, name


def fp32_broadcasts(model):
    """[(operand, its rank, rank of the result)] where they differ, in fp32 and but for scalars: there the parser puts a
    layer that a region gives fp16."""
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    types = {value.name: value.type.tensor_type for value in (*graph.input, *graph.value_info, *graph.output)}
    ranks = {name: len(known.shape.dim) for name, known in types.items() if known.elem_type == onnx.TensorProto.FLOAT}
    ranks.update(
        (tensor.name, len(tensor.dims)) for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT
    )
    found = []
    for node in graph.node:
        if node.op_type in ("Add", "Sub", "Mul", "Div") and node.output[0] in ranks:
            found += [
                (name, ranks[name], ranks[node.output[0]])
                for name in node.input
                if 0 < ranks[name] < ranks[node.output[0]]
            ]
    return found


@pytest.mark.parametrize("family", sample([*FAMILIES, *BROADCASTING]))
def test_nothing_is_broadcast_in_fp32(graphs, family):
    changed = set()
    for name, model in graphs(family).items():
        region = as_one_region(model)
        if region and fp32_broadcasts(model):
            changed.add(name)
            assert not fp32_broadcasts(region), name
        elif region:  # and where nothing is, nothing changes but the end
            assert [node.op_type for node in region.graph.node[:-2]] == [node.op_type for node in model.graph.node]
    assert bool(changed) == family.startswith(("gemma3", "olmo2", "cohere", "hunyuan"))


SEVERAL = """<ir_version: 8, opset_import: ["": 17]> g (float16[num_tokens, 4] x, float16[2, num_tokens, 4] z, float16[4] w, float16[1, 4] w2,
        float16[2, 4] w3, float16[4, num_tokens] x2, float16[num_tokens] scale) => (float16[4] v, float16[num_tokens, 4] y)
    <float one = {1}, float[4] four = {1, 2, 3, 4}, int64[1] first = {0}, int64[1] last = {1}> {
        f = Cast<to = 1>(x)  d = Cast<to = 1>(z)  s = Cast<to = 1>(w)  s2 = Cast<to = 1>(w2)  s3 = Cast<to = 1>(w3)
        t = Add(s, one)  u = Mul(t, four)  both = Add(t, s2)  low, high = Split<axis = 0>(s3)  most = ReduceMax<axes = [0], keepdims = 0>(s3)
        f2 = Cast<to = 1>(x2)  long = Cast<to = 1>(scale)  scaled = Mul(f2, long)  some = ReduceSum<keepdims = 0>(scaled, last)
        a = Mul(f, t)  b = Sub(u, f)  c = Div(d, both)  e = Mul(d, t)  g = Mul(f, most)  h = Mul(high, f)  k = Add(f, some)
        cc = ReduceSum<keepdims = 0>(c, first)  ee = ReduceSum<keepdims = 0>(e, first)
        sum1 = Add(a, b)  sum2 = Add(cc, ee)  sum3 = Add(g, h)  sum4 = Add(sum1, sum2)  sum5 = Add(sum3, k)  sum6 = Add(sum4, sum5)
        v = Cast<to = 10>(t)  y = Cast<to = 10>(sum6) }"""  # noqa: E501


def test_a_weight_takes_part_at_every_rank_that_it_is_broadcast_to():
    """Once at each rank, whatever else reads it; what is not made of weights and constants element by element stays,
    and so do operands of full rank."""
    model = onnx.parser.parse_model(SEVERAL)
    region = as_one_region(model)
    assert {name for name, _, _ in fp32_broadcasts(model)} == {"t", "u", "both", "most", "some", "long"}
    assert {name for name, _, _ in fp32_broadcasts(region)} == {"most", "some", "long"}
    reshaped = [node.input[0] for node in region.graph.node if node.op_type == "Reshape"]
    assert sorted(reshaped) == ["w", "w", "w2", "y/all"]  # w at ranks 2 and 3, w2 at 3, and the end
    made = {output for node in region.graph.node for output in node.output}
    # nothing is computed in vain, but for half a Split
    read = {name for node in region.graph.node for name in node.input} | {"v", "y", "low"}
    assert made <= read and {tensor.name for tensor in region.graph.initializer} <= read
    random = np.random.default_rng(0)
    shapes = {"x": (3, 4), "z": (2, 3, 4), "w": (4,), "w2": (1, 4), "w3": (2, 4), "x2": (4, 3), "scale": (3,)}
    feeds = {name: random.standard_normal(shape).astype("f2") for name, shape in shapes.items()}
    for before, after in zip(compute(model, feeds).values(), compute(region, feeds).values(), strict=True):
        np.testing.assert_array_equal(before.view("u2"), after.view("u2"))


def test_a_copy_that_computes_something_else_is_not_built(graphs, monkeypatch):
    def wrong(graph):
        next(node for node in graph.nodes if node.op_type == "Sub").op_type = "Add"
        return True

    with monkeypatch.context() as patch:
        proven = []
        patch.setattr(
            one_region, "check_same", lambda model, prepared: proven.append((model.graph.name, prepared.model))
        )
        for model in (onnx.parser.parse_model(SEVERAL), graphs("llama")["exit"]):
            assert as_one_region(model)
    assert [name for name, _ in proven] == ["g"]  # what only got another end is not
    monkeypatch.setattr(one_region, "_bring_to_rank", wrong)
    with pytest.raises(CheckError, match="^graph g: output y: expected the rewritten graph to give the same within"):
        as_one_region(onnx.parser.parse_model(SEVERAL))


@pytest.mark.parametrize(
    ("family", "precision", "name"),
    [
        ("llama", "fp16", "embedding"),
        ("llama (biases)", "fp32", "middle"),
        pytest.param("gemma3 (norms in fp32 to the end, scaled embedding)", "fp32", "exit", marks=pytest.mark.long),
    ],
)
def test_graphs_that_need_none_have_none(graphs, family, precision, name):
    """A Gather at the end is there already; fp32 is not built so."""
    assert as_one_region(graphs(family, precision)[name]) is None


@pytest.mark.parametrize("output", ["float16[n, 2, 4] y", "float16[n, m] y", "float[n, 4] y"])
def test_an_output_of_another_form_is_left(output):
    text = f'<ir_version: 8, opset_import: ["": 17]> g ({output.replace("y", "x")}) => ({output}) {{ y = Identity(x) }}'
    assert as_one_region(onnx.parser.parse_model(text)) is None


def test_what_reads_the_output_goes_on_reading_it():
    text = (
        '<ir_version: 8, opset_import: ["": 17]> g (float16[n, 4] x) => (float[n, 4] z, float16[n, 4] y) '
        "{ y = Neg(x)  w = Cast<to = 1>(y)  z = Neg(w) }"
    )
    model = onnx.parser.parse_model(text)
    values = np.arange(12, dtype=np.float16).reshape(3, 4)
    z, y = open_session(as_one_region(model).SerializeToString()).run(None, {"x": values})
    np.testing.assert_array_equal(y, -values)
    np.testing.assert_array_equal(z, values.astype(np.float32))
