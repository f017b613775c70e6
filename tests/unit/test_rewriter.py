"""The class that passes over graphs are written with: order, names and what is left of a graph that was changed."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from lockstep.onnx_tools.rewriter import Rewriter, is_linear, typed_values, upstream

TEXT = """<ir_version: 10, opset_import: ["": 20]>
g (float[n, 4] x, float[3, 4] w, float[3] b) => (float[n, 3] y)
<float half = {0.5}>
{ a = Relu(x)  p = Gemm<transB = 1>(a, w, b)  y = Mul(p, half) }"""


@pytest.fixture
def model() -> onnx.ModelProto:
    return onnx.parser.parse_model(TEXT)


def names(values) -> list[str]:
    return [value.name for value in values]


def test_a_replaced_node_leaves_nothing_behind_that_only_it_read(model):
    graph = Rewriter(model)
    (product,) = filter(is_linear, graph.nodes)
    two = graph.constant("two", np.array(2, np.float32))
    graph.replace(
        product,
        helper.make_node("Mul", [product.input[0], two], ["a2"]),
        helper.make_node("Gemm", ["a2", "w"], ["p"], transB=1),
    )
    changed = graph.finish()
    assert [node.op_type for node in changed.graph.node] == ["Relu", "Mul", "Gemm", "Mul"]
    assert names(changed.graph.input) == ["x", "w"] and names(changed.graph.initializer) == ["half", "two"]
    assert model == onnx.parser.parse_model(TEXT), "the model itself stays as it is"


def test_an_input_is_replaced_in_its_place_and_another_is_added_behind_all(model):
    graph = Rewriter(model)
    scales = helper.make_tensor_value_info("s", TensorProto.FLOAT, [3, 1])
    graph.replace_input("w", helper.make_tensor_value_info("w", TensorProto.FLOAT, [3, 4]), scales)
    graph.input("z", TensorProto.FLOAT, ["n", 3])
    assert graph.shape("z") == [0, 3] and graph.element("z") == TensorProto.FLOAT
    graph.prepend(helper.make_node("Mul", ["w", "s"], ["scaled"]))
    graph.consumers["w"][0].input[1] = "scaled"
    graph.nodes[-1].output[0] = "inner"
    graph.append(helper.make_node("Add", ["inner", "z"], ["y"]))
    changed = graph.finish()
    assert names(changed.graph.input) == ["x", "w", "s", "b", "z"]
    assert [node.op_type for node in changed.graph.node] == ["Mul", "Relu", "Gemm", "Mul", "Add"]


def test_a_value_that_becomes_an_input_cuts_off_what_made_it(model):
    graph = Rewriter(model)
    graph.inputs["p"] = helper.make_tensor_value_info("p", TensorProto.FLOAT, ["n", 3])
    changed = graph.finish()
    assert names(changed.graph.input) == ["p"] and [node.op_type for node in changed.graph.node] == ["Mul"]
    assert upstream(graph.nodes, ["y"], ["p"]) == {"y", "p", "half"}


def test_a_graph_that_is_not_valid_is_refused(model):
    graph = Rewriter(model)
    graph.replace(graph.nodes[0])
    with pytest.raises(onnx.checker.ValidationError, match="a"):
        graph.finish()
    assert [node.op_type for node in graph.finish(check=False).graph.node] == ["Gemm", "Mul"]


def test_types_and_shapes_of_all_values_are_known(model):
    dims = {name: dims for name, (_, dims) in typed_values(model).items()}
    assert dims == {
        "x": ("n", 4), "w": (3, 4), "b": (3,), "y": ("n", 3), "half": (), "a": ("n", 4), "p": ("n", 3)
    }  # fmt: skip
