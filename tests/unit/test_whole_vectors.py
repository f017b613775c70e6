"""Angles in whole vectors: the same values, whatever number of rows they are computed beside."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from lockstep.backends.onnxruntime.whole_vectors import pad_angles
from lockstep.onnx_tools.sessions import open_session


def graph(size):
    """cos and sin of 2 x."""
    nodes = [
        helper.make_node("Add", ["x", "x"], ["angles"]),
        helper.make_node("Cos", ["angles"], ["cos"]),
        helper.make_node("Sin", ["angles"], ["sin"]),
    ]
    io = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size]) for name in ("x", "cos", "sin")]
    made = helper.make_graph(nodes, "angles", io[:1], io[1:])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def rows_differ(model, size):
    session = open_session(model.SerializeToString(), 1)
    x = np.random.default_rng(0).uniform(0, 300, (64, size)).astype(np.float32)
    whole = session.run(None, {"x": x})
    np.testing.assert_allclose(whole, [np.cos(2 * x), np.sin(2 * x)], atol=1e-6)
    return any(
        not np.array_equal(one, all_of_them[row : row + 1])
        for row in range(64)
        for one, all_of_them in zip(session.run(None, {"x": x[row : row + 1]}), whole)
    )


@pytest.mark.parametrize("size", [1, 3, 6, 9])
def test_a_row_has_the_same_bits_alone(size):
    model = graph(size)
    assert rows_differ(model, size)  # what it is for: when this fails, ONNX Runtime needs no help any more
    assert not rows_differ(pad_angles(model), size)


@pytest.mark.parametrize("size", [4, 20, 40, 128])
def test_whole_vectors_stay_as_they_are(size):
    model = graph(size)
    before = model.SerializeToString()
    assert pad_angles(model) is model and model.SerializeToString() == before and not rows_differ(model, size)
