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
    "phi3 (one tensor for q, k and v)": {"model_type": "phi3", **BASE, "pad_token_id": 0},
    "gemma3 (queries and keys in fp32, scaled embedding)": {"model_type": "gemma3_text", **BASE, "head_dim": 8, "query_pre_attn_scalar": 8},
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


@pytest.mark.parametrize(
    ("family", "precision", "name"),
    [("llama", "fp16", "embedding"), ("llama", "fp32", "middle"), ("gemma3 (queries and keys in fp32, scaled embedding)", "fp32", "exit")],
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
